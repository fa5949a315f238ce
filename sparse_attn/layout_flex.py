"""FlexAttention's BlockMask, to and from lists of blocks.

Flex calls a block partial when its ``mask_mod`` masks some of it, and also when it hangs over the
end of a length. Only the first kind matters here, so blocks at the ends are looked at again with
the ``mask_mod``. Called by BlockLayout's ``from_flex`` and ``to_flex``.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["block_mask_from", "masked_in_part"]


def _every_pair(block_mask: Any, like: torch.Tensor, rows: range, keys: range) -> torch.Tensor:
    """Whether the ``mask_mod`` allows each pair of a strip, bool ``(B, H, rows, keys)``."""
    from torch.nn.attention.flex_attention import create_mask

    def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return block_mask.mask_mod(b, h, q_idx + rows.start, kv_idx + keys.start)

    batch, heads = like.shape[:2]
    mask = create_mask(shifted, batch, heads, len(rows), len(keys), device=like.device)
    return mask.expand(batch, heads, len(rows), len(keys))


def _whole(pairs: torch.Tensor, block_q: int, block_kv: int) -> torch.Tensor:
    """Whether every pair of each block is allowed; what hangs over counts as allowed."""
    rows, keys = pairs.shape[-2:]
    tail = (0, -keys % block_kv, 0, -rows % block_q)
    pairs = torch.nn.functional.pad(pairs, tail, value=True)
    return pairs.unflatten(-1, (-1, block_kv)).all(-1).unflatten(-2, (-1, block_q)).all(-2)


def masked_in_part(block_mask: Any, partial: torch.Tensor) -> torch.Tensor:
    """Drop the blocks of ``partial (B, H, NQ, NKV)`` that only hang over an end of a length."""
    Sq, Skv = block_mask.seq_lengths
    block_q, block_kv = block_mask.BLOCK_SIZE
    last_row, last_key = Sq // block_q * block_q, Skv // block_kv * block_kv
    partial = partial.clone()
    if last_row < Sq:
        pairs = _every_pair(block_mask, partial, range(last_row, Sq), range(Skv))
        partial[:, :, -1:] &= ~_whole(pairs, block_q, block_kv)
    if last_key < Skv:
        pairs = _every_pair(block_mask, partial, range(Sq), range(last_key, Skv))
        partial[..., -1:] &= ~_whole(pairs, block_q, block_kv)
    return partial


def block_mask_from(layout: Any, Sq: int, Skv: int) -> Any:
    """Make the BlockMask of a BlockLayout: every listed block full, with a ``mask_mod``."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = layout.to_mask()
    batch, heads, _, num_kv = mask.shape
    block_q, block_kv = layout.block_q, layout.block_kv

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask[b % batch, h % heads, q_idx // block_q, kv_idx // block_kv]

    missing = max(0, num_kv - layout.indices.shape[-1])
    indices = torch.nn.functional.pad(layout.indices, (0, missing))
    return BlockMask.from_kv_blocks(
        torch.zeros_like(layout.counts),
        torch.zeros_like(indices),
        layout.counts,
        indices,
        BLOCK_SIZE=(block_q, block_kv),
        mask_mod=mask_mod,
        seq_lengths=(Sq, Skv),
    )

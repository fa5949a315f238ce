"""FlexAttention's BlockMask of a layout; called by ``BlockLayout.to_flex``."""

from __future__ import annotations

from typing import Any

import torch

from ._checks import check_length, refuse
from .layout_bits import seen_by_bits
from .layout_entries import OWNER

__all__ = ["block_mask_from"]


def block_mask_from(layout: Any, Sq: int, Skv: int, query_heads: int | None) -> Any:
    """Make the BlockMask of a BlockLayout, with partial blocks and a ``mask_mod``.

    FlexAttention counts query heads: with `query_heads` each list of a key head stands for its own.
    """
    from torch.nn.attention.flex_attention import BlockMask

    mask = layout.to_mask()
    block_q, block_kv, bits = layout.block_q, layout.block_kv, layout.bits
    row = torch.full_like(mask, -1, dtype=torch.int32)
    if bits is not None:
        row = layout._spread(layout.partial, -1)
    group = _group(mask.shape[1], query_heads)
    mask, row = (tensor.repeat_interleave(group, dim=1) for tensor in (mask, row))
    batch, heads = mask.shape[:2]

    def by_block(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask[b % batch, h % heads, q_idx // block_q, kv_idx // block_kv]

    def by_bits(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        bits_row = row[b % batch, h % heads, q_idx // block_q, kv_idx // block_kv]
        seen = seen_by_bits(bits, bits_row, q_idx % block_q, kv_idx % block_kv)
        return by_block(b, h, q_idx, kv_idx) & seen

    def lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        listed = type(layout).from_mask(blocks, block_q, block_kv)
        return listed.counts, listed.indices

    return BlockMask.from_kv_blocks(
        *lists(mask & (row >= 0)),
        *lists(mask & (row < 0)),
        BLOCK_SIZE=(block_q, block_kv),
        mask_mod=by_block if bits is None else by_bits,
        seq_lengths=(Sq, Skv),
    )


def _group(lists: int, query_heads: int | None) -> int:
    """Return how many query heads share each of a layout's lists; one list serves all as it is."""
    if query_heads is None:
        return 1
    count = check_length(OWNER, "heads", query_heads, 1)
    if count % max(lists, 1):
        raise refuse(OWNER, f"heads as a multiple of the layout's {lists}", count)
    return 1 if lists == 1 else count // max(lists, 1)

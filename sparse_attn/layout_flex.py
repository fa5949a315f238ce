"""FlexAttention's BlockMask of a layout; called by ``BlockLayout.to_flex``."""

from __future__ import annotations

from typing import Any

import torch

from .layout_bits import seen_by_bits

__all__ = ["block_mask_from"]


def block_mask_from(layout: Any, Sq: int, Skv: int) -> Any:
    """Make the BlockMask of a BlockLayout, with partial blocks and a ``mask_mod``."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = layout.to_mask()
    batch, heads = mask.shape[:2]
    block_q, block_kv, bits = layout.block_q, layout.block_kv, layout.bits
    row = torch.full_like(mask, -1, dtype=torch.int32)
    if bits is not None:
        row = layout._spread(layout.partial, -1)

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

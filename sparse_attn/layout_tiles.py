"""The tiles that engines visit for a layout: its blocks, which need no compiled module."""

from __future__ import annotations

import torch

from ._tiles import TileRun
from .layout import BlockLayout

__all__ = ["listed_blocks", "listed_runs"]


def listed_blocks(layout: BlockLayout, Sq: int, Skv: int, is_causal: bool) -> torch.Tensor:
    """Return which blocks of a layout are visited, bool ``(B|1, heads, NQ, NKV)``."""
    visited = layout.to_mask()
    if not is_causal:
        return visited
    last = torch.arange(visited.shape[-2], device=visited.device) * layout.block_q
    last = (last + layout.block_q).clamp(max=Sq) - 1 + Skv - Sq
    begin = torch.arange(visited.shape[-1], device=visited.device) * layout.block_kv
    return visited & (begin <= last[:, None])


def listed_runs(layout: BlockLayout, mask: torch.Tensor, is_causal: bool) -> list[TileRun]:
    """Return a run for each visited block of a layout's first batch entry and head.

    Parameters
    ----------
    layout : BlockLayout
    mask : Tensor
        bool ``(Sq, Skv)``, the allowed pairs of that head.
    is_causal : bool
    """
    runs = []
    visited = listed_blocks(layout, mask.shape[0], mask.shape[1], is_causal)[0, 0]
    for i, j in visited.nonzero().tolist():
        row, key = i * layout.block_q, j * layout.block_kv
        block = mask[row : row + layout.block_q, key : key + layout.block_kv]
        runs.append(
            TileRun(row, 1, block.shape[0], key, 1, block.shape[1], 1, not bool(block.all()))
        )
    return runs

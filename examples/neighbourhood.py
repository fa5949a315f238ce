"""Local attention on a video-sized grid: each token sees its neighbours in time, height and width.

Taken row by row, the neighbours of a token lie scattered over the sequence, and blocks of the
sequence see almost everything. Taken tile by tile (`BlockLayout.local_nd`), they are a few blocks.
Run it with ``python examples/neighbourhood.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

import sparse_attn as sa

VIDEO = (4, 64, 96)  # frames, height, width: 24576 tokens
WINDOW = (1, 6, 6)  # to both sides of each axis
TILE = (2, 8, 8)  # 128 tokens


def sees(q_idx: torch.Tensor, kv_idx: torch.Tensor, video: tuple[int, ...]) -> torch.Tensor:
    """Whether two tokens, numbered row by row, are neighbours."""
    seen = torch.ones((), dtype=torch.bool)
    for size, side in zip(reversed(video), reversed(WINDOW), strict=True):
        seen = seen & ((q_idx % size - kv_idx % size).abs() <= side)
        q_idx, kv_idx = q_idx // size, kv_idx // size
    return seen


def seconds(function: Callable[[], torch.Tensor]) -> float:
    """Time one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main() -> None:
    """Compare both orders of the tokens, and check the result against a dense mask."""
    tokens = math.prod(VIDEO)
    query, key, value = torch.randn(3, 1, 1, tokens, 64).unbind()
    tiled, order = sa.BlockLayout.local_nd(VIDEO, WINDOW, TILE)
    rowwise = sa.BlockLayout.from_mask_mod(
        lambda b, h, q_idx, kv_idx: sees(q_idx, kv_idx, VIDEO), 1, 1, tokens, tokens, 128, 128
    )
    for name, layout in (("row by row", rowwise), ("tile by tile", tiled)):
        visited = layout.to_mask().double().mean()
        print(f"{tokens} tokens {name}: {visited:.1%} of the blocks are visited")
    moved = [tensor[:, :, order] for tensor in (query, key, value)]
    dense = seconds(lambda: sa.fused_attention(query, key, value))
    sparse = seconds(lambda: sa.block_sparse_attention(moved[0], moved[1], moved[2], tiled))
    print(f"tile by tile, exact: {dense / sparse:.1f}x as fast as dense")

    # Blocks at the rim of a neighbourhood carry a bit for each pair.
    small = (2, 16, 24)
    exact, order = sa.BlockLayout.local_nd(small, WINDOW, TILE)
    part = [tensor[:, :, : math.prod(small)] for tensor in (query, key, value)]
    moved = [tensor[:, :, order] for tensor in part]
    out = sa.block_sparse_attention(moved[0], moved[1], moved[2], exact)
    token = torch.arange(math.prod(small))
    mask = sees(token[:, None], token, small)
    want = sa.fused_attention(part[0], part[1], part[2], attn_mask=mask)
    error = (out[:, :, order.argsort()] - want).abs().max()
    print(f"back in the order of the grid: {error:.1e} from dense with a mask")


if __name__ == "__main__":
    main()

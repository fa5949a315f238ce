"""Neighbourhoods on a grid of tokens (images, video) as block layouts.

Tokens are taken tile by tile, so that a tile's neighbourhood is a few key blocks instead of a few
keys in every row of the image; blocks at its rim carry bits. Equal blocks are looked at once: what
two blocks see of each other depends on their shapes and distance alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._checks import (
    as_device,
    check_integer,
    check_kind,
    check_length,
    check_window,
    clamped,
    refuse,
)
from ._part_of import part_of
from .layout_bits import PAIRS, Blocks, existing_pairs, judged
from .layout_entries import OWNER, Device, Layout

__all__ = ["GridLayouts"]

_FAR = 2**30  # where tokens lie that do not exist


@part_of("BlockLayout")
class GridLayouts:
    """The class method of `BlockLayout` for grids."""

    @classmethod
    def local_nd(
        cls: type[Layout],
        shape: Sequence[int],
        window: Any,
        tile: Sequence[int],
        device: Device = None,
        whole: bool = False,
    ) -> tuple[Layout, torch.Tensor]:
        """Make the neighbourhoods of a grid of tokens, and the order in which it takes the tokens.

        The token at c sees those at c' with ``-before <= c' - c <= after`` on every axis. At the
        borders the window is cut off; NATTEN (Hassani et al. 2023) moves it inside instead, so that
        all tokens see equally many: the same ``2 * side + 1`` tokens an axis away from the borders.

        Parameters
        ----------
        shape : sequence of int
            Tokens along each axis, such as (height, width) or (frames, height, width).
        window : int, or sequence of int, None or (before, after)
            Sides of each axis: an int is both sides, None has no limit; one int serves all axes.
        tile : sequence of int
            Tokens of a tile along each axis. Their product is the block size, a multiple of 16;
            tiles at the end of an axis may be smaller.
        device : torch.device, optional
            Where the lists are made.
        whole : bool
            See the blocks at the rim whole instead: without bits, and a superset.

        Returns
        -------
        layout : BlockLayout
            For tokens in the order below, ``math.prod(shape)`` queries and keys.
        order : Tensor
            int64 ``(tokens,)``: place n of the new order holds token ``order[n]`` of the grid, in
            row-major order. ``x[..., order, :]`` reorders and ``order.argsort()`` undoes it.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; axes that do not agree; a number out of range.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import BlockLayout, BlockSparse, block_sparse_attention
        >>> layout, order = BlockLayout.local_nd((12, 20), window=3, tile=(4, 4))
        >>> q, k, v = (torch.randn(1, 2, 240, 16)[:, :, order] for _ in range(3))
        >>> out = block_sparse_attention(q, k, v, layout)[:, :, order.argsort()]
        >>> int(BlockSparse(layout).mask(240, 240).sum(-1).max())  # (3 + 1 + 3) squared
        49
        """
        sizes, tiles, sides = _checked(shape, window, tile)
        check_kind(OWNER, "whole", whole, bool, "a bool")
        block, tokens = math.prod(tiles), math.prod(sizes)
        device = torch.get_default_device() if device is None else as_device(OWNER, device)
        if device.type == "meta":
            raise refuse(OWNER, "a device with contents", device)
        place = torch.stack(
            torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij"),
            dim=-1,
        ).flatten(0, -2)  # (tokens, axes)
        order = _by_tile(place, sizes, tiles)
        blocks = _blocks(place[order], sides, block, tokens, whole)
        return cls._of_blocks(blocks, block, block), order


def _checked(
    shape: Sequence[int], window: Any, tile: Sequence[int]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Return sizes, tiles and sides of each axis; sides without a limit are large numbers."""
    for name, value in (("shape", shape), ("tile", tile)):
        check_kind(OWNER, name, value, Sequence, "a sequence of ints")
    sizes = [check_integer(OWNER, "shape", size, 1) for size in shape]
    tiles = [check_integer(OWNER, "tile", size, 1) for size in tile]
    if not sizes or len(tiles) != len(sizes):
        raise refuse(OWNER, f"tile of {max(len(sizes), 1)} axes as shape has", tuple(tile))
    check_length(OWNER, "the tokens of shape", math.prod(sizes))
    check_length(OWNER, "the tokens of tile", math.prod(tiles))
    if math.prod(tiles) % 16:
        raise refuse(OWNER, "tile of a multiple of 16 tokens", tuple(tile))
    windows = window if isinstance(window, (tuple, list)) else [window] * len(sizes)
    if len(windows) != len(sizes):
        raise refuse(OWNER, f"window with sides for each of {len(sizes)} axes", window)
    pairs = [(None, None) if sides is None else check_window(OWNER, sides) for sides in windows]
    return sizes, tiles, [tuple(_FAR if s is None else clamped(s) for s in p) for p in pairs]  # type: ignore[misc]


def _by_tile(place: torch.Tensor, sizes: list[int], tiles: list[int]) -> torch.Tensor:
    """Order tokens by tile, and inside a tile as before."""
    tile = torch.zeros_like(place[:, 0])
    for axis, (size, length) in enumerate(zip(sizes, tiles, strict=True)):
        tile = tile * -(-size // length) + place[:, axis] // length
    return tile.argsort(stable=True)


def _blocks(
    place: torch.Tensor, sides: list[tuple[int, int]], block: int, tokens: int, whole: bool
) -> Blocks:
    """Make the blocks ``(1, 1, N, N)`` of tokens at ``place (tokens, axes)``."""
    count, axes = -(-tokens // block), len(sides)
    device = place.device
    before, after = torch.tensor(sides, device=device).T
    exists = torch.arange(count * block, device=device).view(count, block) < tokens
    place = torch.nn.functional.pad(place, (0, 0, 0, count * block - tokens))
    place = place.view(count, block, axes)
    low = place.masked_fill(~exists[..., None], _FAR).amin(1)  # (N, axes)
    high = place.masked_fill(~exists[..., None], -1).amax(1)
    visited = torch.ones(count, count, dtype=torch.bool, device=device)
    for axis in range(axes):
        first, last = low[:, axis] - before[axis], high[:, axis] + after[axis]
        visited &= (first[:, None] <= high[:, axis]) & (low[:, axis] <= last[:, None])
    q, k = visited.nonzero(as_tuple=True)
    # What block q sees of block k follows from both shapes and their distance.
    inside = (place - low[:, None]).masked_fill(~exists[..., None], -1)
    kind = torch.unique(inside.flatten(1), dim=0, return_inverse=True)[1]
    case = torch.stack([kind[q], kind[k], *(low[k] - low[q]).T], -1)
    cases, which = torch.unique(case, dim=0, return_inverse=True)
    example = torch.zeros(len(cases), dtype=torch.long, device=device)
    example[which] = torch.arange(len(which), device=device)
    existing = existing_pairs(tokens, tokens, block, block, device)

    def groups() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for some in example.split(max(1, PAIRS // block**2)):
            rows, keys = q[some], k[some]
            allowed = exists[rows][:, :, None] & exists[keys][:, None]
            for axis in range(axes):
                step = place[keys][:, None, :, axis] - place[rows][:, :, None, axis]
                allowed &= (-before[axis] <= step) & (step <= after[axis])
            yield allowed, existing[rows, keys]

    found = judged(groups(), whole)
    rows = torch.full_like(visited, -1, dtype=torch.int32)
    visited[q, k], rows[q, k] = found.visited[which], found.rows[which]
    return Blocks(visited[None, None], rows[None, None], found.bits)

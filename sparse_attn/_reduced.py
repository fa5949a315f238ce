"""Pictures of long masks and layouts, reduced to points: what share of a point is allowed.

A point stands for neighbouring queries and keys (or blocks of them). Of a long mask one row and one
column of every point are looked at, so that nothing of Sq x Skv is made and no line is missed:
diagonals and columns meet every row, global rows meet every column.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["EXACT", "reduced_lists", "reduced_mask"]

#: Queries or keys of a picture that is not reduced, at most.
EXACT = 1024
#: Points of a side, about as many as a figure has pixels.
_POINTS = 400
#: Pairs of a mask that is looked at whole, at most, and pairs of one step.
_WHOLE, _STEP = 2**26, 2**22

_Sees = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _edges(length: int) -> torch.Tensor:
    """Where points begin, and the length: int64 ``(points + 1,)``."""
    points = min(length, _POINTS)
    return torch.arange(points + 1, device="cpu") * length // points


def _any_place(edges: torch.Tensor) -> torch.Tensor:
    """Choose a place in every point; in even steps all would meet a column, or none."""
    generator = torch.Generator(edges.device).manual_seed(0)
    part = torch.rand(len(edges) - 1, generator=generator, dtype=torch.float64, device=edges.device)
    return torch.minimum(edges[:-1] + (part * edges.diff()).long(), edges[1:] - 1)


def _sums(counts: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension over each point; no sum needs more than 32 bits, which are faster."""
    ends = counts.cumsum(-1, dtype=torch.int32)[..., edges[1:] - 1]
    return ends.diff(prepend=torch.zeros_like(ends[..., :1]))


def _row_counts(sees: _Sees, rows: torch.Tensor, keys: int) -> torch.Tensor:
    """Count the keys of each point that some rows see, ``(rows, points)``."""
    every, edges = torch.arange(keys, device="cpu"), _edges(keys)
    steps = rows.split(max(1, _STEP // keys))
    return torch.cat([_sums(sees(some, every).cpu(), edges) for some in steps])


def reduced_mask(sees: _Sees, Sq: int, Skv: int) -> torch.Tensor:
    """Return the share of allowed pairs of each point, ``(points, points)``; of a long mask about.

    Parameters
    ----------
    sees : callable
        Of int64 ``(rows,)`` and ``(keys,)``, bool ``(rows, keys)``.
    Sq, Skv : int
        Queries and keys, at least 1.
    """
    rows, keys = _edges(Sq), _edges(Skv)
    if Sq * Skv <= _WHOLE:
        counts = _row_counts(sees, torch.arange(Sq, device="cpu"), Skv)
        return _sums(counts.mT, rows).mT / (rows.diff()[:, None] * keys.diff())
    by_row = _row_counts(sees, _any_place(rows), Skv) / keys.diff()
    by_key = _row_counts(lambda key, row: sees(row, key).mT, _any_place(keys), Sq) / rows.diff()
    # A sampled row gives the share of columns, a sampled column that of global rows. The other
    # sample, where it lies on such a line, is full, and elsewhere empty.
    least, most = torch.minimum(by_row, by_key.mT), torch.maximum(by_row, by_key.mT)
    return torch.where(least > 0, least, most)


def reduced_lists(row: torch.Tensor, column: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the share of each point that is listed, ``(points, points)``.

    Parameters
    ----------
    row, column : Tensor
        int64 ``(entries,)``, places of listed blocks, none twice.
    rows, columns : int
        Blocks of a side, at least 1.
    """
    edges = _edges(rows), _edges(columns)
    at_row, at_column = (
        torch.bucketize(place, edge, right=True) - 1
        for place, edge in zip((row, column), edges, strict=True)
    )
    shape = len(edges[0]) - 1, len(edges[1]) - 1
    counts = torch.bincount(at_row * shape[1] + at_column, minlength=shape[0] * shape[1])
    return counts.view(shape) / (edges[0].diff()[:, None] * edges[1].diff())

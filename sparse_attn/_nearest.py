"""`nearest`: the pattern that comes closest to a mask, and what it misses."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ._checks import check_tensor, refuse
from .patterns import Band, Dilated, Full, Pattern, Strided

__all__ = ["Nearest", "nearest"]


class Nearest(NamedTuple):
    """Answer of `nearest`.

    Attributes
    ----------
    pattern : Pattern
    missing : float
        Share of the mask's pairs that the pattern does not see.
    extra : float
        Share of the pattern's pairs that the mask does not allow.

    Examples
    --------
    >>> from sparse_attn import Full
    >>> from sparse_attn._nearest import Nearest
    >>> Nearest(Full(), 0.0, 0.5).missing
    0.0
    """

    pattern: Pattern
    missing: float
    extra: float


def nearest(mask: torch.Tensor) -> Nearest:
    """Return the pattern of windows and columns that differs from a mask in the fewest pairs.

    Sides, steps, sinks and global tokens are read off the diagonals, columns and rows that are more
    than half allowed. For a mask that no such pattern is near, `BlockLayout.from_token_mask` is
    exact.

    Parameters
    ----------
    mask : Tensor
        bool ``(Sq, Skv)``, true where query i sees key j.

    Returns
    -------
    Nearest
        ``(pattern, missing, extra)``.

    Raises
    ------
    TypeError, ValueError
        No tensor; another shape or dtype.

    Examples
    --------
    >>> from sparse_attn import Band, nearest
    >>> nearest(Band((5, 0), sinks=2).mask(64, 64)).pattern
    Band(window=(5, 0), sinks=2, global_tokens=None)
    """
    check_tensor("nearest", "mask", mask)
    if mask.dim() != 2 or mask.dtype != torch.bool or not mask.numel():
        got = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise refuse("nearest", "mask of dtype bool and shape (Sq, Skv)", got)
    mask = mask.cpu()
    best: Nearest | None = None
    fewest = math.inf
    for pattern in _candidates(mask):
        seen = pattern.mask(*mask.shape)
        missing, extra = int((mask & ~seen).sum()), int((seen & ~mask).sum())
        if missing + extra < fewest:
            fewest = missing + extra
            best = Nearest(
                pattern, missing / max(1, int(mask.sum())), extra / max(1, int(seen.sum()))
            )
    assert best is not None
    return best


def _candidates(mask: torch.Tensor) -> list[Pattern]:
    """List patterns that fit what a mask shows, simple ones first."""
    Sq, Skv = mask.shape
    offset = torch.arange(Skv) - (torch.arange(Sq)[:, None] + Skv - Sq)  # j - p
    place = (offset + Skv).flatten()
    pairs = torch.bincount(place, minlength=2 * Skv + Sq)
    allowed = torch.bincount(place, mask.flatten().double(), minlength=2 * Skv + Sq)
    dense = ((2 * allowed > pairs) & (pairs > 0)).nonzero().flatten() - Skv
    back, ahead = (-dense[dense < 0]).tolist()[::-1], dense[dense > 0].tolist()
    left, right = _run(back, 1), _run(ahead, 1)
    windows = [(left, right), (None, 0), (None, right), (left, None), (left, 0)]
    # Columns and rows outside the window.
    outside = (offset < -left) | (offset > right)
    past = outside & (offset <= 0)
    sinks = _leading(mask, past if right == 0 and not ahead else outside, 0)
    tokens = min(_leading(mask, outside, 0), _leading(mask, outside, 1))
    found: list[Pattern] = [Full()]
    found += [Band(window) for window in windows]
    found += [Band((left, right), sinks=sinks)] if sinks else []
    found += [Band((left, right), global_tokens=tokens)] if tokens else []
    step = math.gcd(*back, *ahead)
    if step > 1:
        found.append(Dilated((_run(back, step), _run(ahead, step)), step))
    columns = (2 * (mask & past).sum(0) > past.sum(0)) & past.any(0)
    strides = {int(column) + 1 for column in columns.nonzero().flatten()[:1]}
    return found + [Strided(left + 1, stride) for stride in strides]


def _run(distances: list[int], step: int) -> int:
    """Count the first of ascending distances that are 1, 2, 3 ... steps."""
    count = 0
    while count < len(distances) and distances[count] == step * (count + 1):
        count += 1
    return count


def _leading(mask: torch.Tensor, where: torch.Tensor, dim: int) -> int:
    """Count the first columns (dim 0) or rows (dim 1) more than half allowed in `where`."""
    full = 2 * (mask & where).sum(dim) > where.sum(dim)
    counted = where.any(dim)
    return int((full | ~counted).long().cumprod(0).sum()) if bool((full & counted).any()) else 0

"""`nearest`: the pattern that comes closest to a mask, and what it misses."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ._checks import check_dense, check_kind, dtype_name, refuse
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


def nearest(mask: torch.Tensor, is_causal: bool = False) -> Nearest:
    """Return the pattern of windows and columns that differs from a mask in the fewest pairs.

    Sides, steps, sinks and the first global tokens are read off the diagonals, columns and rows
    that are more than half allowed; a side that reaches the edge of the mask has no limit. Global
    tokens elsewhere are not looked for. For a mask that no such pattern is near,
    `BlockLayout.from_token_mask` is exact.

    Parameters
    ----------
    mask : Tensor
        bool ``(Sq, Skv)``, true where query i sees key j.
    is_causal : bool
        The pattern is for calls with ``is_causal=True``, as those of a decoder: keys ahead of a
        query are not compared.

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
    >>> import torch
    >>> from sparse_attn import Band, nearest
    >>> nearest(Band((5, 0), sinks=2).mask(64, 64)).pattern
    Band(window=(5, 0), sinks=2, global_tokens=None)
    >>> nearest(torch.ones(64, 64).tril().bool(), is_causal=True).pattern
    Full()
    """
    check_dense("nearest", "mask", mask)
    if mask.dim() != 2 or mask.dtype != torch.bool or not mask.numel():
        got = f"{dtype_name(mask.dtype)} of shape {tuple(mask.shape)}"
        if mask.dim() == 4:
            got += "; that of a head is mask[0, 0]"
        raise refuse("nearest", "mask of dtype bool and shape (Sq, Skv)", got)
    if mask.is_meta:
        raise refuse("nearest", "mask with contents", "a meta tensor")
    check_kind("nearest", "is_causal", is_causal, bool, "a bool")
    with torch.device("cpu"):  # whatever torch's default device
        return _closest(mask.cpu(), is_causal)


def _closest(mask: torch.Tensor, is_causal: bool) -> Nearest:
    """Return the answer for a mask on the CPU."""
    Sq, Skv = mask.shape
    if is_causal:
        mask = mask & Full().mask(Sq, Skv, is_causal=True)
    best: Nearest | None = None
    fewest = math.inf
    for pattern in _candidates(mask):
        seen = pattern.mask(Sq, Skv, is_causal=is_causal)
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
    back, ahead = _diagonals(mask, offset)
    left, right = _run(back, 1), _run(ahead, 1)
    sides = (_side(left, 1, Skv), _side(right, 1, Sq))
    windows = [sides, (None, 0), (None, sides[1]), (sides[0], None), (sides[0], 0)]
    # Columns and rows outside the window.
    outside = (offset < -left) | (offset > right)
    past = outside & (offset <= 0)
    sinks = _leading(mask, past if right == 0 and not ahead else outside, 0)
    # Rows stand at positions from Skv - Sq on: those below 0 are never global.
    before, first = max(0, Sq - Skv), max(0, Skv - Sq)
    rows = first + _leading(mask[before:], outside[before:], 1)
    tokens = min(_leading(mask, outside, 0), rows)
    found: list[Pattern] = [Full()]
    found += [Band(window) for window in windows]
    found += [Band(sides, sinks=sinks)] if sinks else []
    found += [Band(sides, global_tokens=tokens)] if tokens else []
    found += [Band(sides, sinks=sinks, global_tokens=tokens)] if sinks > tokens > 0 else []
    # Diagonals far back hold little but sinks, so steps, and windows of short masks, are read
    # beside these: beside the columns, or the first keys of the first or the last query.
    runs = mask[[0, -1]].long().cumprod(1).sum(1).tolist()
    for sinks in sorted({0, _leading(mask, offset <= 0, 0), *runs} - {Skv}):
        back, ahead = _diagonals(mask[:, sinks:], offset[:, sinks:])
        step = math.gcd(*back, *ahead)
        taps = (_side(_run(back, step), step, Skv), _side(_run(ahead, step), step, Sq))
        if step == 1:
            found.append(Band(taps, sinks=sinks))
        elif step > 1:
            found.append(Dilated(taps, step, sinks=sinks))
    columns = (2 * (mask & past).sum(0) > past.sum(0)) & past.any(0)
    strides = {int(column) + 1 for column in columns.nonzero().flatten()[:1]}
    # With steps of 2 the columns alone may fill one diagonal more than the window.
    local = [length for length in (left, left + 1) if length]
    return found + [Strided(length, stride) for stride in strides for length in local]


def _diagonals(mask: torch.Tensor, offset: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the distances of the diagonals that are more than half allowed, back and ahead."""
    far = int(offset.abs().max())
    place = (offset + far).flatten()
    pairs = torch.bincount(place, minlength=2 * far + 1)
    allowed = torch.bincount(place, mask.flatten().double(), minlength=2 * far + 1)
    dense = ((2 * allowed > pairs) & (pairs > 0)).nonzero().flatten() - far
    return (-dense[dense < 0]).tolist()[::-1], dense[dense > 0].tolist()


def _run(distances: list[int], step: int) -> int:
    """Count the first of ascending distances that are 1, 2, 3 ... steps."""
    count = 0
    while count < len(distances) and distances[count] == step * (count + 1):
        count += 1
    return count


def _side(count: int, step: int, length: int) -> int | None:
    """Return a side of a window, None where the next tap would lie past the mask's last pair."""
    return None if count and step * (count + 1) >= length else count


def _leading(mask: torch.Tensor, where: torch.Tensor, dim: int) -> int:
    """Count the first columns (dim 0) or rows (dim 1) more than half allowed in `where`."""
    full = 2 * (mask & where).sum(dim) > where.sum(dim)
    counted = where.any(dim)
    return int((full | ~counted).long().cumprod(0).sum()) if bool((full & counted).any()) else 0

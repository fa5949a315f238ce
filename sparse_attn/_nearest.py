"""`nearest`: the pattern that comes closest to a mask, and what it misses."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    that are more than half allowed, then off those that are allowed whole, which finds every mask
    of such a pattern exactly; a side that reaches the edge of the mask has no limit. Global tokens
    elsewhere are not looked for. For a mask that no such pattern is near,
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
    pairs = Full().mask(Sq, Skv, is_causal=is_causal)
    mask = mask & pairs
    best: Nearest | None = None
    fewest: float = math.inf
    tried: set[Pattern] = set()
    for pattern in _candidates(mask, pairs):
        if pattern in tried:
            continue
        tried.add(pattern)
        seen = pattern.mask(Sq, Skv, is_causal=is_causal)
        missing, extra = _count(mask & ~seen), _count(seen & ~mask)
        if missing + extra < fewest:
            fewest = missing + extra
            best = Nearest(pattern, missing / max(1, _count(mask)), extra / max(1, _count(seen)))
        if not fewest:
            break
    assert best is not None
    return best


def _candidates(mask: torch.Tensor, pairs: torch.Tensor) -> Iterator[Pattern]:
    """Yield patterns that fit what a mask shows of the pairs of a call, simple ones first.

    Lines that are more than half allowed show a pattern through noise. Those without a gap are, in
    the mask of a pattern, at least its own, so that together they are the whole mask.
    """
    yield Full()
    for one_in in (2, mask.numel()):
        yield from _read(mask, pairs, one_in)


def _read(mask: torch.Tensor, pairs: torch.Tensor, one_in: int) -> Iterator[Pattern]:
    """Yield patterns of the lines of which fewer than one in `one_in` of the pairs is missing."""
    Sq, Skv = mask.shape
    back, ahead = _diagonals(mask, pairs, one_in)
    left, right = _run(back, 1), _run(ahead, 1)
    sides = (_side(left, 1, Skv), _side(right, 1, Sq))
    for window in (sides, (None, 0), (None, sides[1]), (sides[0], None), (sides[0], 0)):
        yield Band(window)
    # Columns and rows outside the window; query i stands at key i + first.
    first = Skv - Sq
    past = pairs.tril(first - left - 1)
    outside = past | pairs.triu(first + right + 1)
    sinks = _leading(mask, outside, 0, one_in)
    # Rows at positions below 0 are never global.
    before = max(0, -first)
    rows = max(0, first) + _leading(mask[before:], outside[before:], 1, one_in)
    tokens = min(sinks, rows)
    if sinks:
        yield Band(sides, sinks=sinks)
    if tokens:
        yield Band(sides, global_tokens=tokens)
        yield Band(sides, sinks=sinks, global_tokens=tokens)
    # Diagonals far back hold little but sinks, so steps, and windows of short masks, are read
    # beside these: beside the columns, or the first keys of the first or the last query.
    runs = mask[[0, -1]].long().cumprod(1).sum(1).tolist()
    columns = (_leading(mask, where, 0, one_in) for where in (pairs, pairs.tril(first)))
    for sinks in sorted({0, *columns, *runs} - {Skv}):
        back, ahead = _diagonals(mask[:, sinks:], pairs[:, sinks:], one_in)
        step = math.gcd(*back, *ahead)
        if step:
            taps = (_side(_run(back, step), step, Skv), _side(_run(ahead, step), step, Sq))
            yield Dilated(taps, step, sinks=sinks) if step > 1 else Band(taps, sinks=sinks)
    strided = _mostly(mask & past, past, 0, one_in).nonzero().flatten()[:1].tolist()
    # With steps of 2 the columns alone may fill one diagonal more than the window.
    local = [length for length in (left, left + 1) if length]
    yield from (Strided(length, column + 1) for column in strided for length in local)


def _count(pairs: torch.Tensor) -> int:
    return int(pairs.count_nonzero())


def _mostly(mask: torch.Tensor, pairs: torch.Tensor, dim: int, one_in: int) -> torch.Tensor:
    """Tell which columns (dim 0) or rows (dim 1) of `pairs` miss fewer than one in `one_in`."""
    count = pairs.sum(dim)
    return (count - mask.sum(dim)) * one_in < count


def _diagonals(mask: torch.Tensor, pairs: torch.Tensor, one_in: int) -> tuple[list[int], list[int]]:
    """Return the distances of the diagonals that are mostly allowed, back and ahead."""
    dense = _mostly(_slanted(mask), _slanted(pairs), 0, one_in).nonzero().flatten()
    dense = dense - (mask.shape[1] - 1)
    return (-dense[dense < 0]).tolist()[::-1], dense[dense > 0].tolist()


def _slanted(mask: torch.Tensor) -> torch.Tensor:
    """Move each row one key further than the row below it: diagonals become columns."""
    Sq, Skv = mask.shape
    slanted = mask.new_zeros(Sq, Sq + Skv - 1)
    slanted.as_strided((Sq, Skv), (Sq + Skv - 2, 1), Sq - 1).copy_(mask)
    return slanted


def _run(distances: list[int], step: int) -> int:
    """Count the first of ascending distances that are 1, 2, 3 ... steps."""
    count = 0
    while count < len(distances) and distances[count] == step * (count + 1):
        count += 1
    return count


def _side(count: int, step: int, length: int) -> int | None:
    """Return a side of a window, None where the next tap would lie past the mask's last pair."""
    return None if count and step * (count + 1) >= length else count


def _leading(mask: torch.Tensor, where: torch.Tensor, dim: int, one_in: int) -> int:
    """Count the first columns (dim 0) or rows (dim 1) mostly allowed, or without pairs, there."""
    full = _mostly(mask & where, where, dim, one_in) | ~where.any(dim)
    return int(full.long().cumprod(0).sum())

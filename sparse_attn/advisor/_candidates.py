"""The patterns that the advisor tries for a key head, from the fewest pairs to dense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._checks import check_kind, refuse
from .._pattern import check_pattern
from ..patterns import Band, BlockTopK, Full, Pattern, Strided
from ..tools import select_blocks

__all__ = ["candidates", "named"]

_SINKS = 4


def candidates(length: int) -> dict[str, Pattern]:
    """Return the usual candidates for texts of `length` tokens.

    Bands with sinks at four windows, a strided pattern, and block top-k by the selectors and
    budgets that this version serves. Dense attention is always among the choices.
    """
    found: dict[str, Pattern] = {}
    for share in (32, 16, 8, 4):
        window = max(16, length // share)
        found[f"band {window}"] = Band((window - 1, 0), sinks=_SINKS)
    found["strided"] = Strided(max(16, length // 16), 16)
    block = 64 if length >= 1024 else 16
    local = {"local_blocks": min(4, max(1, length // block // 8))}
    for selector in ("mixed", "antidiagonal", "mean"):  # the best that is served
        by_mass = {
            f"{selector}, mass {mass}": _served(block, selector=selector, mass=mass, **local)
            for mass in (0.8, 0.9, 0.95, 0.98)
        }
        by_share = {
            f"{selector}, {share:.0%}": _served(
                block, selector=selector, budget_share=share, **local
            )
            for share in (0.1, 0.2, 0.4)
        }
        served = {name: p for name, p in by_mass.items() if p is not None}
        served = served or {name: p for name, p in by_share.items() if p is not None}
        found |= served
        if served:
            break
    return found


def _served(block: int, **choice: Any) -> Pattern | None:
    """Return a block top-k; None where this version does not serve it."""
    query = torch.zeros(1, 1, 4 * block, 16)
    try:
        pattern = BlockTopK(block, **choice)
        select_blocks(query, query, pattern, is_causal=True)
    except (NotImplementedError, TypeError, ValueError):
        return None
    return pattern


def named(owner: str, patterns: Any, length: int) -> dict[str, Pattern]:
    """Return the user's patterns by name, or the usual ones; dense comes last."""
    if patterns is None:
        patterns = candidates(length)
    if not isinstance(patterns, Mapping):
        what = "a list of patterns, or a mapping of name to pattern"
        check_kind(owner, "patterns", patterns, Iterable, what)
        patterns = {repr(pattern): pattern for pattern in patterns}
    for name, pattern in patterns.items():
        check_pattern(owner, pattern, f"pattern {name}", "one")
    found = {str(name): pattern for name, pattern in patterns.items() if pattern != Full()}
    if not found:
        raise refuse(owner, "patterns beside Full()", "none")
    return {**found, "dense": Full()}

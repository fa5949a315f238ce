"""The patterns that the advisor tries for a key head, from the fewest pairs to dense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._checks import check_kind, refuse
from .._pattern import check_pattern
from ..patterns import Band, BlockTopK, Full, Pattern, Strided
from ..quality._named import DENSE

__all__ = ["candidates", "named"]

_SINKS = 4
#: Masses of block top-k, by the keys of a block; its queries are 64.
_MASSES = {64: (0.9, 0.98, 0.995), 16: (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)}
#: Up to this mass, blocks of 16 keys come with half of the local keys too: of a head that looks
#: back a few tokens alone, those are most of the pairs.
_NARROW = 0.98
#: Rows to a sampled one when blocks of 16 keys are chosen, by what the search makes small: finer
#: samples cost time and no pairs. A quarter less error at the same pairs (docs/advisor.md).
_ROW_STEP = {"pairs": 4, "time": 16}


def candidates(length: int, by: str, is_causal: bool = True) -> dict[str, Pattern]:
    """Return the usual candidates for texts of `length` tokens.

    Bands with sinks at three windows, a strided pattern, and block top-k at rising masses. Blocks
    of few keys keep as much in less of the pairs; blocks as wide as high are there for their speed.
    Dense attention is always among the choices. `by` is what is made small, "pairs" or "time".
    Without `is_causal` bands have half of their window on either side, and nothing is strided:
    that pattern never looks ahead.
    """
    found: dict[str, Pattern] = {}
    for share in (32, 8, 4):
        window = max(16, length // share)
        sides = (window - 1, 0) if is_causal else (window // 2, window // 2)
        found[f"band {window}"] = Band(sides, sinks=_SINKS)
    if is_causal:
        found["strided"] = Strided(max(16, length // 16), 16)
    rows = 64 if length >= 1024 else 16
    local = min(256, max(rows, length // 8))
    for keys, masses in _MASSES.items():
        keys = min(keys, rows)
        for mass in masses:
            name = f"block top-k {rows} x {keys}, mass {mass}"
            step = _ROW_STEP[by] if keys == 16 else 16
            near = {name: local}
            if keys == 16 and mass <= _NARROW and local >= 2 * keys:
                near[f"{name}, {local // 2} local"] = local // 2
            for own, last in near.items():
                found[own] = BlockTopK(
                    (rows, keys), mass, row_step=min(step, rows // 2), local_blocks=last // keys
                )
    return found


def named(
    owner: str, patterns: Any, length: int, by: str, is_causal: bool = True
) -> dict[str, Pattern]:
    """Return the user's patterns by name, or the usual ones; dense comes last."""
    if patterns is None:
        patterns = candidates(length, by, is_causal)
    if not isinstance(patterns, Mapping):
        what = "a list of patterns, or a mapping of name to pattern"
        check_kind(owner, "patterns", patterns, Iterable, what)
        patterns = {repr(pattern): pattern for pattern in patterns}
    for name, pattern in patterns.items():
        check_pattern(owner, pattern, f"pattern {name}", "one")
        if name == DENSE:
            raise refuse(owner, f"names beside {DENSE!r}, which dense attention has", repr(name))
    found = {str(name): pattern for name, pattern in patterns.items() if pattern != Full()}
    if not found:
        raise refuse(owner, "patterns beside Full()", "none")
    return {**found, DENSE: Full()}

"""The patterns that the advisor tries for a key head, from the fewest pairs to dense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._checks import check_kind, refuse
from .._pattern import check_pattern
from ..patterns import Band, BlockTopK, Full, Pattern, Strided
from ..quality._named import DENSE_NAME, check_name, numbered

__all__ = ["candidates", "named"]

_SINKS = 4
#: Queries of a block of block top-k, by what the search makes small. Blocks of 16 keep as much in a
#: tenth less of the pairs; blocks of 64 are what the fastest kernels take.
_ROWS = {"pairs": 16, "time": 64}
#: Masses of block top-k, by what the search makes small and by keys of a block. For pairs the mass
#: left out falls by about a third from one to the next, down to where a head that dense attention
#: alone served has a choice too; blocks of 64 keys are there for speed.
_MASSES: dict[str, dict[int, tuple[float, ...]]] = {
    "pairs": {16: (0.8, 0.87, 0.92, 0.95, 0.97, 0.98, 0.9875, 0.9925, 0.995, 0.997, 0.9985)},
    "time": {64: (0.9, 0.98, 0.995), 16: (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)},
}
#: Blocks of 16 keys come with so many times the local keys too, up to these masses. Of a head that
#: looks back a few tokens alone, local keys are most of the pairs; of others they are the cheapest.
_LOCAL = {"pairs": {2.0: 0.92, 0.5: 0.98}, "time": {0.5: 0.98}}
#: Rows to a sampled one when blocks of 16 keys are chosen. Finer samples cost time and no pairs.
_ROW_STEP = {"pairs": 2, "time": 16}


def candidates(length: int, by: str, is_causal: bool = True) -> dict[str, Pattern]:
    """Return the usual candidates for texts of `length` tokens.

    Bands with sinks at three windows, a strided pattern, and block top-k at rising masses. Blocks
    of few keys keep as much in less of the pairs; by time there are blocks as wide as high, too.
    Dense attention is always among the choices. `by` is what is made small, "pairs" or "time".
    Without `is_causal` bands have half of their window on either side and a first token that sees
    all keys, as a task that reads the CLS token needs, and are named so; nothing is strided: that
    pattern never looks ahead.
    """
    found: dict[str, Pattern] = {}
    for share in (32, 8, 4):
        window = max(16, length // share)
        if is_causal:
            found[f"band {window}"] = Band((window - 1, 0), sinks=_SINKS)
        else:
            side = window // 2
            name = f"band {side} + {side}, {_SINKS} sinks, 1 global"
            found[name] = Band(side, sinks=_SINKS, global_tokens=1)
    if is_causal:
        found["strided"] = Strided(max(16, length // 16), 16)
    rows = _ROWS[by] if length >= 1024 else 16
    local = min(256, max(rows, length // 8))
    for keys, masses in _MASSES[by].items():
        keys = min(keys, rows)
        for mass in masses:
            name = f"block top-k {rows} x {keys}, mass {mass}"
            step = _ROW_STEP[by] if keys == 16 else 16
            near = {name: local}
            for times, most in _LOCAL[by].items():
                last = int(times * local)
                if keys == 16 and mass <= most and last >= keys:
                    near[f"{name}, {last} local"] = last
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
        kinds = Mapping if isinstance(patterns, (str, torch.Tensor)) else Iterable
        check_kind(owner, "patterns", patterns, kinds, what)
        patterns = numbered(patterns)
    for name, pattern in patterns.items():
        check_pattern(owner, pattern, f"pattern {name}", "one")
        check_name(owner, name)
    found = {str(name): pattern for name, pattern in patterns.items() if pattern != Full()}
    if not found:
        raise refuse(owner, "patterns beside Full()", "none")
    return {**found, DENSE_NAME: Full()}

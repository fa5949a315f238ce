"""From which length on a pattern pays, and whether ``Policy`` knows it.

Read off the length curve: the length at which a pattern's time falls below our own dense
attention's, and the length from which ``Policy(pattern)`` lets the pattern run (``dense_below``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sparse_attn as sa

from .masks import Band, Dilated
from .runner import GroupResult
from .timing import ratio


@dataclass(frozen=True)
class Crossover:
    """One pattern's crossover with dense attention."""

    pattern: str
    label: str
    speedups: dict[int, float]  # by length: time of dense over time of the pattern
    length: float | None  # interpolated; None when the pattern never pays on the curve
    policy_length: int | None  # the default dense_below; None for patterns without a window
    verdict: str


def crossovers(results: Sequence[GroupResult], noise: float) -> list[Crossover]:
    """Return the crossover of every pattern of the length curve with dense attention."""
    points = sorted((r for r in results if r.sweep == "length"), key=lambda r: r.x)
    names = {row.name: row for r in points for row in r.rows if row.via == "ours"}
    found = []
    for name, row in names.items():
        speedups = {}
        for point in points:
            ours, dense = point.row(name), point.row("dense")
            if name != "dense" and ours is not None and dense is not None:
                speedups[int(point.x)] = ratio(dense.rounds_ms, ours.rounds_ms)
        if speedups:
            found.append(_crossover(name, row.case["spec"], row.pattern, speedups, noise))
    return found


def policy_length(spec: dict[str, Any]) -> int | None:
    """Return the key length from which the default policy runs the pattern."""
    fields = {key: value for key, value in spec.items() if key != "variant"}
    if spec["variant"] == "band":
        pattern = Band(**fields).pattern(None)
    elif spec["variant"] == "dilated":
        pattern = Dilated(**fields).pattern(None)
    else:
        return None
    policy = sa.Policy(pattern)
    low, high = 1, 1 << 28
    while low < high:
        middle = (low + high) // 2
        if policy.choose(0, middle, middle) == pattern:
            high = middle
        else:
            low = middle + 1
    return low


def _crossover(
    name: str, spec: dict[str, Any], label: str, speedups: dict[int, float], noise: float
) -> Crossover:
    length = crossing(speedups)
    policy = policy_length(spec)
    return Crossover(
        name, label, speedups, length, policy, _verdict(speedups, length, policy, noise)
    )


def crossing(speedups: dict[int, float]) -> float | None:
    """Return the least length from which the speed-up stays above 1, interpolated in logarithms."""
    lengths = sorted(speedups)
    losing = [n for n in lengths if speedups[n] < 1]
    if not losing:
        return float(lengths[0])
    if losing[-1] == lengths[-1]:
        return None
    low = losing[-1]
    high = lengths[lengths.index(low) + 1]
    before, after = math.log(speedups[low]), math.log(speedups[high])
    return float(low * (high / low) ** (before / (before - after)))


def _verdict(
    speedups: dict[int, float], length: float | None, policy: int | None, noise: float
) -> str:
    if policy is None:
        return "no default: dense_below is 0 without a window"
    lost = [n for n in speedups if n >= policy and speedups[n] < 1 - max(noise, 0.02)]
    missed = [n for n in speedups if n < policy and speedups[n] > 1 + max(noise, 0.02)]
    if lost:
        return f"too low: from {policy} on the pattern runs, and still loses at {max(lost)}"
    if missed:
        best = max(missed, key=lambda n: speedups[n])
        return f"safe, and late: dense below {policy} gives up {speedups[best]:.2f}x at {best}"
    return "right: nothing is lost above it or missed below it"

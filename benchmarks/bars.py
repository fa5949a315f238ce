"""How a floor is judged: what must hold in a run, and what is aimed at (floors.py has them).

A bar compares entries of one group. It holds when its figure, the median over the rounds, reaches
the floor less 2 % (or stays within the ceiling plus 2 %). Absolute bars name their device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .masks import Band
from .peers import PEERS
from .runner import GroupResult, Row
from .suites import BREAK_EVEN
from .timing import ratio

SLACK = 0.02
TILE = 128

BEST_PEER = "the best peer"

Figure = Callable[[GroupResult, Row, Row, dict[str, float]], float]


@dataclass(frozen=True)
class Bar:
    """One floor (or ceiling, ``at_most``) on a group."""

    group: str
    subject: str
    measure: str
    floor: float
    goal: float
    against: str = ""  # an entry, or BEST_PEER
    at_most: bool = False
    device: str = ""  # part of the device's name; empty for any
    method: str = ""  # of timing; empty for the group's first


@dataclass(frozen=True)
class Verdict:
    """A bar's figure in one run; ``held`` is None where it could not be judged."""

    bar: Bar
    figure: float | None
    held: bool | None
    why: str = ""


def _l2_share(row: Row, ceilings: dict[str, float]) -> float:
    """Bytes of the listed key and value blocks over time, against the L2 read rate."""
    pairs = row.visited_tflops * row.ms * 1e9 / (4 * row.case["head_dim"])
    loaded = pairs / row.case["spec"]["block_q"] * 2 * row.case["head_dim"] * 2
    return loaded / row.ms / 1e9 / ceilings["l2_read_tb_s"]


def _tile_ratio(fused: Row, band: Row) -> float:
    return _tiles(fused) / _tiles(band)


def _tiles(row: Row) -> int:
    """Tiles of 128 x 128 in which some pair is allowed, of a causal band with global tokens."""
    fields = {k: v for k, v in row.case["spec"].items() if k != "variant"}
    spec, total = Band(**fields), 0
    lead = math.ceil(spec.global_tokens / TILE)
    for tile in range(row.case["length"] // TILE):
        first = max(0, tile * TILE - (spec.left or 0)) // TILE
        total += tile + 1 - first + min(lead, first)
    return total


def _break_even(group: GroupResult) -> float:
    """Return the least block sparsity at which the list kernel takes no longer than dense."""
    dense = group.row("dense")
    assert dense is not None
    last: tuple[float, float] | None = None
    for density in BREAK_EVEN:
        row = group.row(f"density {density:.2f}")
        if row is None:
            continue
        sparsity, cost = 1 - density, ratio(row.rounds_ms, dense.rounds_ms)
        if cost <= 1:
            if last is None:
                return sparsity
            before, above = last
            return before + (sparsity - before) * (above - 1) / (above - cost)
        last = (sparsity, cost)
    return math.inf


MEASURES: dict[str, tuple[str, Figure]] = {
    "speed": ("time of {against} / time", lambda g, a, b, c: ratio(b.rounds_ms, a.rounds_ms)),
    "cost": ("time / time of {against}", lambda g, a, b, c: ratio(a.rounds_ms, b.rounds_ms)),
    "rate": (
        "visited TFLOP/s / {against}'s",
        lambda g, a, b, c: (
            ratio(b.rounds_ms, a.rounds_ms) * (a.visited_tflops * a.ms) / (b.visited_tflops * b.ms)
        ),
    ),
    "pair cost": (
        "time per visited pair / {against}'s",
        lambda g, a, b, c: (
            ratio(a.rounds_ms, b.rounds_ms) * (b.visited_tflops * b.ms) / (a.visited_tflops * a.ms)
        ),
    ),
    "tile cost": (
        "time per visited tile / {against}'s",
        lambda g, a, b, c: ratio(a.rounds_ms, b.rounds_ms) / _tile_ratio(a, b),
    ),
    "byte rate": (
        "bytes/s / {against}'s",
        lambda g, a, b, c: ratio(b.rounds_ms, a.rounds_ms) * (a.tb_s * a.ms) / (b.tb_s * b.ms),
    ),
    "TB/s": ("TB/s of keys and values", lambda g, a, b, c: a.tb_s),
    "TFLOP/s": ("visited TFLOP/s", lambda g, a, b, c: a.visited_tflops),
    "us": ("microseconds", lambda g, a, b, c: a.ms * 1e3),
    "L2 share": ("share of the L2 read rate", lambda g, a, b, c: _l2_share(a, c)),
    "break-even": ("break-even sparsity", lambda g, a, b, c: _break_even(g)),
}


def judge(
    bars: Sequence[Bar], results: Sequence[GroupResult], ceilings: dict[str, float], device: str
) -> list[Verdict]:
    """Judge the bars whose groups are in the run."""
    by_name = {result.name: result for result in results}
    return [
        _judge(bar, by_name[bar.group], ceilings, device) for bar in bars if bar.group in by_name
    ]


def _judge(bar: Bar, group: GroupResult, ceilings: dict[str, float], device: str) -> Verdict:
    if bar.device and bar.device.lower() not in device.lower():
        return Verdict(bar, None, None, f"an absolute bar for the {bar.device}")
    rows = {row.name: row for row in group.rows}
    subject, peers = rows[bar.subject], ""
    against: Row | None
    if subject.failure:
        return Verdict(bar, None, None, f"{subject.name}: {subject.failure}")
    if bar.against == BEST_PEER:
        against, peers = _best_peer(group, bar.method)
        if against is None:
            return Verdict(bar, None, None, peers)
    else:
        against = rows[bar.against or bar.subject]
        if against.failure:
            return Verdict(bar, None, None, f"{against.name}: {against.failure}")
    subject, against = subject.by(bar.method), against.by(bar.method)
    figure = MEASURES[bar.measure][1](group, subject, against, ceilings)
    if subject.wrong:
        return Verdict(bar, figure, False, "the result is wrong")
    held = figure <= bar.floor * (1 + SLACK) if bar.at_most else figure >= bar.floor * (1 - SLACK)
    return Verdict(bar, figure, held, peers)


def _best_peer(group: GroupResult, method: str) -> tuple[Row | None, str]:
    """Return the fastest peer of a group, and a sentence that names it and who was missing."""
    best = group.best_peer(method)
    absent = [r.name for r in group.rows if r.via in PEERS and (r.failure or r.wrong)]
    missing = "missing: " + (", ".join(absent) or "none")
    return best, missing if best is None else f"{best.name}; {missing}"

"""The floors, as data: what must hold in a run, and what is aimed at.

A bar compares entries of one group. It holds when its figure, the median over the rounds, reaches
the floor less 2 % (or stays within the ceiling plus 2 %). Absolute bars name their device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .masks import Band
from .runner import GroupResult, Row
from .suites import BREAK_EVEN, dense_name
from .timing import ratio

SLACK = 0.02
TILE = 128

Figure = Callable[[GroupResult, Row, Row, dict[str, float]], float]


@dataclass(frozen=True)
class Bar:
    """One floor (or ceiling, ``at_most``) on a group."""

    group: str
    subject: str
    measure: str
    floor: float
    goal: float
    against: str = ""
    at_most: bool = False
    device: str = ""  # part of the device's name; empty for any


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
    subject, against = rows[bar.subject], rows[bar.against or bar.subject]
    for row in (subject, against):
        if row.failure:
            return Verdict(bar, None, None, f"{row.name}: {row.failure}")
    figure = MEASURES[bar.measure][1](group, subject, against, ceilings)
    if subject.error is not None and not subject.error <= (subject.error_limit or 0.0):
        return Verdict(bar, figure, False, "the result is wrong")
    held = figure <= bar.floor * (1 + SLACK) if bar.at_most else figure >= bar.floor * (1 - SLACK)
    return Verdict(bar, figure, held)


def _dense_bars() -> list[Bar]:
    table = {  # (head dim, length in K): floors full and causal, goals full and causal
        (128, 1): (1.05, 1.10, 1.12, 1.20),
        (128, 4): (1.07, 1.15, 1.14, 1.22),
        (128, 16): (1.08, 1.15, 1.15, 1.22),
        (64, 1): (1.00, 1.00, 1.10, 1.12),
        (64, 4): (1.07, 1.07, 1.16, 1.16),
        (64, 16): (1.13, 1.16, 1.22, 1.25),
        (256, 16): (1.03, 1.07, 1.12, 1.16),
        (192, 16): (1.08, 1.12, 1.15, 1.20),
        (96, 16): (1.25, 1.24, 1.35, 1.35),
    }
    bars = []
    for (dim, kilo), (full, causal, goal_full, goal_causal) in table.items():
        for cut, floor, goal in ((False, full, goal_full), (True, causal, goal_causal)):
            name = dense_name(dim, kilo * 1024, cut)
            bars.append(Bar(name, "ours", "speed", floor, goal, "cudnn"))
    return bars


BARS = (
    *_dense_bars(),
    Bar("band 16K", "ours", "speed", 1.55, 1.75, "flex"),
    Bar("band 16K", "ours", "speed", 4.2, 4.7, "cudnn full causal"),
    Bar("band 32K", "ours", "speed", 1.52, 1.65, "flex"),
    Bar("band 128K", "ours", "speed", 1.52, 1.65, "flex"),
    Bar("dilated 32K", "ours", "pair cost", 1.05, 1.02, "band", at_most=True),
    Bar("block 128, 16K", "density 0.50", "rate", 0.96, 0.98, "dense"),
    Bar("block 128, 16K", "density 0.25", "rate", 0.94, 0.97, "dense"),
    Bar("block 128, 16K", "density 0.10", "rate", 0.88, 0.94, "dense"),
    Bar("block 128, 64K", "density 0.10", "rate", 0.94, 0.98, "dense"),
    Bar("block 128, 64K", "density 0.05", "rate", 0.90, 0.95, "dense"),
    Bar("block 128x64, 16K", "density 0.25", "TFLOP/s", 540, 600, device="H200"),
    Bar("block 128x64, 16K", "density 0.10", "TFLOP/s", 520, 580, device="H200"),
    Bar("block 64, 16K", "density 0.25", "TFLOP/s", 480, 540, device="H200"),
    Bar("key blocks, 16K", "keys 32", "pair cost", 1.5, 1.2, "keys 64", at_most=True),
    Bar("key blocks, 16K", "keys 16", "pair cost", 2.0, 1.5, "keys 64", at_most=True),
    Bar("square blocks, 16K", "block 32", "L2 share", 0.60, 0.80),
    Bar("square blocks, 16K", "block 16", "L2 share", 0.60, 0.80),
    Bar("global tokens, 16K", "fused", "tile cost", 1.08, 1.03, "band", at_most=True),
    Bar("list building, 16K", "from_mask", "us", 100, 30, at_most=True),
    Bar("block selection, 128K", "select", "cost", 0.025, 0.010, "dense", at_most=True),
    Bar("block selection, 128K", "select", "cost", 0.20, 0.20, "block top-k", at_most=True),
    Bar("top-k, 16K", "ours", "cost", 2.0, 1.6, "dense", at_most=True),
    Bar("break-even, 16K", "dense", "break-even", 0.10, 0.05, at_most=True),
    Bar("decode batch 1, 128K", "ours", "TB/s", 3.85, 4.3, device="H200"),
    Bar("decode batch 16, 32K", "ours", "TB/s", 4.35, 4.5, device="H200"),
    Bar("decode batch 64, 8K", "ours", "TB/s", 4.30, 4.5, device="H200"),
    Bar("sparse decode batch 64, 32K", "band", "byte rate", 0.85, 0.95, "dense"),
    Bar("sparse decode batch 64, 32K", "blocks", "byte rate", 0.85, 0.95, "dense"),
    Bar("portable 16K, full", "ours", "speed", 0.95, 1.10, "flash"),
    Bar("portable 16K, causal", "ours", "speed", 0.95, 1.10, "flash"),
    Bar("portable 16K, causal", "band (2047, 0)", "rate", 0.90, 0.97, "ours"),
    Bar("portable 16K, full", "blocks 128, density 0.50", "rate", 0.90, 0.97, "ours"),
    Bar("portable 16K, full", "blocks 128, density 0.25", "rate", 0.90, 0.97, "ours"),
    Bar("cpu dense, float32", "ours", "speed", 0.85, 1.0, "sdpa"),
    Bar("cpu dense, bfloat16", "ours", "speed", 0.85, 1.0, "sdpa"),
    Bar("cpu variants, float32", "band", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "dilated", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "blocks", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "band 256", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "blocks 16", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "top-k 64", "speed", 1.0, 1.5, "sdpa"),
    Bar("cpu variants, float32", "top-k 512", "speed", 1.0, 1.2, "sdpa"),
)

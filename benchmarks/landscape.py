"""One picture of where the package stands: time of the best peer over ours, far off the table too.

Head dims from 8 to 256 at 8K causal, and numbers of queries against numbers of keys. A point is a
group; its floors stand in floors.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .cases import Case, Group
from .cliffs import beside
from .masks import Full
from .runner import GroupResult
from .timing import ratio

HEAD_DIMS = tuple(range(8, 257, 8))
QUERIES = (1, 4, 16, 17, 64, 128, 512, 2048, 8192)
KEYS = (64, 256, 1024, 4096, 16384, 65536, 131072)
METHOD = ("burst",)
SWEEPS = ("head dims", "sizes")
MARKED = 0.95  # points below are marked, and listed in the text


@dataclass(frozen=True)
class Point:
    """A group's figure: the time of the best peer over ours."""

    name: str
    sweep: str
    queries: int
    keys: int
    head_dim: int
    ratio: float
    peer: str
    ms: float
    engine: str


def sweep() -> list[Group]:
    """List the points: head dims, then queries by keys."""
    return [_head_dim(dim) for dim in HEAD_DIMS] + [
        _sizes(queries, keys) for queries in QUERIES for keys in KEYS
    ]


def dim_name(dim: int) -> str:
    """Return the group's name for a head dim."""
    return f"sweep, head dim {dim}"


def size_name(queries: int, keys: int) -> str:
    """Return the group's name for a number of queries on a number of keys."""
    return f"sweep, {queries} x {keys}"


def _head_dim(dim: int) -> Group:
    case = Case(Full(), 8192, head_dim=dim, causal=True)
    peers = ("cudnn", "flash", "fa3", "fa4")
    return Group(dim_name(dim), beside(case, *peers), "head dims", dim, methods=METHOD)


def _sizes(queries: int, keys: int) -> Group:
    case = Case(Full(), keys, queries=queries, heads=32, kv_heads=8)
    name = size_name(queries, keys)
    return Group(name, beside(case, "cudnn", "flash", "fa3"), "sizes", keys, methods=METHOD)


def points(results: Iterable[GroupResult]) -> list[Point]:
    """Return the points that have a figure: ours and a peer were there."""
    found = []
    for result in results:
        ours, best = result.row("ours"), result.best_peer()
        if result.sweep in SWEEPS and ours is not None and best is not None:
            case = ours.case
            rows = case["length"] if case["queries"] is None else case["queries"]
            figure = ratio(best.rounds_ms, ours.rounds_ms)
            place = (rows, case["length"], case["head_dim"])
            whose = (best.name, ours.ms, ours.engine)
            found.append(Point(result.name, result.sweep, *place, figure, *whose))
    return found


def points_behind(results: Iterable[GroupResult]) -> list[Point]:
    """Return the points under ``MARKED``, the farthest behind first."""
    return sorted((p for p in points(results) if p.ratio < MARKED), key=lambda p: p.ratio)

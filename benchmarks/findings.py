"""What random calls show: how many lie how far from peers, from dense and from a model of the cost.

Figures are the other's time over ours, under 1 where ours is slower. The model is the least time
of a call: its products or its bytes at the rates that the run measured, and the start of a kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .draws import PLAIN, RANDOM
from .runner import GroupResult, Row, is_wrong
from .store import Run
from .timing import ratio

PEER, DENSE, MODEL = "the best peer", "our own dense", "the model"
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95)
SLOWEST = 20
START_MS = {"cuda": 0.006, "cpu": 0.02}  # of a kernel, of a call


@dataclass(frozen=True)
class Table:
    """A table of the report."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Finding:
    """One call beside one other time."""

    call: str  # the group's name
    noise: float  # between two timings of ours
    kind: str
    beside: str
    figure: float
    other: str  # whose time, and how long
    row: Row


def is_random(result: GroupResult) -> bool:
    """Whether the group is a random call."""
    return result.sweep.startswith(RANDOM)


def findings(results: Iterable[GroupResult], ceilings: Mapping[str, float]) -> list[Finding]:
    """Return the figures of all random calls that had their turn."""
    return [finding for result in _drawn(results) for finding in _of(result, ceilings)]


def sentence(run: Run) -> str:
    """Return how many random calls there were, and how one of them runs again."""
    drawn = _drawn(run.results)
    if not drawn:
        return ""
    plain = sum(result.sweep == RANDOM + PLAIN for result in drawn)
    wrong, failed = (len(table(drawn).rows) for table in (_wrong, _failed))
    name, _, seed = drawn[0].name.partition(" of seed ")
    calls = 1 + max(int(result.x) for result in drawn)
    return (
        f"{len(drawn)} random calls of seed {seed}: {plain} plain, {len(drawn) - plain} with a "
        f"pattern or an option; wrong results: {wrong}, kinds of failures: {failed}. Figures are "
        f"the other's time over ours, under 1 where ours is slower. One call again: "
        f"`python -m benchmarks random --device {run.machine['device']} --seed {seed} "
        f'--calls {calls} --only "{name} of"`.'
    )


def _drawn(results: Iterable[GroupResult]) -> list[GroupResult]:
    """Return the random calls that the package had its turn with, whichever peers are left out."""
    drawn = filter(is_random, results)
    return [r for r in drawn if any(is_wrong(row) or _had_turn(row) for row in r.rows)]


def _had_turn(row: Row) -> bool:
    return not (row.of_peer or row.left_out)


def tables(results: Sequence[GroupResult], ceilings: Mapping[str, float]) -> list[Table]:
    """Return the report of random calls: quantiles, the slowest, the wrong and the failed."""
    drawn = _drawn(results)
    found = findings(drawn, ceilings)
    slowest = [_slowest(found, beside) for beside in (PEER, DENSE, MODEL)]
    made = [_quantiles(found), *slowest, _wrong(drawn), _wrong_peers(drawn), _failed(drawn)]
    return [table for table in made if table.rows]


def model_ms(row: Row, dense: Row | None, ceilings: Mapping[str, float]) -> float:
    """Return the model's time of a row; `dense` is the same call without its pattern."""
    case, variant = row.case, row.case["spec"]["variant"]
    size, rows = getattr(torch, case["dtype"]).itemsize, case["queries"] or case["length"]
    chosen = variant in ("topk", "block_topk")  # from the data, so that all keys are read
    products = row.visited_tflops * row.ms
    if variant == "topk" and dense is not None:
        products += dense.visited_tflops * dense.ms / 2  # the scores of every key
    ms = products / ceilings[f"tflops/{case['dtype']}"]
    if "read_tb_s" in ceilings:
        keys = (case["kv_heads"] or case["heads"]) * case["length"]
        numbers = case["heads"] * rows + keys * (1.0 if chosen else row.density)
        moved = 2 * size * case["head_dim"] * case["batch"] * numbers
        masks = {"mask": 1, "bias": size, "head bias": size * case["heads"]}
        moved += masks.get(case["option"], 0) * rows * case["length"] * row.density
        ms = max(ms, moved / ceilings["read_tb_s"] / 1e9)
    return ms + START_MS["cuda" if "read_tb_s" in ceilings else "cpu"]


def _of(result: GroupResult, ceilings: Mapping[str, float]) -> Iterator[Finding]:
    ours, dense, peer = result.row("ours"), result.row("dense"), result.best_peer()
    if ours is None or ours.wrong:
        return
    call = (result.name, result.noise, result.sweep.removeprefix(RANDOM))
    for beside, row in ((PEER, peer), (DENSE, dense)):
        if row is not None:
            figure = ratio(row.rounds_ms, ours.rounds_ms)
            yield Finding(*call, beside, figure, f"{row.name} {row.ms:.4g}", ours)
    ms = model_ms(ours, dense, ceilings)
    yield Finding(*call, MODEL, ms / ours.ms, f"{ms:.4g}", ours)


def _quantiles(found: Sequence[Finding]) -> Table:
    rows = []
    for beside in (PEER, DENSE, MODEL):
        kinds = sorted({f.kind for f in found if f.beside == beside} - {PLAIN})
        parts = {PLAIN: [PLAIN], "all others": kinds} | {kind: [kind] for kind in kinds}
        for name, kept in parts.items():
            figures = [f.figure for f in found if f.beside == beside and f.kind in kept]
            if figures:
                least: list[float] = np.quantile(figures, QUANTILES).tolist()
                rows.append((name, beside, str(len(figures)), *(f"{q:.2f}" for q in least)))
    shares = ["least", *(f"{q:.0%}" for q in QUANTILES[1:])]
    shares[QUANTILES.index(0.5)] = "median"
    return Table("Time of the other over ours", ("calls", "beside", "number", *shares), rows)


def _slowest(found: Sequence[Finding], beside: str) -> Table:
    ranked = sorted((f for f in found if f.beside == beside), key=lambda f: f.figure)
    rows = []
    for f in ranked[:SLOWEST]:
        times = (f"{f.figure:.2f}", f"{f.noise:.0%}", f.other, f"{f.row.ms:.4g}")
        rows.append((*times, _engine(f.row), f.row.label, f.call))
    head = ("figure", "noise", "the other's ms", "our ms", "engine", "case", "call")
    return Table(f"Slowest beside {beside}", head, rows)


def _engine(row: Row) -> str:
    return row.engine + ("" if row.captured else " (plain calls)")


def _wrong(drawn: Sequence[GroupResult]) -> Table:
    return _errors("Wrong results", [(r, row) for r in drawn for row in r.rows if is_wrong(row)])


def _wrong_peers(drawn: Sequence[GroupResult]) -> Table:
    rows = [(r, row) for r in drawn for row in r.rows if row.of_peer and row.wrong]
    return _errors("Wrong results of peers", rows)


def _errors(title: str, wrong: Iterable[tuple[GroupResult, Row]]) -> Table:
    rows = []
    for result, row in wrong:
        sizes = (f"{row.error:.2g}", f"{row.error_limit:.2g}")
        rows.append((*sizes, row.name, _engine(row), row.label, result.name))
    return Table(title, ("error", "limit", "whose", "engine", "case", "call"), rows)


def _failed(drawn: Sequence[GroupResult]) -> Table:
    ours = [(r.name, row) for r in drawn for row in r.rows if _had_turn(row)]
    failed = [(row.failure, row.label, name) for name, row in ours if row.failure]
    rows = []
    for failure, number in Counter(failure for failure, *_ in failed).most_common():
        label, name = next((label, name) for why, label, name in failed if why == failure)
        rows.append((failure, str(number), label, name))
    return Table("Calls of ours that failed", ("why", "number", "the first", "call"), rows)

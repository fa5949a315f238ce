"""Runs groups: builds the contenders, checks each one's result, times them in rounds, takes memory.

Everything that fails becomes a sentence in the row. What the time budget no longer reaches, an
entry or a whole group, is recorded as not run.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from .accuracy import Reference
from .budget import LEFT_OUT, NOT_RUN, Budget
from .cases import Case, Entry, Group
from .contender import Contender
from .inputs import Inputs
from .masks import Full
from .memory import peak_bytes
from .peers import COMPILED, PEERS, contender
from .timing import Timer, interleaved, ratio

AGAIN = " (again)"
SLOW_PREPARE_S = 1.0
COMPILING_SHARE = 0.4  # of the budget: others wait for their turn


@dataclass
class Row:
    """One entry's figures; ``failure`` is the sentence when there are none."""

    name: str
    via: str
    case: dict[str, Any]
    label: str
    pattern: str = ""
    failure: str = ""
    engine: str = ""
    method: str = "single"  # of timing: the group's first
    rounds_ms: list[float] = field(default_factory=list)
    other_rounds_ms: dict[str, list[float]] = field(default_factory=dict)  # by the others
    captured: bool = True  # its burst is a CUDA graph; else plain calls
    ms: float = 0.0
    visited_tflops: float = 0.0
    share: float = 0.0  # of the ceiling
    tb_s: float = 0.0  # bytes of the allowed keys and values over the time (decode)
    density: float = 0.0  # allowed pairs over all
    peak_bytes: int = 0
    error: float | None = None
    error_limit: float | None = None
    to_dense: float | None = None  # relative distance from dense attention on the same inputs
    setup_ms: float | None = None
    prepare_s: float = 0.0  # inputs, compiling, the first call and its comparison

    @property
    def left_out(self) -> bool:
        """Whether it had no turn, for time or because the command left it out."""
        return self.failure.startswith((NOT_RUN, LEFT_OUT))

    @property
    def of_peer(self) -> bool:
        """Whether a peer computes it, not the package."""
        return self.via in PEERS

    @property
    def wrong(self) -> bool:
        """Whether its result is farther from the reference than its limit allows."""
        return self.error is not None and not self.error <= (self.error_limit or 0.0)

    def by(self, method: str) -> Row:
        """Return the row as another method than the group's first timed it."""
        if method in ("", self.method):
            return self
        rounds = self.other_rounds_ms[method]
        ms = statistics.median(rounds)
        faster = self.ms / ms
        return replace(
            self,
            rounds_ms=rounds,
            ms=ms,
            visited_tflops=self.visited_tflops * faster,
            share=self.share * faster,
            tb_s=self.tb_s * faster,
        )


def is_wrong(row: Row) -> bool:
    """Whether a row of the package has an error beyond its limit."""
    return row.wrong and not row.of_peer


@dataclass
class GroupResult:
    """A group's rows, and how far two timings of its first entry differ."""

    name: str
    sweep: str
    x: float
    rows: list[Row]
    noise: float = 0.0
    seconds: float = 0.0

    def row(self, name: str) -> Row | None:
        """Return the row of that name, None when it has no figures."""
        return next((r for r in self.rows if r.name == name and not r.failure), None)

    def best_peer(self, method: str = "") -> Row | None:
        """Return the fastest peer's row, None when no peer has right figures."""
        there = [r for r in self.rows if r.of_peer and not (r.failure or r.wrong)]
        return min(there, key=lambda row: row.by(method).ms, default=None)

    @property
    def complete(self) -> bool:
        """Whether every entry had its turn."""
        return not any(row.left_out for row in self.rows)


class Runner:
    """Runs groups on one device within a time budget."""

    def __init__(
        self,
        device: torch.device,
        ceilings: dict[str, float],
        *,
        rounds: int,
        milliseconds: float,
        budget: Budget,
        left_out: Mapping[tuple[str, Case], str] | None = None,
        without: Sequence[str] = (),
    ) -> None:
        self.timer = Timer(device)
        self.ceilings = ceilings
        self.rounds = rounds
        self.milliseconds = milliseconds
        self.budget = budget
        self.left_out = left_out or {}  # peers' cases that were not compiled, and why
        self.without = without  # who takes no part
        self.compiling = 0.0  # seconds that FlexAttention's entries took to prepare

    def run(self, group: Group) -> GroupResult:
        """Run one group."""
        began = time.monotonic()
        inputs: dict[tuple[object, ...], Inputs] = {}
        references: dict[Case, Reference] = {}
        rows, calls = [], {}
        for entry in group.entries:
            row = _row(entry)
            rows.append(row)
            row.failure = self._refusal(entry)
            if row.failure:
                continue
            started = time.monotonic()
            try:
                if entry.case.shape not in inputs:
                    inputs[entry.case.shape] = Inputs(entry.case, self.timer.device)
                own = inputs[entry.case.shape]
                made = contender(entry.via, entry.case, own)
                self._examine(row, entry, made, own, references)
            except Exception as error:  # a peer's failure is a result
                row.failure = sentence(error)
                self._recover()
                continue
            finally:
                if entry.via in COMPILED:
                    self.compiling += time.monotonic() - started
            row.prepare_s = time.monotonic() - started
            calls[entry.name] = made.call
        first = next(iter(calls), None)
        if first is not None:
            calls[first + AGAIN] = calls[first]
        times: dict[str, dict[str, list[float]]] = {}
        for method in group.methods:
            samples = self.timer.samples(calls, self.milliseconds, method)
            needed = self.rounds * sum(sample.seconds for sample in samples.values())
            if not self.budget.reaches(needed):
                for row in rows:
                    row.failure = row.failure or self.budget.refusal(needed)
                return GroupResult(group.name, group.sweep, group.x, rows)
            times[method] = interleaved(samples, self.rounds)
            for row in rows:
                row.captured &= row.name not in samples or samples[row.name].captured
            samples.clear()
        main, *others = group.methods
        taken = times[main]
        noise = abs(ratio(taken[first], taken[first + AGAIN]) - 1) if first is not None else 0.0
        for row, entry in zip(rows, group.entries, strict=True):
            if not row.failure:
                self._figures(row, entry, taken[entry.name], inputs[entry.case.shape], group)
                row.other_rounds_ms = {method: times[method][entry.name] for method in others}
        calls.clear()
        self._recover()
        return GroupResult(group.name, group.sweep, group.x, rows, noise, time.monotonic() - began)

    def _refusal(self, entry: Entry) -> str:
        """Return why the entry has no turn, nothing when it has."""
        if entry.via in COMPILED and self.compiling > COMPILING_SHARE * self.budget.seconds:
            return f"{NOT_RUN} (FlexAttention's compiles took {self.compiling:.0f} s by then)"
        if entry.via in self.without:
            return LEFT_OUT
        if (entry.via, entry.case) in self.left_out:
            return self.left_out[entry.via, entry.case]
        return "" if self.budget.reaches() else self.budget.refusal()

    def _examine(
        self,
        row: Row,
        entry: Entry,
        made: Contender,
        inputs: Inputs,
        references: dict[Case, Reference],
    ) -> None:
        """Call once, compare the result, and measure memory on a second call."""
        row.engine, row.setup_ms = made.engine, made.setup_ms
        out = made.call()
        if made.attends:
            if entry.case not in references:
                references[entry.case] = Reference(entry.case, inputs)
            out = made.arrange(out)
            found = references[entry.case].compare(out)
            row.error, row.error_limit = found.error, found.limit
            if entry.case.peaked:
                dense = _dense(entry.case)
                if dense not in references:
                    references[dense] = Reference(dense, inputs)
                row.to_dense = references[dense].distance(out)
        del out
        row.peak_bytes = peak_bytes(made.call, self.timer.device)

    def _figures(
        self, row: Row, entry: Entry, times: list[float], inputs: Inputs, group: Group
    ) -> None:
        case = entry.case
        row.method, row.rounds_ms, row.ms = group.methods[0], times, statistics.median(times)
        pairs = inputs.pairs(case)
        extents = [case.extent(batch) for batch in range(case.batch)]
        row.density = pairs / (case.heads * sum(rows * keys for rows, keys in extents))
        row.visited_tflops = 4 * case.head_dim * pairs / row.ms / 1e9
        real = sum(keys for _, keys in extents) / (case.batch * case.length)
        row.tb_s = inputs.nbytes() * real * row.density / row.ms / 1e9
        if group.flops_ceiling:
            row.share = row.visited_tflops / self.ceilings[f"tflops/{case.dtype}"]
        elif "read_tb_s" in self.ceilings:
            row.share = row.tb_s / self.ceilings["read_tb_s"]

    def _recover(self) -> None:
        gc.collect()
        if self.timer.device.type == "cuda":
            torch.cuda.empty_cache()


def sentence(error: BaseException) -> str:
    """Return an error as one line, files by their names: folders are those of one machine.

    >>> sentence(RuntimeError("mha_fwd, /home/me/flash/api.cpp:848, at most 128, see a/b"))
    'RuntimeError: mha_fwd, api.cpp:848, at most 128, see a/b'
    """
    message = re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", "", str(error))
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def _dense(case: Case) -> Case:
    return replace(case, spec=Full())


def _row(entry: Entry) -> Row:
    case = asdict(entry.case)
    case["spec"] = {"variant": entry.case.spec.variant} | asdict(entry.case.spec)
    return Row(entry.name, entry.via, case, entry.case.label, entry.case.spec.label)


def progress(result: GroupResult) -> str:
    """Return a group's line for the terminal."""
    shown = []
    for row in result.rows:
        shown.append(
            f"{row.name} "
            + ("not run" if row.left_out else "failed" if row.failure else f"{row.ms:.3f} ms")
            + (" WRONG" if row.wrong else "")
            + (f" (prepared in {row.prepare_s:.1f} s)" if row.prepare_s > SLOW_PREPARE_S else "")
        )
    return f"[{result.seconds:5.1f} s] {result.name}: " + ", ".join(shown)

"""One run of `advise`: its stages in order, under one clock, with what was measured remembered."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import nn

from .._binding import bound
from .._module_names import key_heads_of
from .._observe import watching
from .._progress import Progress
from ..patterns import Full, Pattern
from ..policy import Policy
from ..quality._calls import call_model
from ..quality._model import Judge, PolicyQuality
from ..quality._named import DENSE_NAME
from ._advice import Advice
from ._clock import TIMED, Clock
from ._findings import Tried
from ._local import Local, Unit
from ._memory import Memory
from ._search import Choice, Outcome, Search
from ._times import at_length, length_of, seconds_of

__all__ = ["OWNER", "Run"]

OWNER = "advise"  # of its sentences
#: Bisections of the price of error.
STEPS = 10
#: Top-1 agreement that another text may lose, by the root of this one's KL (docs/advisor.md).
LOST = 0.72
#: What weighs a key head visits less of the pairs, so that it moves the output more than rounding.
PROBED = 0.15
#: Shares of the time after which a stage stops: local errors, weights, single candidates, search.
MEASURED, WEIGHED, SINGLE, SEARCHED = 0.3, 0.45, 0.65, 0.9
_HELD_BYTES = 4 << 30  # of outputs that are kept in memory


class Run:
    """One search: its inputs, its clock, its progress."""

    def __init__(
        self,
        model: nn.Module,
        calls: list[dict[str, Any]],
        other: list[dict[str, Any]],
        found: dict[str, Pattern],
        keep: float,
        by: str,
        minutes: float | None,
        memory: Memory,
    ) -> None:
        self.model, self.calls, self.other = model, calls, other
        self.found, self.keep, self.by = found, keep, by
        self.memory = memory
        layers, heads = self._size_by_config()
        self.clock = Clock(minutes, len(calls) * layers, layers * heads + len(found) + STEPS)
        self.local = Local(found, step=self._measured, late=self.clock.out_of_time(MEASURED))
        self._searching = False
        self.judge = Judge(OWNER, model, calls, hold=self._holds())

    def _holds(self) -> bool:
        """Whether the outputs of dense attention stay in memory: not when they are large."""
        config = getattr(self.model, "config", None)
        width = getattr(config, "vocab_size", 1)
        return 4 * width * sum(_size(call) for call in self.calls) < _HELD_BYTES

    def advice(self, length: int, lengths: list[int], progress: bool) -> Advice:
        """Search on a text of so many positions and validate; time at `lengths`."""
        steps = self.clock.layers + len(self.calls) * self.clock.evaluations
        with Progress(steps, progress) as bar:
            self.bar = bar
            self.step("dense attention", 0)
            self.clock.time_forward(lambda: self.judge.rows({DENSE_NAME: None}, counted=False))
            if self.memory.recall(self.local):
                self._measured("local errors", self.clock.layers)
            else:
                with bound(OWNER, self.model, Full()), watching(self.local):
                    for call in self.calls:
                        call_model(OWNER, self.model, call)
                self.local.finish(OWNER)
                if not self.local.unmeasured:
                    self.memory.keep(self.local)
            search = Search(self.local, self._judge, self.by)
            self._search(search)
            late = self.clock.out_of_time(SEARCHED)
            self._searching = True
            best = search.find(self.keep, STEPS, late)
            chosen, rows = self._validated(search, best)
            times = {}
            for done, timed in enumerate(lengths):
                self.clock.evaluations, self.clock.after = 0, TIMED * (len(lengths) - done)
                self.step("times", 0)
                times[timed] = self._times(chosen.choice, timed)
        return self._made(length, search, chosen, rows, times)

    def step(self, name: str, steps: int = 1) -> None:
        """Show how far the search is, and how long it still takes."""
        self.bar.step(name, steps, self.clock.left())

    def _measured(self, name: str, layers: int = 1) -> None:
        self.clock.measured(layers)
        self.step(name, layers)

    def _size_by_config(self) -> tuple[int, int]:
        """Return the layers and key heads that the configuration names, for the estimate alone."""
        config = getattr(self.model, "config", None)
        return getattr(config, "num_hidden_layers", 1), key_heads_of(config) or 1

    def _expect(self, choices: list[Choice], steps: int = STEPS) -> None:
        """Count what is still to be judged: choices that are not known, and steps of the search."""
        unknown = sum(self.memory.judged(choice) is None for choice in choices)
        self.clock.evaluations = unknown + steps
        self.bar.expect(len(self.calls) * self.clock.evaluations)

    def _search(self, search: Search) -> None:
        """Weigh key heads or layers, and judge every candidate alone."""
        single = {n: self.local.everywhere(n) for n in self.found if n != DENSE_NAME}
        mean = {name: self.local.pairs(choice) for name, choice in single.items()}
        error = {name: self.local.error(choice) for name, choice in single.items()}
        few = [name for name in single if mean[name] <= max(PROBED, min(mean.values()))]
        probe = min(few, key=lambda name: (error[name], name))
        search.try_choice(DENSE_NAME, self.local.everywhere(DENSE_NAME))
        units = sorted(u for u in self.local.figures if u[0] not in self.local.unmeasured)
        by_layer = [tuple(part) for _, part in groupby(units, key=lambda unit: unit[0])]
        for parts in ([(unit,) for unit in units], by_layer):
            if self.clock.has_time_for(len(parts), WEIGHED):  # in part it says nothing
                alone = [dict.fromkeys(part, probe) for part in parts]
                self._expect([*alone, *single.values()])
                search.weigh(probe, parts, self.clock.out_of_time(WEIGHED))
                break
        self._expect(list(single.values()))
        late = self.clock.out_of_time(SINGLE)
        for name in sorted(single, key=lambda name: (-mean[name], name)):
            if len(search.sparse()) and late():
                break
            search.try_choice(f"{name}, everywhere", single[name])
        self._expect([])

    def _judge(self, name: str, choice: Choice) -> tuple[float, float, float]:
        """Return what a choice keeps of the model's output, its loss and its margin."""
        self.step(name, 0)
        figures = self.memory.judged(choice)
        counted = figures is None or self._searching
        if figures is None:
            policy = _policy_of(choice, self.found, self._shape())
            (row,) = self.clock.time_forward(lambda: self.judge.rows({name: policy}, counted=False))
            loss = row.rel_l1 if row.kl is None else row.kl
            figures = _kept(row), loss, _margin(row)
            self.memory.add(choice, figures)
        if counted:  # what an earlier run judged takes no time
            self.clock.evaluated()
            self.step(name, len(self.calls))
        return figures

    def _shape(self) -> tuple[int, int]:
        layers = self.local.skipped.union(unit[0] for unit in self.local.figures)
        return max(layers) + 1, max(unit[1] for unit in self.local.figures) + 1

    def _validated(
        self, search: Search, best: Outcome | None
    ) -> tuple[Outcome, list[PolicyQuality]]:
        """Judge the choice, and safer ones where it keeps too little, on other text."""
        best = search.most_kept() if best is None else best
        if not self.other:
            return best, []
        self._expect([], 0)
        judge = Judge(OWNER, self.model, self.other, hold=True)
        rows = judge.rows({DENSE_NAME: None})
        self.clock.validated()

        def kept(outcome: Outcome) -> float:
            self.step(f"validation of {outcome.name}", 0)
            policy = _policy_of(outcome.choice, self.found, self._shape())
            rows.extend(judge.rows({outcome.name: policy}))
            self.clock.validated()
            if _kept(rows[-1]) < self.keep:
                self._expect([])
            return _kept(rows[-1])

        return search.validated(best, self.keep, kept, STEPS, self.clock.out_of_time(1.0)), rows

    def _times(self, choice: Choice, length: int) -> tuple[float, float]:
        """Return the seconds of a forward at a length, dense and under the policy."""
        texts = [*self.other, *self.calls]
        own = next((text for text in texts if length_of(OWNER, text) == length), texts[0])
        policy = _policy_of(choice, self.found, self._shape())
        with at_length(OWNER, self.model, own, length) as call:
            dense = seconds_of(OWNER, self.model, call, Full())
            return dense, seconds_of(OWNER, self.model, call, policy)

    def _made(
        self,
        length: int,
        search: Search,
        chosen: Outcome,
        rows: list[PolicyQuality],
        times: dict[int, tuple[float, float]],
    ) -> Advice:
        tried = [
            Tried(o.name, o.pairs, o.cost, o.kept, o.loss, o is chosen)
            for o in search.tried.values()
        ]
        (dense,) = (o for o in search.tried.values() if o.is_dense)
        tokens = rows[-1].top1 is not None if rows else self._predicts_tokens()
        kept = _kept(rows[-1]) if rows else chosen.kept
        return Advice(
            policy=_policy_of(chosen.choice, self.found, self._shape()),
            keep=self.keep,
            by=self.by,
            kept=kept >= self.keep,
            figure="top-1 agreement" if tokens else "cosine",
            tried=tuple(sorted(tried, key=lambda t: (t.pairs, t.name))),
            validation=tuple(rows),
            times=times,
            choice=dict(sorted(chosen.choice.items())),
            skipped=tuple(sorted(self.local.skipped)),
            unmeasured=tuple(sorted(self.local.unmeasured)),
            model=type(self.model).__name__,
            length=length,
            dense_kept=dense.kept,
            seconds=time.monotonic() - self.clock.began,
        )

    def _predicts_tokens(self) -> bool:
        return self.judge.rows({DENSE_NAME: None}, counted=False)[0].top1 is not None


def _policy_of(
    choice: Mapping[Unit, str], found: Mapping[str, Pattern], shape: tuple[int, int]
) -> Policy:
    """Return the policy that runs a choice; whole layers of one candidate are `layers`."""
    layers: dict[int, Pattern] = {}
    heads: dict[int, dict[int, Pattern]] = {}
    for layer in sorted({unit[0] for unit in choice}):
        own = {head: choice[of, head] for of, head in sorted(choice) if of == layer}
        names = set(own.values())
        if len(names) == 1 and len(own) == shape[1]:
            if names != {DENSE_NAME}:
                layers[layer] = found[own[0]]
        else:
            heads[layer] = {head: found[name] for head, name in own.items() if name != DENSE_NAME}
    return Policy(Full(), layers=layers, heads=heads, num_layers=shape[0], num_key_heads=shape[1])


def _kept(row: PolicyQuality) -> float:
    return row.cosine if row.top1 is None else row.top1


def _margin(row: PolicyQuality) -> float:
    """Return how far another text may fall below what this one keeps.

    KL hardly differs from text to text where top-1 agreement does: what is kept beyond what the KL
    promises is luck of this text. Without tokens it is the standard error of the difference between
    two such texts.
    """
    if row.kl is None:
        return math.sqrt(2) * row.standard_error
    promised = 1 - LOST * math.sqrt(max(0.0, row.kl))
    return max(0.0, _kept(row) - promised)


def _size(call: dict[str, Any]) -> int:
    return max(v.shape[:2].numel() for v in call.values() if isinstance(v, torch.Tensor))

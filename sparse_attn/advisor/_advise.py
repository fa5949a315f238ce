"""`advise`: profile a model's heads, choose a pattern for each, check, validate."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import groupby
from os import PathLike
from typing import Any

import torch
from torch import nn

from .._binding import bound
from .._checks import Number, check_choice, check_kind, check_share, refuse
from .._observe import watching
from .._progress import Progress
from ..patterns import Full, Pattern
from ..policy import Policy
from ..quality._calls import as_inputs, call_model, evaluating
from ..quality._model import Judge, PolicyQuality
from ._advice import Advice
from ._candidates import named
from ._causal import is_causal_in
from ._clock import TIMED, Clock
from ._findings import Tried
from ._local import Local, Unit
from ._memory import Memory
from ._search import Choice, Outcome, Search
from ._times import checked_lengths, length_of, resized, seconds_of

__all__ = ["advise", "policy_of"]

OWNER = "advise"
#: Bisections of the price of error.
STEPS = 10
#: Top-1 agreement that another text may lose, by the root of this one's KL (docs/advisor.md).
LOST = 0.72
#: What weighs a key head visits less of the pairs, so that it moves the output more than rounding.
PROBED = 0.15
#: Shares of the time after which a stage stops: local errors, weights, single candidates, search.
MEASURED, WEIGHED, SINGLE, SEARCHED = 0.3, 0.45, 0.65, 0.9
_HELD_BYTES = 4 << 30
_LEAST_TOKENS = 64


def advise(
    model: nn.Module,
    inputs: Any,
    keep: float = 0.95,
    *,
    validate: Any = None,
    patterns: Any = None,
    lengths: Any = None,
    by: str = "pairs",
    minutes: float | None = None,
    resume: str | PathLike[str] | None = None,
    progress: bool = True,
) -> Advice:
    """Find a policy by layer and key head that keeps the model's answers at the least cost.

    1. The model runs once; every candidate is compared with dense attention on the queries, keys
       and values of each layer, by key head.
    2. Key heads are weighed by what one candidate in each of them alone does to the model's output;
       layers, where there is less time.
    3. Candidates are chosen by cost and weighted error; the price of error is bisected until the
       least cost is found at which the model's output on `inputs` keeps what was asked, and at
       which its KL promises as much on other text: the same KL changes fewer tokens of easy text.
    4. The choice is judged on other text. Where it keeps too little there, what was missing is
       added to what is asked and the search goes on, twice; then the sparse choice that kept most
       follows. The advice names how many were judged.

    Costs are pairs, the same on every machine, or the time that attention is predicted to take:
    visited tiles, by rates that are measured once on a device and kept. Both are told of all that
    was tried. Nothing is random: without `minutes`, equal inputs (and rates) give an equal policy.

    Parameters
    ----------
    model : nn.Module
        A transformers model, one with ``nn.MultiheadAttention``, or one that calls
        ``F.scaled_dot_product_attention``. It is left as it was.
    inputs : Tensor, mapping, or list of these
        Token ids, or the keyword arguments of a call: the text that the search may see.
    keep : float
        Share of the positions whose most likely token stays that of dense attention; the outputs'
        mean cosine for models without tokens. Above 0, up to 1.
    validate : as `inputs`, optional
        Text that the search does not see. By default the last of several inputs, or the second
        half of one text.
    patterns : list or mapping of Pattern, optional
        Candidates; by default bands with sinks, a strided pattern and block top-k.
    lengths : list of int, optional
        Lengths at which the model is timed, dense and under the policy; by default that of the
        validation text.
    by : {"pairs", "time"}
        The cost: pairs visited, or the predicted time on this device.
    minutes : float, optional
        Stages are cut short so that the search takes about this long.
    resume : path, optional
        A file that keeps what was measured: a search of the same model, inputs and patterns that
        was cut off goes on from it. The file of another search is refused.
    progress : bool
        Show a progress bar, with the time left, where tqdm is installed.

    Returns
    -------
    Advice
        With ``.policy``, ``.kept`` (whether the validation kept `keep`; otherwise the policy is the
        sparse choice that kept most), ``.table()``, ``.plot()``, ``.report(path)`` and
        ``.save(path)``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Arguments of a wrong kind; a model whose attention no policy reaches.

    Examples
    --------
    >>> import sparse_attn as sa, torch, transformers
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...     vocab_size=64,
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> ids = torch.randint(0, 64, (1, 256))
    >>> advice = sa.advise(model, ids, keep=0.5, patterns=[sa.Band((31, 0))], progress=False)
    >>> advice.kept
    True

    Notes
    -----
    Kin: the offline search of MInference (Jiang et al. 2024), by head on local errors; SpargeAttn's
    tuning (Zhang et al. 2025), by relative L1. Neither checks the model's output.
    """
    check_kind(OWNER, "model", model, nn.Module, "an nn.Module")
    check_share(OWNER, "keep", keep)
    check_choice(OWNER, "by", by, ("pairs", "time"))
    if minutes is not None:
        check_kind(OWNER, "minutes", minutes, Number, "a float or None")
        if not minutes > 0:
            raise refuse(OWNER, "minutes above 0", minutes)
    check_kind(OWNER, "resume", resume, (str, PathLike, type(None)), "a path or None")
    calls, other = _split(as_inputs(OWNER, inputs), validate)
    length = length_of(OWNER, calls[0])
    wanted = [length] if lengths is None else checked_lengths(OWNER, lengths)
    is_causal = patterns is not None or is_causal_in(OWNER, model, calls[0])
    found = named(OWNER, patterns, length, by, is_causal)
    memory = Memory(resume, model, calls, found)
    run = _Run(model, calls, other, found, float(keep), by, minutes, memory)
    with torch.no_grad(), evaluating(model):
        return run.advice(wanted, progress)


class _Run:
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
        layers, heads = self._told()
        self.clock = Clock(minutes, len(calls) * layers, layers * heads + len(found) + STEPS)
        self.local = Local(found, step=self._measured, late=self.clock.out_of_time(MEASURED))
        self._searching = False
        self.judge = Judge(OWNER, model, calls, hold=self._holds())

    def _holds(self) -> bool:
        """Whether the outputs of dense attention stay in memory: not when they are large."""
        config = getattr(self.model, "config", None)
        width = getattr(config, "vocab_size", 1)
        return 4 * width * sum(_size(call) for call in self.calls) < _HELD_BYTES

    def advice(self, lengths: list[int], progress: bool) -> Advice:
        """Search and validate."""
        steps = self.clock.layers + len(self.calls) * self.clock.evaluations
        with Progress(steps, progress) as bar:
            self.bar = bar
            self.step("dense attention", 0)
            self.clock.time_forward(lambda: self.judge.rows({"dense": None}, counted=False))
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
            for done, length in enumerate(lengths):
                self.clock.evaluations, self.clock.after = 0, TIMED * (len(lengths) - done)
                self.step("times", 0)
                times[length] = self._times(chosen.choice, length)
        return self._made(search, chosen, rows, times)

    def step(self, name: str, steps: int = 1) -> None:
        """Show how far the search is, and how long it still takes."""
        self.bar.step(name, steps, self.clock.left())

    def _measured(self, name: str, layers: int = 1) -> None:
        self.clock.measured(layers)
        self.step(name, layers)

    def _told(self) -> tuple[int, int]:
        """Return the layers and key heads that the configuration tells, for the estimate alone."""
        config = getattr(self.model, "config", None)
        heads: Any = getattr(config, "num_key_value_heads", None)
        if heads is None:
            heads = getattr(config, "num_attention_heads", 1)
        return getattr(config, "num_hidden_layers", 1), heads

    def _expect(self, choices: list[Choice], steps: int = STEPS) -> None:
        """Count what is still to be judged: choices that are not known, and steps of the search."""
        unknown = sum(self.memory.judged(choice) is None for choice in choices)
        self.clock.evaluations = unknown + steps
        self.bar.expect(len(self.calls) * self.clock.evaluations)

    def _search(self, search: Search) -> None:
        """Weigh key heads or layers, and judge every candidate alone."""
        single = {n: self.local.everywhere(n) for n in self.found if n != "dense"}
        mean = {name: self.local.pairs(choice) for name, choice in single.items()}
        error = {name: self.local.error(choice) for name, choice in single.items()}
        few = [name for name in single if mean[name] <= max(PROBED, min(mean.values()))]
        probe = min(few, key=lambda name: (error[name], name))
        search.try_choice("dense", self.local.everywhere("dense"))
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
            policy = policy_of(choice, self.found, self._shape())
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
        rows = judge.rows({"dense": None})
        self.clock.validated()

        def kept(outcome: Outcome) -> float:
            self.step(f"validation of {outcome.name}", 0)
            policy = policy_of(outcome.choice, self.found, self._shape())
            rows.extend(judge.rows({outcome.name: policy}))
            self.clock.validated()
            if _kept(rows[-1]) < self.keep:
                self._expect([])
            return _kept(rows[-1])

        return search.validated(best, self.keep, kept, STEPS, self.clock.out_of_time(1.0)), rows

    def _times(self, choice: Choice, length: int) -> tuple[float, float]:
        """Return the seconds of a forward at a length, dense and under the policy."""
        call = resized((self.other or self.calls)[0], length)
        policy = policy_of(choice, self.found, self._shape())
        return seconds_of(OWNER, self.model, call, Full()), seconds_of(
            OWNER, self.model, call, policy
        )

    def _made(
        self,
        search: Search,
        chosen: Outcome,
        rows: list[PolicyQuality],
        times: dict[int, tuple[float, float]],
    ) -> Advice:
        tried = [
            Tried(o.name, o.pairs, o.cost, o.kept, o.loss, o is chosen)
            for o in search.tried.values()
        ]
        (dense,) = (o for o in search.tried.values() if set(o.choice.values()) == {"dense"})
        tokens = rows[-1].top1 is not None if rows else self._predicts_tokens()
        kept = _kept(rows[-1]) if rows else chosen.kept
        return Advice(
            policy=policy_of(chosen.choice, self.found, self._shape()),
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
            length=length_of(OWNER, self.calls[0]),
            dense_kept=dense.kept,
            seconds=time.monotonic() - self.clock.began,
        )

    def _predicts_tokens(self) -> bool:
        return self.judge.rows({"dense": None}, counted=False)[0].top1 is not None


def policy_of(
    choice: Mapping[Unit, str], found: Mapping[str, Pattern], shape: tuple[int, int]
) -> Policy:
    """Return the policy that runs a choice; whole layers of one candidate are `layers`."""
    layers: dict[int, Pattern] = {}
    heads: dict[int, dict[int, Pattern]] = {}
    for layer in sorted({unit[0] for unit in choice}):
        own = {head: choice[of, head] for of, head in sorted(choice) if of == layer}
        names = set(own.values())
        if len(names) == 1 and len(own) == shape[1]:
            if names != {"dense"}:
                layers[layer] = found[own[0]]
        else:
            heads[layer] = {head: found[name] for head, name in own.items() if name != "dense"}
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


def _split(
    calls: list[dict[str, Any]], validate: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the search's inputs and those of the validation."""
    if validate is not None:
        other = as_inputs(OWNER, validate, "validate")
        for call in other:
            length_of(OWNER, call, "validate")  # refuses what has none
        return calls, other
    if len(calls) > 1:
        return calls[:-1], calls[-1:]
    (call,) = calls
    length = length_of(OWNER, call)
    if list(call) != ["input_ids"] or length < 2 * _LEAST_TOKENS:
        return calls, []
    first, second = call["input_ids"].split(length - length // 2, dim=1)
    return [{"input_ids": first}], [{"input_ids": second}]


def _size(call: dict[str, Any]) -> int:
    return max(v.shape[:2].numel() for v in call.values() if isinstance(v, torch.Tensor))

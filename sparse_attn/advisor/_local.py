"""Local errors: what each candidate does to each layer and key head, while the model runs.

The model runs densely once over each input; a watcher sees query, key and value of one layer at a
time, compares every candidate with dense attention on them, and keeps three numbers for each key
head. Nothing of a layer outlives its call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from .._checks import refuse
from .._observe import Attended
from ..patterns import Full, Pattern, TopK
from ..quality._compare import Reference
from ..quality._counts import pair_counts
from ._rates import cost

__all__ = ["Local", "Unit"]

Unit = tuple[int, int]  # layer, key head
#: Error, mass, pairs and cost of dense attention.
_DENSE = (0.0, 1.0, 1.0, 1.0)


@dataclass
class Local:
    """Figures of every candidate for every unit (layer, key head).

    Means over the inputs, by the pairs that each has.

    Attributes
    ----------
    candidates : mapping of str to Pattern
        Dense attention is the last.
    figures : dict
        By unit, then by candidate: error, mass kept, share of pairs and cost. The error's square is
        the squared difference of the head's output over the square of the whole layer's, so that
        heads of a layer compare and add up. The cost is the predicted share of dense attention's
        time.
    allowed : dict
        By unit: how many pairs it has, as a share of all units'.
    skipped : set of int
        Layers that were left alone: a window of the model's own, another number of queries.
    unmeasured : set of int
        Layers that dense attention alone serves, since there was no time for their candidates.
    step : callable
        Called after every layer.
    late : callable
        Says whether the time for measuring is over; one layer is always measured.
    """

    candidates: Mapping[str, Pattern]
    figures: dict[Unit, dict[str, tuple[float, float, float, float]]] = field(default_factory=dict)
    allowed: dict[Unit, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    unmeasured: set[int] = field(default_factory=set)
    step: Callable[..., None] = field(default=lambda name, steps=1: None, repr=False)
    late: Callable[[], bool] = field(default=lambda: False, repr=False)
    _pairs: dict[Unit, float] = field(default_factory=dict, repr=False)

    def __call__(self, call: Attended) -> None:
        """Judge all candidates on a layer's tensors."""
        layer, query, key = call.layer, call.query, call.key
        if call.windowed or query.shape[2] != key.shape[2]:
            self.skipped.add(layer)
            return
        if self.figures and self.late():
            self._leave(call)
        else:
            self._measure(call)
        self.step(f"local errors, layer {layer}")

    def _leave(self, call: Attended) -> None:
        """Let dense attention alone serve a layer, unless another input has measured it."""
        heads = call.key.shape[1]
        if (call.layer, 0) not in self.figures:
            self.unmeasured.add(call.layer)
            for head in range(heads):
                dense = {name: _DENSE for name, own in self.candidates.items() if own == Full()}
                self.figures[call.layer, head] = dense
        allowed = pair_counts(call.query, call.key, Full(), call.common, call.real_rows())
        self._allow(call.layer, heads, allowed)

    def _measure(self, call: Attended) -> None:
        """Compare every candidate with dense attention on a layer's tensors."""
        layer, query, key, common = call.layer, call.query, call.key, call.common
        reference = Reference(query, key, call.value, common, call.real_rows())
        heads = key.shape[1]
        allowed = _by_key_head(reference.allowed, heads).sum((0, 2))
        weights = [
            self._weight((layer, head), pairs) for head, pairs in enumerate(allowed.tolist())
        ]

        def share(shares: torch.Tensor) -> torch.Tensor:  # texts of padding alone have none
            visited = _by_key_head(shares * reference.allowed, heads).nansum((0, 2))
            return visited / allowed.clamp(min=1)

        for name, candidate in self.candidates.items():
            if candidate == Full():
                rows = [list(_DENSE)] * heads
            else:
                placed, keywords = call.under(candidate)
                kept = reference.compare(placed, keywords)
                error = kept.squares / reference.dense_squares.sum().clamp(min=1e-30)
                # each (B, Hq) -> (Hkv,)
                by_head = [
                    _by_key_head(error, heads).sum((0, 2)).sqrt(),
                    _by_key_head(kept.mass, heads).nanmean((0, 2)).nan_to_num(1.0),
                    share(kept.pairs_by_head),
                ]
                rows = torch.stack(by_head, 1).tolist()
                pairs = [row[2] for row in rows]
                if isinstance(candidate, TopK):  # which scores all keys of its blocks
                    read = reference.pairs(placed._region, keywords)
                    pairs = share(read / reference.allowed).tolist()
                costs = cost(candidate, query, key, bool(common.get("is_causal")), pairs)
                rows = [[*row, own] for row, own in zip(rows, costs, strict=True)]
            for head, row in enumerate(rows):
                self._add((layer, head), name, row, weights[head])
        self._allow(layer, heads, reference.allowed)

    def _allow(self, layer: int, heads: int, allowed: torch.Tensor) -> None:
        """Add the pairs that a layer has, by key head."""
        shares = _by_key_head(allowed, heads).sum((0, 2)).tolist()
        for head, share in enumerate(shares):
            self.allowed[layer, head] = self.allowed.get((layer, head), 0.0) + share

    def _weight(self, unit: Unit, pairs: float) -> float:
        """Return the share that an input's pairs are of all that were measured of a unit."""
        measured = self._pairs[unit] = self._pairs.get(unit, 0.0) + pairs
        return pairs / measured if measured else 1.0

    def _add(self, unit: Unit, name: str, row: list[float], weight: float) -> None:
        """Take a row into the mean, in which its input has a weight."""
        own = self.figures.setdefault(unit, {})
        old = own.get(name, (0.0,) * len(row))
        mean = [before + (now - before) * weight for before, now in zip(old, row, strict=True)]
        own[name] = (mean[0], mean[1], mean[2], mean[3])

    def finish(self, owner: str) -> None:
        """Make weights of the units' pairs; refuse a model whose attention was not seen."""
        if not self.figures:
            got = "none"
            if self.skipped:
                layers = ", ".join(map(str, sorted(self.skipped)))
                got = f"layers with a window of their own, or other queries than keys: {layers}"
            raise refuse(owner, "a model with dense self-attention that a policy reaches", got)
        total = sum(self.allowed.values())
        if not total:
            raise refuse(owner, "inputs with a token that is not padding", "padding alone")
        self.allowed = {unit: pairs / total for unit, pairs in self.allowed.items()}

    def everywhere(self, name: str) -> dict[Unit, str]:
        """Return the choice of one candidate wherever it was measured; the others are dense."""
        (dense,) = (own for own, pattern in self.candidates.items() if pattern == Full())
        return {unit: name if name in own else dense for unit, own in self.figures.items()}

    def pairs(self, choice: Mapping[Unit, str]) -> float:
        """Return the share of all pairs that a choice of candidates visits."""
        return sum(self.allowed[u] * self.figures[u][name][2] for u, name in choice.items())

    def cost(self, choice: Mapping[Unit, str]) -> float:
        """Return the predicted share of dense attention's time."""
        return sum(self.allowed[u] * self.figures[u][name][3] for u, name in choice.items())

    def error(self, choice: Mapping[Unit, str]) -> float:
        """Return the sum of the squared errors."""
        return sum(self.figures[u][name][0] ** 2 for u, name in choice.items())


def _by_key_head(figures: torch.Tensor, heads: int) -> torch.Tensor:
    """View figures of query heads ``(B, Hq)`` by key head, ``(B, Hkv, Hq / Hkv)``."""
    return figures.unflatten(1, (heads, -1))

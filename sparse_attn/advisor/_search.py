"""The search: a candidate for each unit, cheapest first, checked on the model's own output.

Every unit takes the candidate with the least ``share + price * weight * error^2``, a share of pairs
or of predicted time. A high price is dense attention, a low one the least share; weights say what a
local error of a unit does to the model. The price is bisected on the model's own output until the
least share that keeps what was asked is found. No step is random: equal figures give equal
policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..quality._named import DENSE_NAME
from ._local import Local, Unit

__all__ = ["Choice", "Outcome", "Search"]

Choice = dict[Unit, str]
#: Prices between which the search looks: from the fewest pairs to next to dense.
LOWEST, HIGHEST = 1e-4, 1e6
#: Weights are at most this far from their median.
FARTHEST = 16.0


@dataclass(frozen=True)
class Outcome:
    """A choice that was tried, and what the model's output kept on the calibration text.

    Attributes
    ----------
    name : str
    choice : dict
        Units that it does not name are dense.
    pairs : float
        Share of all pairs, by the local figures.
    cost : float
        Predicted share of dense attention's time.
    kept : float
        Top-1 agreement with dense attention, or the outputs' cosine where there are no tokens.
    loss : float
        KL, or relative L1 where there are no tokens.
    margin : float
        How far `kept` of another such text may be below this.
    """

    name: str
    choice: Choice
    pairs: float
    cost: float
    kept: float
    loss: float
    margin: float

    def share(self, by: str) -> float:
        """Return the share that the search makes small."""
        return self.cost if by == "time" else self.pairs

    @property
    def is_dense(self) -> bool:
        """Whether dense attention alone runs."""
        return set(self.choice.values()) == {DENSE_NAME}

    @property
    def surely_kept(self) -> float:
        """What is kept, less the margin."""
        return self.kept - self.margin


class Search:
    """Finds the cheapest choice that keeps `keep`.

    Parameters
    ----------
    local : Local
        Errors and pairs of all units.
    judge : callable
        Name and choice -> what the model's output keeps, from 0 to 1, its loss and the margin of
        what it keeps.
    by : {"pairs", "time"}
        The share that is made small.
    """

    def __init__(
        self,
        local: Local,
        judge: Callable[[str, Choice], tuple[float, float, float]],
        by: str = "pairs",
    ) -> None:
        self.local, self.judge, self.by = local, judge, by
        self.weights: dict[Unit, float] = {}
        self.tried: dict[tuple[str, ...], Outcome] = {}

    def choose(self, price: float) -> Choice:
        """Return the best candidate of every unit at a price of error."""
        return {unit: self._best_of(unit, price) for unit in self.local.figures}

    def _best_of(self, unit: Unit, price: float) -> str:
        weight = price * self.weights.get(unit, 1.0)
        figures = self.local.figures[unit]

        def loss(name: str) -> tuple[float, str]:
            error, _, pairs, cost = figures[name]
            return (cost if self.by == "time" else pairs) + weight * error**2, name

        return min(figures, key=loss)

    def try_choice(self, name: str, choice: Choice) -> Outcome:
        """Judge a choice on the model's output, once."""
        key = tuple(choice[unit] for unit in sorted(choice))
        if key not in self.tried:
            shares = self.local.pairs(choice), self.local.cost(choice)
            self.tried[key] = Outcome(name, choice, *shares, *self.judge(name, choice))
        return self.tried[key]

    def weigh(
        self, name: str, parts: Iterable[tuple[Unit, ...]], out_of_time: Callable[[], bool]
    ) -> None:
        """Weigh units by what candidate `name` in a part of them alone does to the model's output.

        The weight is the output's loss, less that of dense attention by these kernels, over the sum
        of the squared local errors, relative to the median of all parts. Without time for all
        parts, all weigh the same.
        """
        dense = self.try_choice(DENSE_NAME, dict.fromkeys(self.local.figures, DENSE_NAME))
        damage: dict[tuple[Unit, ...], float] = {}
        for part in parts:
            if out_of_time():
                return
            choice = dict.fromkeys(part, name)
            error, loss = self.local.error(choice), self.judge(_named(part), choice)[1]
            damage[part] = max(0.0, loss - dense.loss) / max(error, 1e-12)
        middle = sorted(damage.values())[len(damage) // 2]
        if middle > 0:
            for part, found in damage.items():
                weight = min(FARTHEST, max(1 / FARTHEST, found / middle))
                self.weights |= dict.fromkeys(part, weight)

    def find(
        self, keep: float, steps: int, out_of_time: Callable[[], bool] = lambda: False
    ) -> Outcome | None:
        """Return the cheapest outcome that surely keeps `keep`; None if none does."""
        low, high = math.log(LOWEST), math.log(HIGHEST)
        for _ in range(steps):
            if out_of_time():
                break
            middle = (low + high) / 2
            price = math.exp(middle)
            outcome = self.try_choice(f"search, price {price:.2g}", self.choose(price))
            if outcome.surely_kept >= keep:
                high = middle
            else:
                low = middle
        return self.best(keep)

    def validated(
        self,
        best: Outcome,
        keep: float,
        judge: Callable[[Outcome], float],
        steps: int,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Return the first of `best` and safer choices that keeps `keep` on other text.

        What a choice misses there is asked for on top, twice; then what kept most here is the last.
        Where more is missing than can be asked for on top, a choice of half the loss that would do
        by the two texts' losses is looked for.

        Parameters
        ----------
        best : Outcome
        keep : float
        judge : callable
            Outcome -> what it keeps of the other text.
        steps, out_of_time
            As in `find`.
        """
        for again in (True, True, False):
            kept = judge(best)
            if kept >= keep or best is self.most_kept():
                return best
            lost, share = 1 - best.surely_kept, (1 - keep) / (1 - kept)
            lost = max(lost - (keep - kept), lost * share / 2)
            safer = self.find(1 - lost, steps, out_of_time) if again else None
            best = self.most_kept() if safer is None or safer is best else safer
        judge(best)
        return best

    def most_kept(self) -> Outcome:
        """Return the sparse choice that kept most."""
        return max(self.sparse(), key=lambda o: (o.kept, -o.share(self.by), o.name))

    def sparse(self) -> list[Outcome]:
        """Return what was tried, but for dense attention everywhere."""
        return [o for o in self.tried.values() if not o.is_dense]

    def best(self, keep: float) -> Outcome | None:
        """Return the cheapest of what was tried that surely keeps `keep`."""
        good = [outcome for outcome in self.sparse() if outcome.surely_kept >= keep]
        return min(good, key=lambda o: (o.share(self.by), o.name), default=None)


def _named(part: tuple[Unit, ...]) -> str:
    (layer, head), *others = part
    return f"layer {layer} alone" if others else f"layer {layer}, key head {head} alone"

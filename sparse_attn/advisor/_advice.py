"""`Advice`: a policy, what it keeps on text that the search has not seen, and what was tried."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch

from ..policy import Policy
from ..quality._model import PolicyQuality
from ._local import Unit
from ._picture import draw_advice
from ._report import body, page

__all__ = ["Advice", "Tried"]


@dataclass(frozen=True)
class Tried:
    """A choice that was judged on the calibration text.

    Attributes
    ----------
    name : str
    pairs : float
        Share of the allowed pairs, by the local figures.
    cost : float
        Time of the attention that the search predicts, as a share of dense attention's.
    kept : float
        Top-1 agreement, or cosine.
    loss : float
        KL, or relative L1.
    chosen : bool
    """

    name: str
    pairs: float
    cost: float
    kept: float
    loss: float
    chosen: bool


@dataclass(frozen=True, eq=False)
class Advice:
    """What `advise` found.

    Attributes
    ----------
    policy : Policy
    keep : float
        What was asked.
    by : {"pairs", "time"}
        The cost that the search made small.
    kept : bool
        Whether the policy kept it: on the validation text, or without one on the calibration text.
    figure : str
        What `keep` counts: top-1 agreement, or cosine.
    tried : tuple of Tried
        Choices judged on the calibration text, by pairs.
    validation : tuple of PolicyQuality
        Dense attention, then the choices judged on other text, the last of them the policy; empty
        without such a text.
    times : dict of int to (float, float)
        By length: seconds of a forward, dense (this package's kernels) and under the policy.
    choice : dict of (layer, key head) to str
        The candidate of each.
    skipped : tuple of int
        Layers that were left as they are.
    model : str
        The model's class.
    length : int
        Positions of the calibration text.
    dense_kept : float
        What dense attention by this package's kernels keeps of the calibration text: less than all
        only by rounding.
    seconds : float
        Of the search.
    """

    policy: Policy
    keep: float
    by: str
    kept: bool
    figure: str
    tried: tuple[Tried, ...]
    validation: tuple[PolicyQuality, ...]
    times: dict[int, tuple[float, float]]
    choice: dict[Unit, str]
    skipped: tuple[int, ...]
    model: str
    length: int
    dense_kept: float
    seconds: float

    @property
    def chosen(self) -> Tried:
        """The policy among those tried."""
        return next(tried for tried in self.tried if tried.chosen)

    @property
    def pairs(self) -> float:
        """Share of pairs: counted on the validation text, else by the local figures."""
        return self.validation[-1].pairs if self.validation else self.chosen.pairs

    def summary(self) -> str:
        """Return the outcome in sentences."""
        judged = self.validation[-1] if self.validation else None
        where = "text the search has not seen" if judged else "the calibration text alone"
        got = self.chosen.kept
        if judged:
            got = judged.cosine if judged.top1 is None else judged.top1
        lines = []
        if not self.kept:
            lines.append(
                f"Could not keep {self.figure} of {self.keep:.1%} on {where}; "
                f"this is the best that was found."
            )
            if self.dense_kept < self.keep:
                lines.append(
                    f"Dense attention by other kernels keeps {self.dense_kept:.1%} in the model's "
                    "own dtype: no policy keeps more than rounding does. Search in float32."
                )
        line = f"{self.figure[0].upper()}{self.figure[1:]} of {got:.1%} on {where}, "
        line += f"at {self.pairs:.1%} of the pairs"
        if judged and judged.kl is not None:
            line += f"; KL {judged.kl:.4f}"
            dense = self.validation[0].perplexity
            if judged.perplexity is not None and dense is not None:
                line += f", perplexity {judged.perplexity / dense - 1:+.1%}"
        lines.append(line + ".")
        if len(self.validation) > 2:
            lines.append(f"{len(self.validation) - 1} choices were judged on that text.")
        for length, (dense_seconds, own) in self.times.items():
            lines.append(
                f"{length} positions: {own:.3g} s under the policy, {dense_seconds:.3g} s dense "
                f"({dense_seconds / own:.2f}x)."
            )
        if any(own >= dense_seconds for dense_seconds, own in self.times.values()):
            lines.append("It is not faster than dense attention everywhere: see sa.profile.")
        if self.skipped:
            lines.append(
                f"Layers left alone (a window of their own, other lengths): {_listed(self.skipped)}"
            )
        return "\n".join(lines)

    def table(self) -> str:
        """Return what was tried, and how many key heads have which candidate."""
        head = ("tried", "pairs", "time", self.figure, "loss")
        rows = [head]
        for tried in self.tried:
            name = f"* {tried.name}" if tried.chosen else f"  {tried.name}"
            shares = f"{tried.pairs:.1%}", f"{tried.cost:.1%}", f"{tried.kept:.1%}"
            rows.append((name, *shares, f"{tried.loss:.4f}"))
        text = _aligned(rows)
        heads = Counter(self.choice.values())
        counted = [("key heads", "candidate")]
        counted += [(str(number), name) for name, number in heads.most_common()]
        return f"{text}\n\n{_aligned(counted)}"

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"

    def __repr__(self) -> str:
        return f"Advice({self.model}, keep={self.keep}, kept={self.kept}, pairs={self.pairs:.3f})"

    def plot(self) -> Any:
        """Draw quality over cost of all that was tried, and the map of layers by heads.

        Returns
        -------
        matplotlib.figure.Figure
        """
        return draw_advice(self)

    def _repr_html_(self) -> str:
        """Return the advice for notebooks: outcome, pictures, tables."""
        return body(self)

    def report(self, path: str | PathLike[str]) -> None:
        """Write one self-contained HTML page: outcome, pictures, tables, the policy."""
        page(path, self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the policy with its figures to a JSON file, which `Policy.load` reads."""
        from .. import __version__

        about = {
            "model": self.model,
            "keep": self.keep,
            "by": self.by,
            "kept": self.kept,
            "figure": self.figure,
            "length": self.length,
            "pairs": self.pairs,
            "validation": [asdict(row) for row in self.validation],
            "tried": [asdict(row) for row in self.tried],
            "times": {str(length): list(pair) for length, pair in self.times.items()},
            "versions": {
                "sparse_attn": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        self.policy.save(path, about)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

"""What a search found: the policy, its figures, sentences and tables of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .._columns import aligned, written
from .._part_of import part_of
from ..policy import Policy
from ..quality._model import PolicyQuality
from ._local import Unit

__all__ = ["Findings", "Tried"]


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


@part_of("Advice")
@dataclass(frozen=True, eq=False)
class Findings:
    """What a search found, in words; `Advice` names the fields."""

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
    unmeasured: tuple[int, ...]
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
        """Return the outcome in sentences.

        Returns
        -------
        str
            What the policy keeps and costs, what was not reached, and times at each length.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> texts = [{"src": torch.randn(1, 256, 64)} for _ in range(2)]
        >>> advice = sa.advise(model, texts, 0.5, patterns=[sa.Band(31)], progress=False)
        >>> advice.summary().startswith("Cosine of 9")
        True
        """
        lines = [*self._shortfall(), *self._nothing_saved(), self._outcome()]
        if len(self.validation) > 2:
            lines.append(f"{len(self.validation) - 1} choices were judged on that text.")
        lines += self._timings()
        if self.unmeasured:
            lines.append(
                "Dense, since minutes left no time to measure candidates: layers "
                f"{_listed(self.unmeasured)}. More minutes, or fewer patterns, reach them."
            )
        if self.skipped:
            lines.append(
                f"Layers left alone (a window of their own, other lengths): {_listed(self.skipped)}"
            )
        return "\n".join(lines)

    @property
    def _where(self) -> str:
        if self.validation:
            return "text the search has not seen"
        return "the calibration text alone"

    def _shortfall(self) -> Iterator[str]:
        """Say that less was kept than was asked for, and what limits it."""
        if self.kept:
            return
        yield (
            f"Could not keep {self.figure} of {self.keep:.1%} on {self._where}; "
            "this is the best that was found."
        )
        if self.dense_kept < self.keep:
            yield (
                f"Dense attention by other kernels keeps {self.dense_kept:.1%} in the model's "
                "own dtype: no policy keeps more than rounding does. Search in float32."
            )

    def _nothing_saved(self) -> Iterator[str]:
        """Say that the policy costs what dense attention costs, where it does."""
        if round(self.pairs, 3) >= 1:
            yield (
                "No policy was found that saves pairs: this one visits all of them, as dense "
                "attention does. A longer text or a lower keep may leave some out."
            )
        elif self.by == "time" and self.chosen.cost >= 1:
            yield (
                "No policy was found that is predicted to save time: this one takes "
                f"{self.chosen.cost:.1%} of dense attention's. A longer text or a lower keep may."
            )

    def _outcome(self) -> str:
        """Say what the policy keeps, and at which share of the pairs."""
        judged = self.validation[-1] if self.validation else None
        got = self.chosen.kept
        if judged:
            got = judged.cosine if judged.top1 is None else judged.top1
        line = f"{self.figure[0].upper()}{self.figure[1:]} of {got:.1%} on {self._where}, "
        line += f"at {self.pairs:.1%} of the pairs"
        if judged and judged.kl is not None:
            line += f"; KL {judged.kl:.4f}"
            dense = self.validation[0].perplexity
            if judged.perplexity is not None and dense is not None:
                line += f", perplexity {judged.perplexity / dense - 1:+.1%}"
        return line + "."

    def _timings(self) -> Iterator[str]:
        """Say what a forward takes at each length that was timed."""
        for length, (dense, own) in self.times.items():
            mine, theirs = written([own, dense])
            yield (
                f"{length} positions: {mine} s under the policy, {theirs} s dense "
                f"({dense / own:.2f}x)."
            )
        if any(own >= dense for dense, own in self.times.values()):
            yield "It is not faster than dense attention everywhere: see sa.profile."

    def table(self) -> str:
        """Return what was tried, and how many key heads have which candidate.

        Returns
        -------
        str
            Two tables in fixed-width text; the choice is marked with a star.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> texts = [{"src": torch.randn(1, 256, 64)} for _ in range(2)]
        >>> advice = sa.advise(model, texts, 0.5, patterns=[sa.Band(31)], progress=False)
        >>> advice.table().splitlines()[-1]
        '4          Band(window=(31, 31), sinks=0, global_tokens=None)'
        """
        head = ("tried", "pairs", "time", self.figure, "loss")
        rows = [head]
        for tried in self.tried:
            name = f"* {tried.name}" if tried.chosen else f"  {tried.name}"
            shares = f"{tried.pairs:.1%}", f"{tried.cost:.1%}", f"{tried.kept:.1%}"
            rows.append((name, *shares, f"{tried.loss:.4f}"))
        text = aligned(rows)
        heads = Counter(self.choice.values())
        counted = [("key heads", "candidate")]
        counted += [(str(number), name) for name, number in heads.most_common()]
        return f"{text}\n\n{aligned(counted)}"

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self.model}, keep={self.keep}, kept={self.kept}, pairs={self.pairs:.3f})"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

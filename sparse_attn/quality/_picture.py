"""Quality over pairs: the picture of `quality.model`, and of the advisor's candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Judged", "draw"]

INK, FAINT, LINE = "#1f4e79", "#8a97a6", "#d9822b"


class Judged(Protocol):
    """A row of figures."""

    @property
    def name(self) -> str:
        """What is drawn beside the point."""

    @property
    def pairs(self) -> float:
        """Where the point stands."""

    @property
    def kl(self) -> float | None:
        """How high it stands; None where there are no tokens."""

    @property
    def rel_l1(self) -> float:
        """How high it stands then."""


def draw(rows: Sequence[Judged], ax: Any = None, frontier: bool = True) -> Any:
    """Draw one point a row: pairs across, KL (or relative L1) up, both small where it is good."""
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.figure(figsize=(7, 4.5), layout="constrained").gca()
    has_tokens = all(row.kl is not None for row in rows)
    label = "KL to dense attention" if has_tokens else "relative L1 of the output"
    points = [
        (row.pairs, max(1e-6, float(row.kl if row.kl is not None else row.rel_l1))) for row in rows
    ]
    ax.set(xlabel="pairs visited, share of the allowed", ylabel=label, yscale="log")
    ax.grid(True, color="#e6eaef", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_formatter("{x:.0%}")
    if frontier and points:
        best, least = [], float("inf")
        for x, y in sorted(points):
            if y < least:
                best.append((x, y))
                least = y
        ax.step(*zip(*best, strict=True), where="post", color=LINE, linewidth=1.2, label="frontier")
    for row, (x, y) in zip(rows, points, strict=True):
        ax.plot(x, y, "o", color=INK, markersize=5)
        ax.annotate(
            row.name, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=7, color=FAINT
        )
    return ax

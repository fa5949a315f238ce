"""Quality over pairs: the picture of `quality.model`, and of the advisor's candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from .._drawing import axes_for

__all__ = ["FAINT", "INK", "LINE", "Judged", "draw", "draw_frontier"]

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


def draw_frontier(ax: Any, points: Sequence[tuple[float, float]]) -> None:
    """Draw a line through the points that no other is below and left of; there is at least one."""
    best, least = [], float("inf")
    for x, y in sorted(points):
        if y < least:
            best.append((x, y))
            least = y
    ax.step(*zip(*best, strict=True), where="post", color=LINE, linewidth=1.2, label="frontier")


def draw(rows: Sequence[Judged], ax: Any = None) -> Any:
    """Draw one numbered point a row: pairs across, KL (or relative L1) up, both better if small.

    A row whose pairs are not known has none.
    """
    ax = axes_for(ax, 7, 4.5)
    rows = [row for row in rows if not math.isnan(row.pairs)]
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
    if points:
        draw_frontier(ax, points)
    near: dict[tuple[int, int], list[int]] = {}
    for number, (x, y) in enumerate(points, 1):
        ax.plot(x, y, "o", color=INK, markersize=5, label=f"{number}  {rows[number - 1].name}")
        near.setdefault((round(x * 50), round(math.log10(y) * 10)), []).append(number)
    for numbers in near.values():
        text = ", ".join(map(str, numbers))
        place = {"xytext": (5, 4), "textcoords": "offset points"}
        ax.annotate(text, points[numbers[0] - 1], fontsize=8, color=FAINT, **place)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7, handlelength=0.8)
    return ax

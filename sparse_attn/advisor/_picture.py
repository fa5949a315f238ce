"""Pictures of what a search found: quality over cost, and which candidate each key head has."""

from __future__ import annotations

from typing import Any

from .._drawing import draw_cells, make_room, need_matplotlib
from ..quality._picture import FAINT, INK, LINE, draw_frontier
from ._findings import Findings

__all__ = ["draw_findings"]

#: Points that a letter of a name and a line of it take.
_LETTER, _LINE = 3.9, 9


def draw_findings(found: Findings) -> Any:
    """Return a figure with both pictures."""
    need_matplotlib()
    from matplotlib import pyplot

    layers = 1 + max(layer for layer, _ in found.choice)
    height = max(4.5, 0.16 * layers)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, height), layout="constrained", width_ratios=(3, 2)
    )
    _over_cost(left, found)
    _by_head(right, found, layers)
    make_room(right)
    figure.draw_without_rendering()  # the map's legend takes room from the points' names
    _name_points(left, found)
    return figure


def _over_cost(ax: Any, found: Findings) -> None:
    """Draw all that was tried over what the search made small, the frontier and the choice."""
    points = _points(found)
    draw_frontier(ax, points)
    ax.axhline(1 - found.keep, color=FAINT, linestyle="--", linewidth=0.9, label="what was asked")
    for tried, (x, y) in zip(found.tried, points, strict=True):
        ax.plot(x, y, "o", color=LINE if tried.chosen else INK, markersize=9 if tried.chosen else 4)
    timed = found.by == "time"
    ax.set(
        xlabel="predicted time, share of dense" if timed else "pairs visited, share of the allowed",
        ylabel=f"lost {found.figure}",
        title=f"What was tried on {found.length} positions",
    )
    ax.xaxis.set_major_formatter("{x:.0%}")
    ax.yaxis.set_major_formatter("{x:.1%}")
    ax.grid(True, color="#e6eaef", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)


def _points(found: Findings) -> list[tuple[float, float]]:
    """Return what was tried as share and loss."""
    return [(t.cost if found.by == "time" else t.pairs, 1 - t.kept) for t in found.tried]


def _name_points(ax: Any, found: Findings) -> None:
    """Name the choice and the candidates that ran alone, but none over another name.

    Most of them lie close together where little is lost; the report's table names them all.
    """
    points = _points(found)
    places = ax.transData.transform(points) * 72 / ax.figure.dpi
    taken: list[tuple[float, float, float]] = []
    rows = zip(found.tried, points, places, strict=True)
    for tried, point, (x, y) in sorted(rows, key=lambda row: (not row[0].chosen, -row[1][1])):
        if not tried.chosen and tried.name.startswith("search"):
            continue
        name = tried.name.removesuffix(", everywhere")
        shift = (8, -12) if tried.chosen else (6, 4)
        left, low = x + shift[0], y + shift[1]
        right = left + _LETTER * len(name)
        if any(left < r and start < right and abs(low - at) < _LINE for start, r, at in taken):
            continue
        taken.append((left, right, low))
        ax.annotate(name, point, xytext=shift, textcoords="offset points", fontsize=7, color=FAINT)


def _by_head(ax: Any, found: Findings, layers: int) -> None:
    """Draw the map of layers by key heads, coloured by candidate."""
    heads = 1 + max(head for _, head in found.choice)
    cells = [[found.choice.get((layer, head)) for head in range(heads)] for layer in range(layers)]
    draw_cells(ax, cells, [str(head) for head in range(heads)])
    ax.set(xlabel="key head", title="The policy")

"""Pictures of what a search found: quality over cost, and which candidate each key head has."""

from __future__ import annotations

from typing import Any

from .._drawing import draw_cells
from ..quality._picture import FAINT, INK, LINE, draw_frontier
from ._findings import Findings

__all__ = ["draw_findings"]


def draw_findings(found: Findings) -> Any:
    """Return a figure with both pictures."""
    from matplotlib import pyplot

    layers = 1 + max(layer for layer, _ in found.choice)
    height = max(4.5, 0.16 * layers)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, height), layout="constrained", width_ratios=(3, 2)
    )
    _over_cost(left, found)
    _by_head(right, found, layers)
    return figure


def _over_cost(ax: Any, found: Findings) -> None:
    """Draw all that was tried over what the search made small, the frontier and the choice."""
    timed = found.by == "time"
    points = [(tried.cost if timed else tried.pairs, 1 - tried.kept) for tried in found.tried]
    draw_frontier(ax, points)
    ax.axhline(1 - found.keep, color=FAINT, linestyle="--", linewidth=0.9, label="what was asked")
    for tried, (x, y) in zip(found.tried, points, strict=True):
        ax.plot(x, y, "o", color=LINE if tried.chosen else INK, markersize=9 if tried.chosen else 4)
        if tried.chosen or not tried.name.startswith("search"):
            ax.annotate(
                tried.name.removesuffix(", everywhere"),
                (x, y),
                xytext=(8, -12) if tried.chosen else (6, 4),
                textcoords="offset points",
                fontsize=7,
                color=FAINT,
            )
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


def _by_head(ax: Any, found: Findings, layers: int) -> None:
    """Draw the map of layers by key heads, coloured by candidate."""
    heads = 1 + max(head for _, head in found.choice)
    cells = [[found.choice.get((layer, head)) for head in range(heads)] for layer in range(layers)]
    draw_cells(ax, cells, [str(head) for head in range(heads)])
    ax.set(xlabel="key head", title="The policy")

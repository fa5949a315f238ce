"""The report's pictures: time and memory over length, time and accuracy over density."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import landscape
from .runner import Row
from .store import Run

Curve = dict[str, list[tuple[float, float]]]
STYLE = {
    "dense": "black",
    "flash": "0.45",
    "cudnn": "0.65",
    "sdpa": "0.45",
    "math": "0.75",
    "naive": "tab:red",
    "band": "tab:blue",
    "dilated": "tab:cyan",
    "strided": "tab:purple",
    "blocks": "tab:green",
    "block top-k": "tab:olive",
    "top-k": "tab:orange",
    "flex band": "tab:pink",
}


def draw(run: Run, path: Path) -> list[tuple[str, str]]:
    """Draw what the run has curves for; return titles and file names beside ``path``."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for name, title, painter in (
        ("length", "Time and memory over length", _length),
        ("density", "Time and accuracy over density", _density),
        ("sizes", "Time of the best peer over ours", _landscape),
    ):
        if any(result.sweep == name for result in run.results):
            figure, axes = pyplot.subplots(1, 2, figsize=(15, 5))
            painter(run, axes)
            figure.suptitle(f"{title}: {run.device_name}, torch {run.machine['torch']}")
            figure.tight_layout()
            picture = path.with_name(f"{path.stem}-{name}.png")
            figure.savefig(picture, dpi=110)
            pyplot.close(figure)
            drawn.append((title, picture.name))
    return drawn


def curves(
    run: Run, sweep: str, x: Callable[[Row], float], y: Callable[[Row], float | None]
) -> Curve:
    """Collect (x, y) of every entry along a sweep, failures left out."""
    found: Curve = {}
    for result in run.results:
        if result.sweep == sweep:
            for row in result.rows:
                value = None if row.failure else y(row)
                if value is not None:
                    found.setdefault(row.name, []).append((x(row), value))
    return {name: sorted(points) for name, points in found.items()}


def _length(run: Run, axes: Any) -> None:
    def length(row: Row) -> float:
        return float(row.case["length"])

    _lines(axes[0], curves(run, "length", length, lambda row: row.ms), log_x=True)
    axes[0].set(xlabel="sequence length", ylabel="milliseconds", title="time, causal")
    memory = curves(run, "length", length, lambda row: row.peak_bytes / 2**20)
    _lines(axes[1], memory, log_x=True)
    axes[1].set(xlabel="sequence length", ylabel="MiB beyond the inputs", title="memory")


def _density(run: Run, axes: Any) -> None:
    points = curves(run, "density", lambda row: row.density, lambda row: row.ms)
    dense = [ms for _, ms in points.pop("dense", [])]
    peers = {name: points.pop(name) for name in ("flash", "cudnn", "sdpa") if name in points}
    _lines(axes[0], points)
    if dense:
        level = sorted(dense)[len(dense) // 2]
        axes[0].axhline(level, color="black", label="dense")
        shares = [step / 50 for step in range(1, 51)]
        promised = [level * share for share in shares]
        axes[0].plot(shares, promised, color="black", linestyle=":", label="dense x share")
    for name, line in peers.items():
        level = sorted(ms for _, ms in line)[len(line) // 2]
        axes[0].axhline(level, color=STYLE[name], linestyle="--", label=name)
    axes[0].set(
        xlabel="share of pairs attended",
        ylabel="milliseconds",
        xlim=(0, 1),
        title="time; break-even is where a line meets dense",
    )
    _legend(axes[0])

    accuracy = curves(run, "density", lambda row: row.density, lambda row: row.to_dense)
    _lines(axes[1], {name: line for name, line in accuracy.items() if name in points})
    axes[1].set(
        xlabel="share of pairs attended",
        ylabel="relative distance from dense output",
        title="accuracy, inputs with locality and sinks",
        xlim=(0, 1),
    )


def _landscape(run: Run, axes: Any) -> None:
    """Draw the best peer's time over ours by head dim, and by queries and keys; mark the low."""
    found = landscape.points(run.results)
    dims = [point for point in found if point.sweep == "head dims"]
    axes[0].plot([p.head_dim for p in dims], [p.ratio for p in dims], color="0.6", zorder=1)
    for peer in sorted({p.peer for p in dims}):
        its = [p for p in dims if p.peer == peer]
        axes[0].scatter([p.head_dim for p in its], [p.ratio for p in its], label=peer, zorder=2)
    low = [p for p in dims if p.ratio < landscape.MARKED]
    axes[0].scatter(
        [p.head_dim for p in low],
        [p.ratio for p in low],
        s=120,
        facecolors="none",
        edgecolors="red",
        label=f"under {landscape.MARKED:g}",
    )
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set(xlabel="head dim", ylabel="best peer's time / ours", title="8K, causal, 16 heads")
    axes[0].set_ylim(bottom=0)
    axes[0].grid(alpha=0.3)
    axes[0].legend(fontsize=8)

    sizes = {(p.queries, p.keys): p.ratio for p in found if p.sweep == "sizes"}
    queries, keys = (sorted({size[side] for size in sizes}) for side in (0, 1))
    missing = float("nan")
    grid = [[sizes.get((row, column), missing) for column in keys] for row in queries]
    axes[1].imshow(grid, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto", origin="lower")
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            marked = value < landscape.MARKED
            look = {"color": "red", "weight": "bold"} if marked else {"color": "black"}
            axes[1].text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, **look)
    axes[1].set_xticks(range(len(keys)), [_size(n) for n in keys])
    axes[1].set_yticks(range(len(queries)), [_size(n) for n in queries])
    axes[1].set(xlabel="keys", ylabel="queries", title="all keys, 32 / 8 heads of 128, batch 1")


def _size(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)


def _lines(axis: Any, points: Curve, log_x: bool = False) -> None:
    for name, line in points.items():
        axis.plot(
            *zip(*line, strict=True), marker="o", markersize=3, label=name, color=STYLE.get(name)
        )
    if log_x:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K")
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    _legend(axis)


def _legend(axis: Any) -> None:
    """Name the lines beside the axes, where none of them runs."""
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)

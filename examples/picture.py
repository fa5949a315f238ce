"""The demo's picture: what each variant attends to, what that costs, and what it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import ListedColormap

if TYPE_CHECKING:
    from demo import Result

COLOURS = {
    "SDPA": "#9a9a9a",
    "naive": "#b5534f",
    "fused": "#4a6fb0",
    "band": "#3f8f5f",
    "dilated": "#2f9aa8",
    "block-sparse": "#94a136",
    "top-k": "#cf8f2e",
    "block top-k": "#8a5fb0",
}
MIB = 2**20


def draw(
    path: str, short: list[Result], long: list[Result], sdpa_ms: float, length: int, place: str
) -> None:
    """Write the picture: patterns of the short part above, bars of both parts below."""
    shown = [result for result in short if result.variant.name != "naive"]
    figure = pyplot.figure(figsize=(15, 7.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.3))
    upper.suptitle(
        "Which keys (across) each query (down) attends to: one head, a passage of "
        f"{short[0].picture.shape[0]} tokens"
    )
    for axis, result in zip(upper.subplots(1, len(shown)), shown, strict=True):
        _pattern(axis, result)
    time, memory, fidelity = lower.subplots(1, 3)
    _time(time, long, sdpa_ms, length)
    _memory(memory, long, length)
    _fidelity(fidelity, short)
    lower.supxlabel(place, fontsize=9, color="0.4")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pattern(axis: Any, result: Result) -> None:
    name = result.variant.name
    colours = ListedColormap(["#f1f1f1", COLOURS[name]])
    axis.imshow(result.picture.cpu().numpy(), cmap=colours, interpolation="nearest", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
    full = "naive and fused" if name == "fused" else name
    axis.set_title(f"{full}\n{result.share:.0%} of the pairs", fontsize=10)


def _time(axis: Any, long: list[Result], sdpa_ms: float, length: int) -> None:
    names = ["SDPA", *(r.variant.name for r in long)]
    times = [sdpa_ms, *(r.ms for r in long)]
    bars = axis.barh(names, times, color=[COLOURS[name] for name in names])
    texts = [
        f" {_three(ms)} ms" + ("" if i == 0 else f"  ({sdpa_ms / ms:.1f}x)")
        for i, ms in enumerate(times)
    ]
    axis.bar_label(bars, texts, fontsize=9)
    axis.axvline(sdpa_ms, color="0.6", linestyle="--", linewidth=1)
    axis.set_title(f"Attention over {length} tokens, speed against SDPA", fontsize=10)
    axis.set_xlabel("milliseconds (log)")
    _finish(axis, times)


def _memory(axis: Any, long: list[Result], length: int) -> None:
    names, sizes = [r.variant.name for r in long], [r.peak / MIB for r in long]
    bars = axis.barh(names, sizes, color=[COLOURS[name] for name in names])
    axis.bar_label(bars, [f" {_three(size)}" for size in sizes], fontsize=9)
    axis.set_title(f"Peak memory beyond the inputs, {length} tokens", fontsize=10)
    axis.set_xlabel("MiB (log)")
    _finish(axis, sizes)


def _fidelity(axis: Any, short: list[Result]) -> None:
    names = [r.variant.name for r in short]
    cosines = [r.cosine for r in short]
    bars = axis.barh(names, cosines, color=[COLOURS[name] for name in names])
    axis.bar_label(bars, [f" {r.cosine:.3f}, top hit {r.agreement:.0%}" for r in short], fontsize=9)
    axis.set_title("MiniLM embeddings against dense attention's", fontsize=10)
    axis.set(xlim=(0, 1.75), xticks=(0, 0.25, 0.5, 0.75, 1), xlabel="cosine")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _three(value: float) -> str:
    """Return three digits, never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _finish(axis: Any, values: list[float]) -> None:
    axis.set_xscale("log")
    axis.set_xlim(min(values) / 3, max(values) * 6)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)

"""Pictures of masks, tiles, layouts and policies, and their HTML for notebooks.

matplotlib is imported when something is drawn; without it the HTML is the text alone.
"""

from __future__ import annotations

import base64
import html
import io
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._checks import check_kind

__all__ = [
    "as_html",
    "axes_for",
    "draw_blocks",
    "draw_cells",
    "draw_mask",
    "draw_shares",
    "draw_tiles",
    "image_html",
    "make_room",
    "need_matplotlib",
]

_EMPTY, _LEFT_OUT, _ALLOWED, _WHOLE = "#eef1f5", "#f3c98b", "#5b8fc7", "#1f4e79"
_DENSE = "#40474f"
#: Points from a picture to its legend, the axis' numbers and label between them.
_BELOW = 34
#: Inches above and below a legend beside a picture.
_AROUND = 0.8
#: Inches of a picture of many layers, and labels of many heads, at most.
_TALLEST, _LABELS = 24, 16


def need_matplotlib() -> None:
    """Raise an ImportError that names the fix where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ImportError(
            "sparse_attn: expected matplotlib for pictures (the extra `plot`), got none: "
            "pip install matplotlib"
        ) from None


def axes_for(ax: Any, width: float, height: float) -> Any:
    """Return the axes to draw on: those given, else of a new figure of so many inches."""
    need_matplotlib()
    if ax is not None:
        from matplotlib.axes import Axes

        check_kind("plot", "ax", ax, Axes, "matplotlib's Axes or None")
        return ax
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout="constrained").gca()


def _titled(ax: Any, name: str, share: str) -> None:
    title = "\n".join([*textwrap.wrap(" ".join(name.split()), 44), share])
    ax.set_title(title, fontsize="small")
    ax.set(xlabel="key", ylabel="query")
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)


def _image(ax: Any, picture: torch.Tensor, colors: Sequence[str]) -> None:
    from matplotlib.colors import ListedColormap

    if not picture.numel():
        return  # axes of no length are no picture
    shown = {"vmin": 0, "vmax": len(colors) - 1, "interpolation": "nearest"}
    ax.imshow(picture.cpu().numpy(), cmap=ListedColormap(colors), **shown)


def _legend(ax: Any, marks: dict[str, str], **place: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for name, color in marks.items()]
    ax.legend(handles=handles, frameon=False, fontsize="small", **place)


def _legend_below(ax: Any, marks: dict[str, str]) -> None:
    """Put a legend below the axis' label, however tall the picture is."""
    from matplotlib.transforms import offset_copy

    below = offset_copy(ax.transAxes, ax.figure, y=-_BELOW, units="points")
    place = {"bbox_to_anchor": (0.5, 0), "bbox_transform": below}
    _legend(ax, marks, loc="upper center", ncols=2, **place)


def draw_mask(mask: torch.Tensor, name: str, share: str, ax: Any = None) -> Any:
    """Draw a bool mask ``(Sq, Skv)``, allowed pairs dark."""
    ax = axes_for(ax, 5, 6)
    _image(ax, mask, [_EMPTY, _WHOLE])
    _titled(ax, name, share)
    return ax


def draw_shares(
    shares: torch.Tensor, lengths: tuple[int, int], name: str, unit: str, ax: Any = None
) -> Any:
    """Draw points, each the darker the larger its share, over axes of whole lengths.

    Parameters
    ----------
    shares : Tensor
        ``(points, points)`` from 0 to 1; what is above 0 is seen, however small.
    lengths : (int, int)
        What the picture is of, down and across.
    name, unit : str
        Of the pattern or layout, and what its lengths count: pairs or blocks.
    ax : Axes, optional
    """
    from matplotlib.colors import LinearSegmentedColormap

    ax = axes_for(ax, 5, 6)
    down, across = lengths
    ax.imshow(
        torch.where(shares > 0, 0.25 + 0.75 * shares, 0.0).numpy(),
        cmap=LinearSegmentedColormap.from_list("shares", [_EMPTY, _WHOLE]),
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(-0.5, across - 0.5, down - 0.5, -0.5),
        aspect="equal" if max(lengths) < 8 * min(lengths) else "auto",
    )
    rows, columns = shares.shape
    point = f"a point has {round(down / rows)} x {round(across / columns)}"
    share = 100 * float(shares.double().mean())
    _titled(ax, name, f"about {share:.2g}% of the {unit}; {point}")
    if unit == "blocks":
        ax.set(xlabel="key block", ylabel="query block")
    return ax


def draw_tiles(picture: torch.Tensor, name: str, share: str, ax: Any = None) -> Any:
    """Draw a mask with the tiles that are visited, as `tile_picture` gives it."""
    ax = axes_for(ax, 5, 6.6)
    _image(ax, picture, [_EMPTY, _LEFT_OUT, _ALLOWED, _WHOLE])
    _titled(ax, name, share)
    marks = {
        "computed, masked out": _LEFT_OUT,
        "allowed, tile has a mask": _ALLOWED,
        "allowed, tile without mask": _WHOLE,
        "never computed": _EMPTY,
    }
    _legend_below(ax, marks)
    return ax


def draw_blocks(picture: torch.Tensor, name: str, share: str, ax: Any = None) -> Any:
    """Draw blocks ``(NQ, NKV)``: 0 is not visited, 1 in part, 2 whole."""
    ax = axes_for(ax, 5, 6.6)
    _image(ax, picture, [_EMPTY, _ALLOWED, _WHOLE])
    _titled(ax, name, share)
    ax.set(xlabel="key block", ylabel="query block")
    if bool((picture == 1).any()):
        marks = {"seen in part": _ALLOWED, "seen whole": _WHOLE}
        _legend_below(ax, marks)
    return ax


def _colors(count: int) -> list[str]:
    """Return as many colours, no two alike."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count <= 10:
        return [to_hex(colormaps["tab10"](i)) for i in range(count)]
    return [to_hex(colormaps["turbo"](i / (count - 1))) for i in range(count)]


def draw_cells(ax: Any, cells: Sequence[Sequence[str | None]], columns: Sequence[str]) -> Any:
    """Draw what runs where: a row for each layer, a column for each head, a colour for each name.

    Parameters
    ----------
    ax : Axes, optional
    cells : sequence of sequence of str or None
        By layer, then by head; None stays empty. Dense attention is named "dense".
    columns : sequence of str
        Labels of the columns.
    """
    own = ax is None
    names = sorted({name for row in cells for name in row if name is not None and name != "dense"})
    color = dict(zip(names, _colors(len(names)), strict=True))
    if any("dense" in row for row in cells):
        color["dense"] = _DENSE
    ax = axes_for(ax, 7, min(max(2.5, 0.22 * len(cells) + 1), _TALLEST))
    index = {name: i for i, name in enumerate(color)}
    picture = [[float("nan") if n is None else index[n] for n in row] for row in cells]
    _image(ax, torch.tensor(picture, device="cpu"), list(color.values()))
    ax.set_aspect("auto")
    shown = range(0, len(columns), 1 + len(columns) // _LABELS)
    ax.set(ylabel="layer", xticks=shown, xticklabels=[columns[i] for i in shown])
    ax.yaxis.get_major_locator().set_params(integer=True)
    marks = {"\n".join(textwrap.wrap(name, 36)): shade for name, shade in color.items()}
    _legend(ax, marks, loc="upper left", bbox_to_anchor=(1, 1))
    if own:
        make_room(ax)
    return ax


def make_room(ax: Any) -> None:
    """Make a figure tall enough for the legend of its axes."""
    legend = ax.get_legend()
    if legend is not None:
        height = legend.get_window_extent().height / ax.figure.dpi + _AROUND
        ax.figure.set_figheight(max(ax.figure.get_figheight(), height))


def _axes_apart(width: float, height: float) -> Any:
    """Return axes of a figure that no window or notebook shows by itself."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def image_html(figure: Any, said: str) -> str:
    """Return a figure as an ``<img>`` that holds its own data."""
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=110)
    data = base64.b64encode(held.getvalue()).decode()
    return f"<img alt='{html.escape(said)}' src='data:image/png;base64,{data}'>"


def as_html(text: str, draw: Callable[[Any], Any] | None = None, width: float = 3.6) -> str:
    """Return text with a small picture below it, for notebooks.

    Parameters
    ----------
    text : str
    draw : callable, optional
        Draws on the axes that it is given. What has no picture (a pattern that depends on the
        data), and everything where matplotlib is missing, is the text alone.
    width : float
        Of the picture, in inches.
    """
    shown = f"<pre>{html.escape(text)}</pre>"
    if draw is None:
        return shown
    try:
        ax = _axes_apart(width, 4)
        draw(ax)
        make_room(ax)
    except (ImportError, NotImplementedError, TypeError, ValueError):
        return shown
    return shown + image_html(ax.figure, text)

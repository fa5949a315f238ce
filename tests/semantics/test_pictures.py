"""Pictures of patterns, tiles, layouts and policies, and their HTML in notebooks."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import sparse_attn as sa

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

POLICY = sa.Policy(
    sa.Band((1023, 0), sinks=4),
    layers={2: sa.Strided(128, 64)},
    heads={5: {0: sa.Full(), 2: sa.BlockTopK()}},
    decode=sa.Full(),
)
LAYOUT = sa.BlockLayout.from_token_mask(sa.Band((40, 9)).mask(130, 200), 32, 16)
ROW = SimpleNamespace(name="band", pairs=0.5, kl=0.1, rel_l1=0.1)
HEADS = sa.BlockLayout.from_mask(torch.rand(2, 3, 4, 4) > 0.5, 16, 16)


@pytest.fixture(autouse=True)
def _no_figure_stays():
    yield
    pyplot.close("all")


def colors(ax):
    """Return the numbers that a picture shows."""
    return set(ax.images[0].get_array().compressed().ravel().tolist())


def assert_nothing_is_cut_off(ax):
    figure = ax.figure
    figure.canvas.draw()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def assert_labels_stand_apart(ax):
    boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


DRAWN = {
    "mask": lambda: sa.Band((1234567, 0), sinks=4, global_tokens=torch.arange(40)).plot(64),
    "mask-of-a-layout": lambda: sa.BlockSparse(LAYOUT).plot(130, 200),
    "layout": lambda: LAYOUT.plot(),
    "layout-heads": lambda: HEADS.plot(1, 2),
    "policy": lambda: POLICY.plot(),
    "policy-of-30": lambda: POLICY.plot(30),
    "policy-of-16-heads": lambda: sa.Policy(
        sa.Band((9, 0)), heads={1: {15: sa.Full()}}, decode=sa.Full()
    ).plot(4),
    "policy-bare": lambda: sa.Policy(sa.Band(5)).plot(),
    "policy-of-many": lambda: sa.Policy(sa.Band(5), heads={1: {99: sa.Full()}}).plot(900),
    "policy-of-patterns": lambda: sa.Policy(
        sa.Full(), heads={0: {head: sa.Band(head + 1, sinks=4) for head in range(24)}}
    ).plot(2),
    "long": lambda: sa.Band(3).plot(100_000),
    "long-layout": lambda: sa.BlockLayout.local(100_000, 100_000, 64, 64, (3, 0)).plot(),
    "long-line": lambda: sa.Band((999, 0), sinks=4).plot(1, 50_000),
}


@pytest.mark.parametrize("tiles", [False, True], ids=["layout", "tiles"])
def test_legends_leave_the_label_free(tiles):
    if tiles:
        pytest.importorskip("sparse_attn._info", reason="the info module is not built")
    ax = sa.Band(199).plot(64, 512, tiles=64) if tiles else LAYOUT.plot()
    assert_nothing_is_cut_off(ax)
    label, legend = ax.xaxis.label.get_window_extent(), ax.get_legend().get_window_extent()
    assert label.y0 >= legend.y1 - 4  # of the legend's own margin


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_is_cut_off(name):
    ax = DRAWN[name]()
    assert isinstance(ax, pyplot.Axes)
    assert_nothing_is_cut_off(ax)
    assert_labels_stand_apart(ax)


@pytest.mark.parametrize(
    "plot",
    [
        lambda ax: sa.Band(3).plot(64, ax=ax),
        lambda ax: sa.Band(3).plot(2000, ax=ax),
        lambda ax: LAYOUT.plot(ax=ax),
        lambda ax: POLICY.plot(ax=ax),
        lambda ax: sa.quality.ModelQuality((ROW, ROW), 64).plot(ax),
    ],
    ids=["pattern", "long", "layout", "policy", "quality"],
)
def test_what_is_no_axes_is_refused(plot):
    figure, two = pyplot.subplots(1, 2)
    assert plot(two[0]) is two[0]
    for ax, kind in (("x", "str"), (figure, "Figure"), (two, "ndarray")):
        sentence = f"^sparse_attn.plot: expected ax to be matplotlib's Axes or None, got {kind}$"
        with pytest.raises(TypeError, match=sentence):
            plot(ax)


@pytest.mark.parametrize("count", [3, 17, 30])
def test_no_two_patterns_share_a_colour(count):
    policy = sa.Policy(sa.Full(), layers={layer: sa.Band((layer, 0)) for layer in range(count)})
    ax = policy.plot(count)
    shades = {patch.get_facecolor() for patch in ax.get_legend().get_patches()}
    assert len(shades) == len(colors(ax)) == count


def test_tiles_show_what_is_computed_and_masked_out():
    pytest.importorskip("sparse_attn._info", reason="the info module is not built")
    ax = sa.Band((199, 0), sinks=4).plot(512, is_causal=True, tiles=64)
    assert colors(ax) == {0, 1, 2, 3}
    assert "in visited tiles" in ax.get_title()
    assert_nothing_is_cut_off(ax)
    assert colors(sa.Full().plot(512, tiles=(128, 64))) == {3}
    assert colors(sa.BlockSparse(LAYOUT).plot(130, 200, tiles=64)) == {0, 1, 2, 3}


def test_layouts_show_blocks_seen_in_part():
    picture = LAYOUT.plot().images[0].get_array()
    assert (torch.as_tensor(picture > 0) == LAYOUT.to_mask()[0, 0]).all()
    assert {1, 2} <= set(picture.ravel().tolist())
    with pytest.raises(ValueError, match=r"BlockLayout.plot: expected head below 3, got 3"):
        HEADS.plot(0, 3)
    LAYOUT.plot(7, 9)  # its one list is that of every batch entry and head


class EvenKeys(sa.Pattern):
    def allows(self, row, position, key):
        return (key % 2 == 0) & (key <= position)


LONG = {
    "full": (sa.Full(), 5_000, 5_000, False),
    "causal": (sa.Full(), 9_000, 9_001, True),
    "band": (sa.Band(3), 20_000, 20_000, False),
    "sinks": (sa.Band((99, 0), sinks=7), 3_000, 30_000, False),
    "dilated": (sa.Dilated((600, 0), 16), 19_600, 19_600, False),
    "strided": (sa.Strided(128, 128), 12_800, 12_800, False),
    "own": (EvenKeys(), 9_000, 9_000, False),
    "layout": (sa.BlockSparse(sa.BlockLayout.local(9_000, 9_000, 64, 16, (8, 3))), 9_000, 9_000, 1),
    "few": (sa.Band((99, 0)), 3, 2_000, False),
}


@pytest.mark.parametrize(("pattern", "Sq", "Skv", "is_causal"), LONG.values(), ids=LONG)
def test_long_pictures_show_shares_of_points(pattern, Sq, Skv, is_causal):
    ax = pattern.plot(Sq, Skv, is_causal=bool(is_causal))
    picture = torch.as_tensor(ax.images[0].get_array().data)
    assert max(picture.shape) <= 400
    shares = torch.where(picture > 0, (picture - 0.25) / 0.75, 0.0)
    density = pattern.density(Sq, Skv, bool(is_causal))
    assert abs(float(shares.mean()) - density) < 0.1 * density
    assert ax.images[0].get_extent() == [-0.5, Skv - 0.5, Sq - 0.5, -0.5]


@pytest.mark.parametrize("length", [3_000, 20_000])
def test_long_pictures_miss_no_line(length):
    place = length * 2 // 3
    ax = sa.Band(0, global_tokens=torch.tensor([place])).plot(length)
    picture = torch.as_tensor(ax.images[0].get_array().data)
    point = place * len(picture) // length
    assert (picture[point] > 0).all() and (picture[:, point] > 0).all()
    assert (picture.diagonal() > 0).all()
    assert int((picture > 0).sum()) == 3 * len(picture) - 2


def test_long_layouts_show_shares_of_blocks():
    blocks = torch.rand(3_000, 1_200) < 0.1
    blocks[:1500] = False
    picture = torch.as_tensor(
        sa.BlockLayout.from_mask(blocks, 16, 16).plot().images[0].get_array().data
    )
    assert picture.shape == (400, 400)
    assert not picture[:199].any()
    assert abs(float(((picture[201:] - 0.25) / 0.75).clamp(min=0).mean()) - 0.1) < 0.01


def test_tiles_of_long_calls_are_refused():
    with pytest.raises(ValueError, match="^sparse_attn.Band: expected Sq and Skv of at most 4096"):
        sa.Band(3).plot(100_000, tiles=64)


def test_policies_show_layers_by_heads_and_decode():
    ax = POLICY.plot(num_layers=8)
    picture = torch.as_tensor(ax.images[0].get_array().data)
    assert picture.shape == (8, 6)  # three heads, and the same at decode
    assert len(set(picture[5].tolist())) == 4
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2"] * 2
    assert ax.get_xlabel() == "key head in prefill, then in decode"
    assert sa.Policy(sa.Band(5)).plot(4).images[0].get_array().shape == (4, 1)
    with pytest.raises(ValueError, match="layers below the model's 4 layers, got 5|heads below"):
        POLICY.plot(4)


@pytest.mark.parametrize(
    ("thing", "drawn"),
    [
        (sa.Band(5), True),
        (LAYOUT, True),
        (sa.BlockSparse(LAYOUT), True),
        (POLICY, True),
        (sa.TopK(5), False),
        (sa.BlockTopK(), False),
        (sa.ByHead({0: sa.Full()}), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_notebooks_show_a_picture_where_there_is_one(thing, drawn):
    before = pyplot.get_fignums()
    shown = thing._repr_html_()
    assert ("<img " in shown) == drawn
    assert shown.startswith("<pre>")
    assert pyplot.get_fignums() == before  # a notebook would show those again


def test_html_without_matplotlib_is_the_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert sa.Band(5)._repr_html_() == (
        "<pre>Band(window=(5, 5), sinks=0, global_tokens=None)</pre>"
    )


def test_pictures_without_matplotlib_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sentence = "^sparse_attn: expected matplotlib for pictures .the extra `plot`., got none: pip"
    with pytest.raises(ImportError, match=sentence):
        sa.Band(5).plot(64, 64)


META = [
    sa.Band(3, global_tokens=torch.tensor([1], device="meta")),
    sa.BlockSparse(LAYOUT.to("meta")),
]


@pytest.mark.parametrize("pattern", META, ids=lambda pattern: type(pattern).__name__)
@pytest.mark.parametrize("reads", ["plot", "density", "cost"])
def test_meta_tensors_have_no_picture_and_no_counts(pattern, reads):
    with pytest.raises(ValueError, match=r"^sparse_attn\.\w+: expected tensors with contents, got"):
        getattr(pattern, reads)(130, 200)
    assert "<img" not in pattern._repr_html_()


def test_meta_layouts_have_no_picture():
    with pytest.raises(ValueError, match=r"^sparse_attn\.BlockLayout\.plot: expected tensors with"):
        LAYOUT.to("meta").plot()


@pytest.mark.parametrize(
    "pattern",
    [sa.Full(), sa.Band(3), sa.Dilated(3, 4), sa.Strided(3, 4), sa.BlockSparse(LAYOUT)],
    ids=lambda pattern: type(pattern).__name__,
)
def test_torchs_default_device_changes_no_picture_and_no_counts(pattern):
    want = pattern.density(130, 200), pattern.cost(130, 200)
    with torch.device("meta"):
        assert (pattern.density(130, 200), pattern.cost(130, 200)) == want
        for tiles in (None, 64):
            pattern.plot(130, 200, tiles=tiles)
        POLICY.plot()
        if not isinstance(pattern, sa.BlockSparse):
            pattern.plot(3000)


@pytest.mark.parametrize("device", ["meta", None], ids=["named", "default"])
def test_grids_are_not_looked_at_without_contents(device):
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=r"^sparse_attn\.BlockLayout: expected a device with"),
    ):
        sa.BlockLayout.local_nd((8, 8), 3, (4, 4), device=device)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("Sq, Skv", [(0, 0), (0, 9), (9, 0)])
def test_pictures_of_nothing_are_empty_axes(Sq, Skv):
    for ax in (sa.Band(2).plot(Sq, Skv), sa.BlockLayout.local(Sq, Skv, 16, 16, 1).plot()):
        assert not ax.images and "0.0%" in ax.get_title()

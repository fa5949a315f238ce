"""Masks against the definitions pair by pair; density, pictures, and what patterns refuse."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch

import sparse_attn as sa

INF = 10**9


def pairs(allowed, Sq, Skv, is_causal):
    """The mask of a definition allowed(i, p, j)."""
    rows = []
    for i in range(Sq):
        p = i + Skv - Sq
        rows.append([allowed(i, p, j) and (j <= p or not is_causal) for j in range(Skv)])
    return torch.tensor(rows).reshape(Sq, Skv).bool()


LAYOUT = torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()

DEFINITIONS = {
    "full": (sa.Full(), lambda i, p, j: True),
    "band-int": (sa.Band(3), lambda i, p, j: -3 <= j - p <= 3),
    "band-pair": (sa.Band((4, 1)), lambda i, p, j: -4 <= j - p <= 1),
    "band-zero": (sa.Band(0), lambda i, p, j: j == p),
    "band-unlimited-left": (sa.Band((None, 2)), lambda i, p, j: j - p <= 2),
    "band-unlimited": (sa.Band((None, None)), lambda i, p, j: True),
    "band-large": (sa.Band((2**40, 2**80)), lambda i, p, j: True),
    "band-sinks": (sa.Band((2, 0), sinks=3), lambda i, p, j: -2 <= j - p <= 0 or j < 3),
    "band-first-globals": (
        sa.Band(1, global_tokens=2),
        lambda i, p, j: abs(j - p) <= 1 or j < 2 or 0 <= p < 2,
    ),
    "band-scattered-globals": (
        sa.Band(1, sinks=1, global_tokens=torch.tensor([7, 4])),
        lambda i, p, j: abs(j - p) <= 1 or j < 1 or j in (4, 7) or p in (4, 7),
    ),
    "dilated": (
        sa.Dilated((2, 1), 3),
        lambda i, p, j: (j - p) % 3 == 0 and -2 <= (j - p) // 3 <= 1,
    ),
    "dilated-sinks": (
        sa.Dilated((None, 0), 2, sinks=3),
        lambda i, p, j: ((j - p) % 2 == 0 and j <= p) or j < 3,
    ),
    "dilated-beyond": (sa.Dilated(5, 2**40), lambda i, p, j: j == p),
    "strided": (
        sa.Strided(3, 4),
        lambda i, p, j: 0 <= p - j < 3 or (j % 4 == 3 and j <= p),
    ),
    "band-large-columns": (sa.Band(0, sinks=2**63, global_tokens=2**70), lambda i, p, j: True),
    "dilated-large-sinks": (sa.Dilated(2**63, 2**70, sinks=2**70), lambda i, p, j: True),
    "strided-large": (sa.Strided(2**63, 2**70), lambda i, p, j: j <= p),
    "strided-all": (sa.Strided(1, 1), lambda i, p, j: j <= p),
}
LENGTHS = [(12, 12), (5, 17), (17, 5), (1, 9), (9, 1), (0, 4), (4, 0)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("Sq, Skv", LENGTHS, ids=lambda n: str(n))
@pytest.mark.parametrize("name", DEFINITIONS)
def test_mask_and_density_follow_the_definition(name, Sq, Skv, is_causal):
    pattern, allowed = DEFINITIONS[name]
    want = pairs(allowed, Sq, Skv, is_causal)
    assert torch.equal(pattern.mask(Sq, Skv, is_causal), want)
    share = want.double().mean().item() if want.numel() else 0.0
    assert pattern.density(Sq, Skv, is_causal) == pytest.approx(share)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("Sq, Skv", [(32, 48), (20, 40), (17, 33)])
def test_layout_mask_goes_by_row_index(Sq, Skv, is_causal):
    pattern = sa.BlockSparse(sa.BlockLayout.from_mask(LAYOUT, 16, 16))
    want = pairs(lambda i, p, j: bool(LAYOUT[i // 16, j // 16]), Sq, Skv, is_causal)
    mask = pattern.mask(Sq, Skv, is_causal)
    assert mask.shape == (1, 1, Sq, Skv)
    assert torch.equal(mask[0, 0], want)
    assert pattern.density(Sq, Skv, is_causal) == pytest.approx(want.double().mean().item())


def test_layout_mask_has_batch_and_heads():
    blocks = torch.rand(2, 3, 4, 5) < 0.5
    pattern = sa.BlockSparse(sa.BlockLayout.from_mask(blocks, 16, 16))
    mask = pattern.mask(64, 80)
    assert torch.equal(mask, blocks.repeat_interleave(16, 2).repeat_interleave(16, 3))
    assert pattern.density(64, 80) == pytest.approx(blocks.double().mean().item())


def test_layout_of_other_lengths_is_refused():
    pattern = sa.BlockSparse(sa.BlockLayout.from_mask(LAYOUT, 16, 16))
    with pytest.raises(ValueError, match="expected a layout of 3x3 blocks .* got 2x3"):
        pattern.mask(33, 48)


def test_density_asks_for_the_lengths_of_the_mask():
    pattern = sa.BlockSparse(sa.BlockLayout.from_mask(LAYOUT, 16, 16))
    with pytest.raises(ValueError, match="expected a layout of 3x2 blocks .* got 2x3"):
        pattern.density(48, 32)
    for call in (sa.Band(3).mask, sa.Band(3).density):
        with pytest.raises(ValueError, match="Band: expected Sq of at least 0, got -1"):
            call(-1, 5)
        with pytest.raises(ValueError, match=f"Band: expected Skv of at most {2**29 - 1}, got"):
            call(5, 2**40)
        for length in (2.5, "a"):
            with pytest.raises(TypeError, match="Band: expected Skv to be an int, got"):
                call(5, length)


@pytest.mark.parametrize("method", ["mask", "density", "cost", "plot"])
@pytest.mark.parametrize("number", [64, 0, None, "no"], ids=repr)
def test_a_number_in_the_place_of_is_causal_is_refused(method, number):
    """A tile given third, as in ``cost(1024, 1024, 64)``, is not a causal call."""
    with pytest.raises(TypeError, match="Full: expected is_causal to be a bool, got"):
        getattr(sa.Full(), method)(32, 32, number)


@pytest.mark.parametrize(
    "tokens",
    [torch.tensor(3), torch.ones(1, 2).int(), torch.ones(2).bool(), torch.ones(2)],
    ids=str,
)
def test_index_tensors_of_another_kind_make_no_mask(tokens):
    sentence = r"^sparse_attn\.Band: expected global_tokens of (an integer dtype|shape)"
    for ask in (sa.Band.mask, sa.Band.density, sa.Band.cost):
        with pytest.raises(ValueError, match=sentence):
            ask(sa.Band(3, global_tokens=tokens), 8, 8)


def test_an_empty_picture_is_refused():
    pytest.importorskip("matplotlib")
    layout = sa.BlockLayout.from_mask(torch.zeros(0, 1, 1, 1).bool(), 16, 16)
    with pytest.raises(ValueError, match=r"BlockSparse: expected a mask to draw, got shape \(0, 1"):
        sa.BlockSparse(layout).plot(16, 16)


@pytest.mark.parametrize("pattern", [sa.TopK(3), sa.BlockTopK(16)], ids=["topk", "block-topk"])
def test_data_dependent_patterns_have_no_mask(pattern):
    with pytest.raises(NotImplementedError, match="no mask without data"):
        pattern.mask(8, 8)
    with pytest.raises(NotImplementedError, match="no mask without data"):
        pattern.plot(8, 8)


def test_topk_density_counts_rows_with_fewer_keys():
    assert sa.TopK(3).density(4, 4, is_causal=True) == (1 + 2 + 3 + 3) / 16
    with pytest.raises(NotImplementedError, match="no density without data"):
        sa.BlockTopK(16).density(64, 64)


def test_density_of_long_lengths_needs_no_dense_mask():
    length = 2**20
    assert sa.Band((4095, 0)).density(length, length) == pytest.approx(4096 / length, rel=0.01)
    assert sa.Full().density(length, length, is_causal=True) == pytest.approx(0.5, rel=1e-5)


def test_plot_returns_axes():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    for pattern in (sa.Band(3, sinks=1), sa.BlockSparse(sa.BlockLayout.from_mask(LAYOUT, 16, 16))):
        axes = pattern.plot(32, 48, is_causal=True)
        assert isinstance(axes, matplotlib.axes.Axes)
        mask = pattern.mask(32, 48, is_causal=True)
        shown = torch.as_tensor(axes.images[0].get_array().data)
        assert torch.equal(shown.bool(), mask.reshape(32, 48))
        assert pattern.plot(8 * 4, 48, ax=axes) is axes


def test_patterns_are_frozen_values():
    assert sa.Band(3) == sa.Band((3, 3)) != sa.Band((3, None))
    assert hash(sa.Dilated(3, 2)) == hash(sa.Dilated((3, 3), 2))
    tokens = torch.tensor([1, 2])
    assert sa.Band(3, global_tokens=tokens) == sa.Band(3, global_tokens=tokens) != sa.Band(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sa.Band(3).sinks = 4


def test_patterns_print_themselves():
    assert repr(sa.Band((7, None))) == "Band(window=(7, None), sinks=0, global_tokens=None)"
    assert repr(sa.TopK(4)) == "TopK(k=4)"
    layout = sa.BlockLayout.from_mask(LAYOUT, 16, 32)
    assert "blocks=2x3, block_q=16, block_kv=32" in repr(sa.BlockSparse(layout))


NUMBERS = {
    "window": (lambda: sa.Band(-1), "Band: expected window's left side of at least 0, got -1"),
    "right": (lambda: sa.Band((1, -2)), "Band: expected window's right side of at least 0, got -2"),
    "sides": (
        lambda: sa.Band((1, 2, 3)),
        r"window with two sides \(left, right\), got \(1, 2, 3\)",
    ),
    "sinks": (lambda: sa.Band(1, sinks=-1), "Band: expected sinks of at least 0, got -1"),
    "globals": (lambda: sa.Band(1, global_tokens=-5), "global_tokens of at least 0, got -5"),
    "dilation": (lambda: sa.Dilated(1, 0), "Dilated: expected dilation of at least 1, got 0"),
    "local": (lambda: sa.Strided(0, 2), "Strided: expected local of at least 1, got 0"),
    "stride": (lambda: sa.Strided(2, 0), "Strided: expected stride of at least 1, got 0"),
    "k": (lambda: sa.TopK(0), "TopK: expected k of at least 1, got 0"),
    "block-size": (
        lambda: sa.BlockTopK(24),
        "block_size that is a positive multiple of 16, got 24",
    ),
    "block-sides": (
        lambda: sa.BlockTopK((64, 64, 64)),
        r"block_size of \(queries, keys\), got \(64, 64, 64\)",
    ),
    "share": (lambda: sa.BlockTopK(budget_share=1.5), "budget_share above 0 and up to 1, got 1.5"),
    "nan-share": (lambda: sa.BlockTopK(budget_share=float("nan")), "up to 1, got nan"),
    "count": (lambda: sa.BlockTopK(budget_blocks=0), "budget_blocks of at least 1, got 0"),
    "budgets": (
        lambda: sa.BlockTopK(budget_blocks=1, budget_share=0.1),
        "budget_blocks or budget_share, got both",
    ),
    "mass": (lambda: sa.BlockTopK(mass=0.0), "mass above 0 and up to 1, got 0.0"),
    "selector": (
        lambda: sa.BlockTopK(selector="best"),
        "selector to be one of mixed.* got 'best'",
    ),
    "group": (lambda: sa.BlockTopK(group="g"), "group to be one of q, kv, got 'g'"),
    "sink-blocks": (lambda: sa.BlockTopK(sink_blocks=-1), "sink_blocks of at least 0, got -1"),
    "local-blocks": (lambda: sa.BlockTopK(local_blocks=-1), "local_blocks of at least 0, got -1"),
}
KINDS = {
    "window": (lambda: sa.Band("3"), "expected window to be an int or a pair .* got str"),
    "float-window": (lambda: sa.Band(3.0), "got float"),
    "bool-window": (lambda: sa.Band((True, 1)), "left side to be an int, got bool"),
    "sinks": (lambda: sa.Band(1, sinks=None), "sinks to be an int, got NoneType"),
    "globals": (lambda: sa.Band(1, global_tokens=[1]), "an int or a tensor, got list"),
    "dilation": (lambda: sa.Dilated(1, 2.0), "dilation to be an int, got float"),
    "layout": (lambda: sa.BlockSparse(torch.ones(2, 2)), "layout to be a BlockLayout, got Tensor"),
    "k": (lambda: sa.TopK(True), "k to be an int, got bool"),
    "share-kind": (lambda: sa.BlockTopK(budget_share="all"), "budget_share to be a float, got str"),
    "count-kind": (
        lambda: sa.BlockTopK(budget_blocks=0.5),
        "budget_blocks to be an int, got float",
    ),
    "selector-kind": (
        lambda: sa.BlockTopK(selector=[1.0]),
        "selector to be the name of one, or a tensor of scores, got list",
    ),
    "budget": (
        lambda: sa.BlockTopK(budget=1),
        "expected budget_blocks= for .* budget_share= for .* got budget=",
    ),
}


@pytest.mark.parametrize("make, sentence", NUMBERS.values(), ids=NUMBERS)
def test_wrong_numbers_are_refused_when_made(make, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make, sentence", KINDS.values(), ids=KINDS)
def test_wrong_kinds_are_refused_when_made(make, sentence):
    with pytest.raises(TypeError, match=sentence):
        make()


def test_equal_patterns_hash_alike_and_find_each_other(device):
    tokens = torch.tensor([4, 1], device=device)
    blocks = sa.BlockLayout.from_mask(LAYOUT, 16, 16)
    alike = [
        (sa.Band(3), sa.Band(3, global_tokens=0)),
        (sa.Band(3, global_tokens=300), sa.Band(3, global_tokens=int("300"))),
        (sa.Band(3, global_tokens=tokens), sa.Band(3, global_tokens=tokens.clone())),
        (sa.BlockSparse(blocks), sa.BlockSparse(sa.BlockLayout.from_mask(LAYOUT, 16, 16))),
        (sa.Policy(sa.BlockSparse(blocks)), sa.Policy(sa.BlockSparse(blocks))),
    ]
    for one, other in alike:
        assert one == other and {one: 1}[other] == 1
        assert {one: 1}[copy.deepcopy(one)] == 1
        assert {one: 1}[pickle.loads(pickle.dumps(one))] == 1
    for other in (tokens + 1, tokens[:1], tokens.int(), tokens.to("meta"), 2):
        assert sa.Band(3, global_tokens=tokens) != sa.Band(3, global_tokens=other)
    assert sa.BlockSparse(blocks) != sa.BlockSparse(sa.BlockLayout.from_mask(~LAYOUT, 16, 16))


@pytest.mark.parametrize(
    "saved",
    [
        sa.Full(),
        sa.Band((4, None), sinks=2, global_tokens=torch.tensor([4, 1])),
        sa.Dilated((2, 1), 3),
        sa.Strided(3, 5),
        sa.TopK(3, inside=sa.BlockTopK(block_size=16)),
        sa.BlockLayout.from_token_mask(torch.ones(64, 64).tril(5).bool(), 16, 16),
        sa.BlockSparse(sa.BlockLayout.from_mask(LAYOUT, 16, 16)),
        sa.ByHead({0: sa.Full(), 1: sa.Band(3)}),
        sa.Policy(sa.Band(3), layers={1: sa.Full()}, heads={2: {0: sa.Full(), 1: sa.Band(2)}}),
    ],
    ids=lambda saved: type(saved).__name__,
)
def test_torch_load_reads_patterns_back_as_weights(saved):
    file = io.BytesIO()
    torch.save({"saved": saved}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["saved"] == saved


def test_torch_load_may_read_every_pattern_back():
    kinds = {v for v in vars(sa).values() if isinstance(v, type) and issubclass(v, sa.Pattern)}
    assert kinds - {sa.Pattern} <= set(torch.serialization.get_safe_globals())


def test_a_band_keeps_its_own_copy_of_the_global_tokens(device):
    tokens = torch.tensor([4, 1], device=device)
    pattern = sa.Band(3, global_tokens=tokens)
    tokens.fill_(0)
    assert pattern.global_tokens.tolist() == [4, 1]


def test_numbers_of_numpy_become_ints():
    numpy = pytest.importorskip("numpy")
    band = sa.Band((numpy.int64(3), None), sinks=numpy.int8(2))
    assert band == sa.Band((3, None), sinks=2) and repr(band) == repr(sa.Band((3, None), sinks=2))
    query = torch.zeros(1, 1, 4, 16)
    with pytest.raises(TypeError, match=r"is_causal to be a bool, got numpy\.bool"):
        sa.fused_attention(query, query, query, is_causal=numpy.bool_(True))


MASK_MODS = [
    sa.Full(),
    sa.Band((4, 1), sinks=2, global_tokens=3),
    sa.Dilated((2, 1), 3, sinks=1),
    sa.Strided(3, 5),
    sa.BlockSparse(sa.BlockLayout.local(64, 64, 16, 16, 1)),
    sa.BlockSparse(sa.BlockLayout.from_token_mask(torch.ones(64, 64).tril(5).bool(), 16, 16)),
]


@pytest.mark.parametrize("pattern", MASK_MODS, ids=lambda pattern: type(pattern).__name__)
def test_mask_mod_is_the_mask(pattern):
    layout = sa.BlockLayout.from_mask_mod(pattern.mask_mod(), 1, 1, 64, 64, 16, 16, device="cpu")
    want = pattern.mask(64, 64)
    assert torch.equal(sa.BlockSparse(layout).mask(64, 64)[0, 0], want.reshape(64, 64))


@pytest.mark.parametrize(
    "inside",
    [None, sa.BlockLayout.from_mask(LAYOUT, 16, 16), sa.BlockTopK(16)],
    ids=["all", "list", "chosen"],
)
def test_a_pattern_of_the_data_has_no_mask_mod(inside):
    with pytest.raises(NotImplementedError, match="no mask without data"):
        sa.TopK(3, inside=inside).mask_mod()


def test_minus_one_is_told_of_none():
    with pytest.raises(TypeError, match=r"got None; \(None, None\) has no limit on either side"):
        sa.Band(None)
    with pytest.raises(ValueError, match="left side of at least 0, got -1; None means no limit"):
        sa.Band((-1, 0))


@pytest.mark.parametrize(
    "given, advice",
    [
        (7, r"got int; a window is Band\("),
        ((7, 0), r"got tuple; a window is Band\("),
        (None, r"got NoneType; Full\(\) means all keys$"),
    ],
)
def test_what_is_close_to_a_pattern_is_told_what_to_write(given, advice):
    with pytest.raises(TypeError, match=advice):
        sa.sparse_attention(*torch.randn(3, 1, 1, 8, 16), given)

"""quality.compare: what a pattern keeps, against dense probabilities in float64."""

import pytest
import torch
from reference import PATTERNS, Shape

import sparse_attn as sa
from sparse_attn.testing import allowed_keys, reference_attention

SHAPE = Shape(Sq=65, Skv=65)


def truth(query, key, value, pattern, **common):
    """Mass, relative L1, cosine and counts of every row from dense float64 tensors."""
    dense, dense_lse = reference_attention(query, key, value, sa.Full(), **common)
    sparse, lse = reference_attention(query, key, value, pattern, **common)
    rel_l1 = (sparse - dense).abs().sum(-1) / dense.abs().sum(-1)
    cosine = torch.cosine_similarity(sparse, dense, dim=-1)
    placing = {k: v for k, v in common.items() if k in PLACING}
    visited, allowed = (
        allowed_keys(query, key, p, **placing).expand(*query.shape[:3], -1).sum(-1)
        for p in (pattern, sa.Full())
    )
    if isinstance(pattern, sa.TopK):  # allowed_keys tells what there is to choose from
        visited = visited.clamp(max=pattern.k)
    squares = (sparse - dense).square().sum((-1, -2))
    return (lse - dense_lse).exp(), rel_l1, cosine, squares, visited, allowed


PLACING = ("is_causal", "attn_mask", "key_bounds", "query_offset")


def bounds(shape, device):
    """Padding at the end of the first text; its last row sees nothing."""
    found = torch.zeros(shape.B, 1, shape.Sq, 2, dtype=torch.int32, device=device)
    found[..., 1] = shape.Skv
    found[0, :, :, 1] = shape.Skv - 9
    found[0, :, -1] = 0
    return found


COMMON = {
    "causal": lambda s, device: {"is_causal": True},
    "softcap": lambda s, device: {"softcap": 2.0, "scale": 0.3},
    "bounds": lambda s, device: {"key_bounds": bounds(s, device), "is_causal": True},
    "mask": lambda s, device: {
        "attn_mask": torch.rand(s.Hq, s.Sq, s.Skv, device=device) < 0.7,
    },
    "additive": lambda s, device: {
        "attn_mask": torch.randn(s.Sq, s.Skv, device=device).masked_fill(
            torch.rand(s.Sq, s.Skv, device=device) < 0.3, -torch.inf
        ),
    },
    "offset": lambda s, device: {"query_offset": -7, "is_causal": True},
}


@pytest.mark.parametrize("common", COMMON)
@pytest.mark.parametrize("pattern", ["full", "band-sinks", "strided", "blocks-of-heads", "topk"])
def test_figures_are_those_of_dense_probabilities(device, pattern, common):
    tensors = SHAPE.make(device)
    pattern = PATTERNS[pattern](SHAPE, device)
    given = COMMON[common](SHAPE, device)
    mass, rel_l1, cosine, squares, visited, allowed = truth(*tensors, pattern, **given)
    got = sa.quality.compare(*tensors, pattern, **given)
    close = dict(rtol=1e-4, atol=1e-5, check_device=False)
    real = allowed > 0
    mass, rel_l1, cosine = (f.where(real, torch.nan) for f in (mass, rel_l1, cosine))
    cosine = cosine.where(visited > 0, 0.0).where(real, torch.nan)
    torch.testing.assert_close(got.mass, mass.nanmean(-1), **close)
    torch.testing.assert_close(got.rel_l1, rel_l1.nanmean(-1), **close)
    torch.testing.assert_close(got.cosine, cosine.nanmean(-1), **close)
    torch.testing.assert_close(got.squares, squares, **close)
    torch.testing.assert_close(got.worst, mass.nan_to_num(2.0).amin(), **close)
    torch.testing.assert_close(got.pairs_by_head, visited.sum(-1) / allowed.sum(-1).double())
    torch.testing.assert_close(got.pairs, visited.sum() / allowed.sum().double())
    for head in ((0, 0), (1, 3)):
        rows = mass[head][real[head]].sort().values
        for level, found in zip(got.levels, got.quantiles[head], strict=True):
            assert found.item() == pytest.approx(
                rows[int(level * (len(rows) - 1))].item(), abs=1e-4
            )


@pytest.mark.parametrize(
    "pattern",
    [
        sa.BlockTopK(16, budget_blocks=3, local_blocks=1),
        sa.BlockTopK(16, mass=0.7, selector="mixed"),
    ],
    ids=["budget", "mass"],
)
def test_chosen_blocks_are_counted(device, pattern):
    shape = Shape(Sq=200, Skv=200)
    query, key, value = shape.make(device)
    got = sa.quality.compare(query, key, value, pattern, is_causal=True)
    chosen = sa.BlockSparse(sa.select_blocks(query, key, pattern, is_causal=True))
    again = sa.quality.compare(query, key, value, chosen, is_causal=True)
    assert torch.equal(got.mass, again.mass)
    want = chosen.mask(200, 200, is_causal=True).sum((-1, -2)) / (200 * 201 / 2)
    torch.testing.assert_close(got.pairs_by_head, want.double())


class OwnBand(sa.Pattern):
    """A band that the package knows by its `allows` alone."""

    def allows(self, row, position, key):
        return (position - key).abs() <= 7


@pytest.mark.parametrize("common", ["causal", "bounds", "mask"])
def test_a_pattern_of_ones_own_has_figures(device, common):
    query, key, value = SHAPE.make(device)
    common = COMMON[common](SHAPE, device)
    own = sa.quality.compare(query, key, value, OwnBand(), **common)
    band = sa.quality.compare(query, key, value, sa.Band(7), **common)
    for name in ("mass", "rel_l1", "cosine", "worst", "pairs_by_head", "quantiles"):
        found, want = getattr(own, name), getattr(band, name)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, equal_nan=True)


class BandsOfHeads(sa.Pattern):
    """A window of its own for each query head."""

    def allows(self, row, position, key):
        left = torch.tensor([3, 9, 40, 0], device=key.device)[:, None, None]
        return (position - key).abs() <= left


def test_heads_of_a_pattern_of_ones_own_are_told_apart(device):
    shape = Shape(B=2, Hq=4, Hkv=2, Sq=33, Skv=65)
    tensors, common = shape.make(device), {"is_causal": True}
    found = sa.quality.compare(*tensors, BandsOfHeads(), **common)
    mass, *_, visited, allowed = truth(*tensors, BandsOfHeads(), **common)
    torch.testing.assert_close(found.mass, mass.mean(-1), rtol=1e-5, atol=1e-5)
    pairs = visited.sum(-1) / allowed.sum(-1)
    torch.testing.assert_close(found.pairs_by_head, pairs.double())


def test_rows_beyond_a_chunk(device, monkeypatch):
    from sparse_attn.quality import _compare

    tensors = SHAPE.make(device)
    whole = sa.quality.compare(*tensors, sa.Band(3))
    monkeypatch.setattr(_compare, "_ROWS", 16)
    parts = sa.quality.compare(*tensors, sa.Band(3))
    assert torch.equal(whole.rel_l1, parts.rel_l1) and torch.equal(whole.cosine, parts.cosine)


def test_blocks_are_chosen_once(device, monkeypatch):
    from sparse_attn import tools
    from sparse_attn.quality import _compare

    chosen, attended = [], []
    select, attend = tools.select_blocks, _compare.attend_with_lse

    def selecting(*given, **common):
        chosen.append(given)
        return select(*given, **common)

    def attending(query, key, value, pattern, **common):
        attended.append(type(pattern))
        return attend(query, key, value, pattern, **common)

    monkeypatch.setattr(tools, "select_blocks", selecting)
    monkeypatch.setattr(_compare, "attend_with_lse", attending)
    sa.quality.compare(*SHAPE.make(device), sa.BlockTopK(16, 0.5), is_causal=True)
    assert len(chosen) == 1 and attended == [sa.Full, sa.BlockSparse]


def test_nothing_of_the_size_of_all_pairs_is_stored(device):
    if device != "cuda":
        pytest.skip("peak memory is the CUDA allocator's")
    length = 32768
    query, key, value = torch.randn(3, 1, 2, length, 64, device=device, dtype=torch.float16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sa.quality.compare(query, key, value, sa.Band((255, 0), sinks=4), is_causal=True)
    assert torch.cuda.max_memory_allocated() - before < length * length // 8


@pytest.mark.parametrize(("rows", "keys"), [(0, 4), (4, 0)])
def test_no_rows_and_no_keys_have_no_figures(device, rows, keys):
    query = torch.randn(1, 2, rows, 16, device=device)
    key = torch.randn(1, 2, keys, 16, device=device)
    got = sa.quality.compare(query, key, key, sa.Band(1))
    assert got.mass.isnan().all() and got.worst.isnan() and got.pairs.isnan()


def test_a_row_that_loses_all_its_keys_keeps_nothing(device):
    query, key, value = Shape(1, 1, 1, 8, 8, 16).make(device)
    got = sa.quality.compare(query, key, value, sa.Band((1, 0)), query_offset=4)
    assert got.worst == 0 and got.rel_l1.isfinite().all()


@pytest.mark.parametrize(
    ("name", "given"), [("out", torch.ones(1, 1, 8, 16)), ("return_lse", True)]
)
def test_arguments_that_make_no_sense_are_refused(device, name, given):
    tensors = Shape(1, 1, 1, 8, 8, 16).make(device)
    with pytest.raises(TypeError, match=rf"sparse_attn\.quality\.compare: .*{name}"):
        sa.quality.compare(*tensors, sa.Full(), **{name: given})
    with pytest.raises(TypeError, match=r"sparse_attn\.quality\.compare: .*pattern"):
        sa.quality.compare(*tensors, "band")


@pytest.mark.parametrize("pattern", [sa.Band(3), sa.ByHead({0: sa.Band(3)})], ids=["one", "heads"])
@pytest.mark.parametrize(
    ("common", "sentence"),
    [
        (dict(colour=1), "got an unexpected keyword argument 'colour'"),
        (dict(scale="x"), "expected scale to be a float or None, got str"),
        (dict(is_causal=1), "expected is_causal to be a bool, got int"),
        (dict(dropout_p=0.5), r"expected dropout_p of 0 \(inference only\), got 0.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_keywords_are_refused_by_its_name(device, pattern, common, sentence):
    query, key, value = Shape(1, 2, 2, 8, 8, 16).make(device)
    with pytest.raises(
        (TypeError, ValueError), match=rf"^sparse_attn\.quality\.compare: {sentence}$"
    ):
        sa.quality.compare(query, key, value, pattern, **common)
    sentence = r"^sparse_attn\.quality\.compare: expected key to be a tensor, got list$"
    with pytest.raises(TypeError, match=sentence):
        sa.quality.compare(query, [1.0], value, pattern)


def test_tensors_that_require_grad_are_measured(device):
    query, key, value = Shape(1, 2, 2, 8, 8, 16).make(device)
    got = sa.quality.compare(query.requires_grad_(), key, value, sa.Band(1))
    assert not got.mass.requires_grad


def test_figures_of_a_class_of_tensors_are_shown(device):
    class Own(torch.Tensor):
        pass

    query, key, value = torch.randn(3, 1, 2, 32, 16, device=device)
    found = sa.quality.compare(query.as_subclass(Own), key, value, sa.Band(7))
    assert repr(found) == repr(sa.quality.compare(query, key, value, sa.Band(7)))


def test_figures_of_meta_tensors_are_shown_without_numbers():
    found = sa.quality.compare(*torch.randn(3, 1, 2, 32, 16, device="meta"), sa.Band(7))
    assert found.mass.is_meta and repr(found).startswith("Comparison(mass, ")

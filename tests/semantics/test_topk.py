"""Token top-k: exact ties to the lower key, rows with fewer keys, masks before the choice."""

import pytest
import torch
from reference import DTYPES, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference


def chosen(attend, query, key, pattern, **common):
    """Which keys a call attends to, read off one-hot values."""
    value = torch.zeros_like(key)
    value[..., : key.shape[2], : key.shape[2]] = torch.eye(key.shape[2], dtype=key.dtype)
    return attend(pattern, query, key, value, **common)[..., : key.shape[2]] > 0


def lowest_best(scores, allowed, k):
    """The k best allowed keys of each row by a plain sort: higher first, then lower key."""
    keep = torch.zeros_like(allowed)
    for index in range(scores.shape[0]):
        keys = sorted(
            allowed[index].nonzero().flatten().tolist(), key=lambda j: (-scores[index, j], j)
        )
        keep[index, keys[:k]] = True
    return keep


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("k", [1, 3, 16, 47, 48, 60])
def test_ties_go_to_the_lower_key(attend, device, dtype, k):
    query = torch.randint(-1, 2, (1, 1, 30, 64), device=device).to(dtype)
    key = torch.randint(-1, 2, (1, 1, 48, 64), device=device).to(dtype)
    query[..., 4:] = 0
    for is_causal in (False, True):
        keys = chosen(attend, query, key, sa.TopK(k), is_causal=is_causal, scale=0.125)
        scores = (query[0, 0].float() @ key[0, 0].float().mT).cpu()
        allowed = sa.Full().mask(30, 48, is_causal)
        assert torch.equal(keys[0, 0].cpu(), lowest_best(scores, allowed, k))


def test_equal_scores_take_the_first_keys(attend, device):
    query = torch.zeros(1, 2, 5, 64, device=device, dtype=attend.dtype)
    key = torch.randn(1, 1, 40, 64, device=device).to(attend.dtype)
    keys = chosen(attend, query, key, sa.TopK(7))
    assert keys[..., :7].all() and not keys[..., 7:].any()
    keys = chosen(attend, key, key, sa.TopK(7), scale=0.0)
    assert keys[..., :7].all() and not keys[..., 7:].any()


def test_negative_scale_turns_the_ranking_around(attend, device):
    query, key = torch.randn(2, 1, 1, 20, 64, device=device).to(attend.dtype).unbind(0)
    lowest = chosen(attend, query, key, sa.TopK(4), scale=-0.1)
    scores = (query @ key.mT)[0, 0].cpu()
    want = lowest_best(-scores, torch.ones_like(scores).bool(), 4)
    assert torch.equal(lowest[0, 0].cpu(), want)


def test_masks_cut_before_the_choice(attend, device):
    query, key, value = Shape(1, 2, 1, 20, 60, 64).make(device, attend.dtype)
    mask = torch.rand(20, 60, device=device) < 0.3
    keys = chosen(attend, query, key, sa.TopK(5), attn_mask=mask, is_causal=True)
    allowed = mask & sa.Full().mask(20, 60, is_causal=True).to(device)
    assert not (keys & ~allowed).any()
    assert torch.equal(keys.sum(-1), allowed.sum(-1).clamp(max=5).expand(1, 2, 20))


def test_an_additive_mask_does_not_rank(attend, device):
    query, key, value = Shape(1, 1, 1, 9, 50, 64).make(device, attend.dtype)
    bias = 3 * torch.randn(9, 50, device=device)
    bias[:, 7] = -torch.inf
    keys = chosen(attend, query, key, sa.TopK(5), attn_mask=bias)
    want = chosen(attend, query, key, sa.TopK(5), attn_mask=bias > -torch.inf)
    assert torch.equal(keys, want) and not keys[..., 7].any()


@pytest.mark.parametrize("k", [5, 300, 1400])
def test_ties_of_long_rows_go_to_the_lower_key(attend, device, k):
    query = torch.randint(-2, 3, (1, 1, 4, 64), device=device).to(attend.dtype)
    key = torch.randint(-1, 2, (1, 1, 1500, 64), device=device).to(attend.dtype)
    query[..., 3:] = 0
    scores = (query[0, 0] @ key[0, 0].mT).cpu()
    best = lowest_best(scores, torch.ones_like(scores).bool(), k).to(device)
    value = torch.randn_like(key)
    out = attend(sa.TopK(k), query, key, value, scale=0.125)
    assert_close_to_reference(out, query, key, value, attn_mask=best, scale=0.125)


@pytest.mark.parametrize("k", [1, 64, 700, 2000])
def test_very_long_rows(attend, device, k):
    query, key, value = Shape(1, 1, 1, 9, 2100, 64).make(device, attend.dtype)
    result = attend(sa.TopK(k), query, key, value, is_causal=True, return_lse=True)
    assert_close_to_reference(
        result, query, key, value, sa.TopK(k), engine=attend.engine, is_causal=True
    )


@pytest.mark.parametrize("k", [1, 16, 64, 200, 299])
def test_long_rows(attend, device, k):
    query, key, value = Shape(1, 2, 1, 33, 300, 64).make(device, attend.dtype)
    result = attend(sa.TopK(k), query, key, value, is_causal=True, return_lse=True)
    assert_close_to_reference(
        result, query, key, value, sa.TopK(k), engine=attend.engine, is_causal=True
    )


@pytest.mark.parametrize("order", ["rising", "falling", "late ties", "early ties"])
@pytest.mark.parametrize("k", [1, 5, 300, 1400, 2600])
def test_rows_sorted_by_score(attend, device, k, order):
    """Every key beats those before it, or none does; equal scores stand in one half of the keys."""
    query = torch.ones(1, 1, 5, 64, device=device, dtype=attend.dtype)
    key = torch.zeros(1, 1, 2700, 64, device=device, dtype=attend.dtype)
    scores = torch.arange(2700, device=device) - 1000
    if order == "falling":
        scores = scores.flip(0)
    if order == "late ties":
        scores = scores.clamp(max=350)
    if order == "early ties":
        scores = scores.clamp(min=350)
    key[..., 0] = scores.to(attend.dtype)
    value = torch.randn_like(key)
    best = torch.stack([torch.argsort(scores, descending=True, stable=True)[:k]] * 5)
    allowed = torch.zeros(5, 2700, dtype=torch.bool, device=device).scatter(1, best, True)
    out = attend(sa.TopK(k), query, key, value, scale=2.0**-10)
    assert_close_to_reference(out, query, key, value, attn_mask=allowed, scale=2.0**-10)


def skewed(kind, shape, device):
    """Queries and keys whose scores are spread unlike a normal sample's."""
    query, key, value = shape.make(device)
    if kind == "few values":
        query, key = query.sign(), (key * 1.3).round().clamp(-2, 2)
        query[..., 5:] = 0
    elif kind == "equal keys":
        key = key[:, :, :1].expand_as(key).clone()
    elif kind == "zero":
        query = query * 0
    elif kind == "sink":
        key[:, :, 0] = 20 * query[:, ::2].mean(2)
    elif kind == "heavy tail":
        key = key * torch.randn_like(key[..., :1]).mul(2).exp()
    elif kind == "drift":
        slope = torch.linspace(-9, 9, shape.Skv, device=device)[:, None]
        key = key + slope * query.mean(2)[:, ::2, None]
    elif kind == "every eighth":
        key[:, :, ::8] *= 8
    return query, key, value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "kind",
    ["normal", "few values", "equal keys", "zero", "sink", "heavy tail", "drift", "every eighth"],
)
@pytest.mark.parametrize("k", [1, 64, 1000, 2047])
def test_rows_of_any_distribution(attend, device, dtype, kind, k):
    shape = attend.fit(Shape(1, 2, 1, 70, 2100, 64))
    query, key, value = (x.to(dtype) for x in skewed(kind, shape, device))
    result = attend(sa.TopK(k), query, key, value, is_causal=True, return_lse=True)
    assert_close_to_reference(
        result, query, key, value, sa.TopK(k), engine=attend.engine, is_causal=True
    )


@pytest.mark.parametrize("kind", ["normal", "few values"])
@pytest.mark.parametrize("k", [3, 700, 1500])
def test_rows_of_about_4096_keys(attend, device, kind, k):
    """On a CPU the last rows see too many keys for whole rows of scores, but for the largest k."""
    query, key, value = (
        x.to(attend.dtype) for x in skewed(kind, Shape(1, 2, 1, 130, 4300, 64), device)
    )
    common = {"is_causal": True, "query_offset": 4040}
    result = attend(sa.TopK(k), query, key, value, return_lse=True, **common)
    assert_close_to_reference(result, query, key, value, sa.TopK(k), engine=attend.engine, **common)


def test_heads_in_groups(attend, device):
    """Keys of so many heads that they do not share the L2 cache: the last group is not full."""
    if device == "cpu":
        pytest.skip("heads are grouped on a GPU")
    query, key, value = Shape(1, 5, 5, 200, 20000, 128).make(device, torch.float16)
    result = attend(sa.TopK(100), query, key, value, is_causal=True)
    assert_close_to_reference(
        result, query, key, value, sa.TopK(100), engine=attend.engine, is_causal=True
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_query_tiles_than_multiprocessors(attend, device, head_dim):
    if device == "cpu":
        pytest.skip("tiles are claimed on a GPU")
    query, key, value = Shape(2, 40, 2, 300, 1500, head_dim).make(device, torch.float16)
    result = attend(sa.TopK(200), query, key, value, is_causal=True)
    assert_close_to_reference(
        result, query, key, value, sa.TopK(200), engine=attend.engine, is_causal=True
    )


@pytest.mark.parametrize("head_dim", [72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_head_dims_in_half_precision(attend, device, head_dim, is_causal):
    query, key, value = Shape(2, 2, 1, 130, 700, head_dim).make(device, torch.float16)
    result = attend(sa.TopK(100), query, key, value, is_causal=is_causal, return_lse=True)
    assert_close_to_reference(
        result, query, key, value, sa.TopK(100), engine=attend.engine, is_causal=is_causal
    )


def test_bounds_of_keys_in_half_precision(attend, device):
    query, key, value = Shape(2, 2, 1, 140, 900, 64).make(device, torch.float16)
    bounds = torch.randint(0, 901, (2, 1, 140, 2), device=device, dtype=torch.int32).sort(-1).values
    common = {"key_bounds": bounds, "is_causal": True, "query_offset": 500}
    result = attend(sa.TopK(40), query, key, value, return_lse=True, **common)
    assert_close_to_reference(
        result, query, key, value, sa.TopK(40), engine=attend.engine, **common
    )


def test_more_keys_than_a_counter_of_16_bits(attend, device):
    """All scores of long rows lie in one bin."""
    query = torch.ones(1, 1, 3, 64, device=device, dtype=torch.float16)
    key = torch.ones(1, 1, 70_000, 64, device=device, dtype=torch.float16)
    value = torch.zeros_like(key)
    value[:, :, 65_999, 0] = value[:, :, 66_000, 1] = 2.0**14
    out = attend(sa.TopK(66_000), query, key, value)
    assert (out[..., 0] > 0).all() and (out[..., 1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("k", [1, 50, 400])
def test_nan_in_a_query_shows_in_its_row(attend, device, dtype, k):
    query, key, value = Shape(1, 2, 1, 140, 300, 64).make(device, dtype)
    query[:, :, 7] = torch.nan
    out = attend(sa.TopK(k), query, key, value, is_causal=True)
    assert out[:, :, 7].isnan().all()
    assert out[:, :, :7].isfinite().all() and out[:, :, 8:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sign", [1, -1], ids=["below", "above"])
def test_zeros_beside_scores_of_any_size(attend, device, dtype, sign):
    """The threshold lies between 1000 scores of 0 and 500 from 2^-100 to 2^10 in size."""
    query = torch.zeros(1, 1, 20, 64, device=device, dtype=dtype)
    query[..., 0] = 1
    sizes = torch.cat([sign * 2.0 ** torch.linspace(-100, 10, 500), torch.zeros(1000)])
    order = torch.randperm(1500)
    key = torch.zeros(1, 1, 1500, 64, device=device, dtype=dtype)
    key[0, 0, :, 0] = sizes[order].to(device, dtype)
    value = torch.zeros_like(key)
    value[0, 0, :, 0] = (order < 500).to(device, dtype)  # 1 where the score is not 0
    out = attend(sa.TopK(500 if sign > 0 else 1000), query, key, value, scale=2.0**-20)
    expected = 1.0 if sign > 0 else 0.0
    assert torch.allclose(out[..., 0], torch.full_like(out[..., 0], expected), atol=1e-3)

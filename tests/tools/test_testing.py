"""The comparison itself: right results pass, every kind of wrong result is caught."""

import pytest
import torch
from reference import DTYPES, Shape

import sparse_attn as sa
from sparse_attn._reference import PlainCall
from sparse_attn.testing import (
    allowed_keys,
    assert_close_to_reference,
    assert_matches_sdpa,
    math_attention,
    reference_attention,
)

PATTERN = sa.Band((9, 2), sinks=1)


def plain_attention(query, key, value, mask):
    """One row after another, in float64: nothing shared with the package."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        kv = h // (query.shape[1] // key.shape[1])
        keys = mask[i].nonzero().flatten()
        if not len(keys):
            continue
        scores = key[b, kv, keys].double() @ query[b, h, i].double() / query.shape[3] ** 0.5
        weights = scores.exp()
        out[b, h, i] = weights @ value[b, kv, keys].double() / weights.sum()
        lse[b, h, i] = weights.sum().log()
    return out, lse


@pytest.mark.parametrize(
    "pattern", [sa.Full(), PATTERN, sa.Dilated(3, 2), sa.Strided(2, 5)], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_reference_is_attention(pattern, is_causal):
    query, key, value = Shape(2, 4, 2, 12, 7, 8).make("cpu")
    out, lse = reference_attention(query, key, value, pattern, is_causal=is_causal)
    want = plain_attention(query, key, value, pattern.mask(12, 7, is_causal))
    torch.testing.assert_close(out, want[0], atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(lse, want[1], atol=1e-13, rtol=1e-13)


def test_reference_of_topk_keeps_the_best():
    query, key, value = Shape(1, 2, 1, 6, 20, 8).make("cpu")
    scores = query.double() @ key.double().mT
    best = torch.zeros(scores.shape).bool().scatter(-1, scores.topk(4).indices, True)
    out, lse = reference_attention(query, key, value, sa.TopK(4))
    want = reference_attention(query, key, value, attn_mask=best)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_reference_with_everything_else():
    query, key, value = Shape(1, 2, 1, 6, 20, 8).make("cpu")
    sinks, bias = torch.randn(2), torch.randn(6, 20)
    out, lse = reference_attention(
        query, key, value, scale=0.7, softcap=2.0, sink_logits=sinks, attn_mask=bias
    )
    scores = 2 * torch.tanh(0.7 * query.double() @ key.double().mT / 2) + bias
    weights = scores.exp() / (scores.exp().sum(-1) + sinks.double().exp()[:, None])[..., None]
    torch.testing.assert_close(out, weights @ value.double())
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def cancelling(bias):
    """A row of one key whose score is 0, of terms of 64, or far below 0 and brought back."""
    query, key, value = Shape(1, 1, 1, 1, 1, 64).make("cpu")
    key = torch.stack([query[..., 1::2], -query[..., ::2]], -1).flatten(-2)
    return query, key, value, {"scale": 1.0, **bias}


@pytest.mark.parametrize(
    "bias",
    [{}, {"attn_mask": torch.full((1, 1), 1e3), "alibi_slopes": torch.tensor([10.0])}],
    ids=["products", "biases"],
)
def test_an_lse_may_miss_by_the_rounding_of_its_terms(bias):
    query, key, value, common = cancelling(bias)
    if bias:
        common |= {"query_offset": 100}
    call = PlainCall((query, key, value), None, common)
    (_, lse), size = call.reference(), call.sizes()
    terms = float((query * key).abs().double().sum()) + (2000 if bias else 0)
    torch.testing.assert_close(size.item(), terms)
    assert abs(lse.item()) < 1e-3
    out = sa.naive_attention(query, key, value, **common)
    for off, right in ((0.9, True), (1.2, False)):
        given = (lse + off * terms * 2.0**-22).float()
        if right:
            assert_close_to_reference((out, given), query, key, value, **common)
        else:
            with pytest.raises(AssertionError, match="lse: error"):
                assert_close_to_reference((out, given), query, key, value, **common)


def test_an_lse_of_ordinary_scores_has_the_plain_limit():
    query, key, value = Shape(1, 2, 1, 6, 20, 64).make("cpu")
    out, lse = sa.naive_attention(query, key, value, return_lse=True)
    assert_close_to_reference((out, lse), query, key, value)
    off = 1.1 * 2.0**-18 * lse.abs().clamp(min=1)
    with pytest.raises(AssertionError, match="lse: error"):
        assert_close_to_reference((out, lse + off), query, key, value)


def test_allowed_keys_intersect_everything():
    query, key, _ = Shape(2, 2, 1, 5, 9, 8).make("cpu")
    bounds = torch.tensor([2, 6], dtype=torch.int32).expand(2, 1, 5, 2)
    mask = torch.rand(2, 1, 1, 9) < 0.7
    offset = torch.tensor([1, 7], dtype=torch.int32)
    got = allowed_keys(
        query,
        key,
        sa.Band(2),
        attn_mask=mask,
        is_causal=True,
        key_bounds=bounds,
        query_offset=offset,
    )
    for b, i, j in torch.cartesian_prod(*map(torch.arange, (2, 5, 9))).tolist():
        p = i + int(offset[b])
        want = abs(j - p) <= 2 and j <= p and 2 <= j < 6 and bool(mask[b, 0, 0, j])
        assert got[b, 0, i, j] == got[b, 1, i, j] == want


def case(dtype=torch.float32):
    query, key, value = Shape(2, 4, 2, 34, 67, 64).make("cpu", dtype)
    out64, lse64 = reference_attention(query, key, value, PATTERN, is_causal=True)
    return (query, key, value, PATTERN), out64.to(dtype), lse64.float()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rounded_reference_and_math_pass(dtype):
    tensors, out, lse = case(dtype)
    assert_close_to_reference((out, lse), *tensors, is_causal=True)
    math = math_attention(*tensors, is_causal=True)
    assert math.dtype == dtype
    assert_close_to_reference(math, *tensors, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_math_errs_as_much_as_torch(dtype):
    """A CPU's products are of float32 and rounded once, as torch's own of 16 bits are."""
    query, key, value = Shape(1, 4, 4, 34, 67, 64).make("cpu", dtype)
    out64, _ = reference_attention(query, key, value)
    weights = torch.softmax((query @ key.mT) * 64**-0.5, -1, dtype=torch.float32).to(dtype)
    errors = (weights @ value - out64).abs(), (math_attention(query, key, value) - out64).abs()
    assert errors[1].max() <= 1.1 * errors[0].max()
    assert float(errors[1].mean()) == pytest.approx(float(errors[0].mean()), rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_small_errors_fail(dtype):
    tensors, out, lse = case(dtype)
    step = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    out[1, 2, 20, 3] += step
    with pytest.raises(AssertionError, match=r"out: error .* worst at \[1, 2, 20, 3\]"):
        assert_close_to_reference((out, lse), *tensors, is_causal=True)


@pytest.mark.parametrize("bits", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "-inf"])
def test_non_finite_values_fail_first(bits):
    tensors, out, lse = case()
    out[0, 1, 2, 3] = bits
    with pytest.raises(
        AssertionError, match=r"out: (NaN|-?inf) differs .* first at \[0, 1, 2, 3\]"
    ):
        assert_close_to_reference(out, *tensors, is_causal=True)
    lse[1, 3, 33] = bits
    out[0, 1, 2, 3] = reference_attention(*tensors, is_causal=True)[0][0, 1, 2, 3]
    with pytest.raises(AssertionError, match=r"lse: (NaN|-?inf) differs"):
        assert_close_to_reference((out, lse), *tensors, is_causal=True)


def test_lse_errors_fail():
    tensors, out, lse = case()
    lse[0, 0, 0] += 1e-4
    with pytest.raises(AssertionError, match=r"lse: error .* worst at \[0, 0, 0\]"):
        assert_close_to_reference((out, lse), *tensors, is_causal=True)


def test_a_key_too_many_or_too_few_fails():
    (query, key, value, _), out, _ = case()
    for other in (sa.Band((10, 2), sinks=1), sa.Band((9, 2)), sa.Band((9, 1), sinks=1)):
        with pytest.raises(AssertionError, match="out: error"):
            assert_close_to_reference(out, query, key, value, other)


def test_wrong_topk_fails():
    query, key, value = Shape(1, 2, 1, 20, 60, 64).make("cpu")
    out = sa.topk_attention(query, key, value, 5)
    assert_close_to_reference(out, query, key, value, sa.TopK(5))
    with pytest.raises(AssertionError, match="out: error"):
        assert_close_to_reference(out, query, key, value, sa.TopK(6))


def test_near_ties_follow_the_choice_and_clear_scores_do_not():
    query, key, value = Shape(1, 1, 1, 1, 6, 8).make("cpu")
    query, key = torch.ones_like(query), torch.ones_like(key)
    key[..., 0] = torch.tensor([5.0, 1 + 1e-6, 1, 1, 0.5, 3])
    exact = torch.tensor([1, 1, 0, 0, 0, 1]).bool()[None, None, None]
    other = torch.tensor([1, 0, 0, 1, 0, 1]).bool()[None, None, None]
    wrong = torch.tensor([0, 1, 0, 0, 1, 1]).bool()[None, None, None]
    for choice, keys in ((None, exact), (exact, exact), (other, other)):
        got = reference_attention(query, key, value, sa.TopK(3), choice=choice)
        assert torch.equal(got[0], reference_attention(query, key, value, attn_mask=keys)[0])
    got = reference_attention(query, key, value, sa.TopK(3), choice=wrong)
    clear = torch.tensor([1, 1, 0, 0, 0, 1]).bool()
    assert torch.equal(got[0], reference_attention(query, key, value, attn_mask=clear)[0])


def test_shape_and_dtype_are_checked():
    tensors, out, _ = case()
    with pytest.raises(AssertionError, match="out: dtype torch.float64, expected torch.float32"):
        assert_close_to_reference(out.double(), *tensors)
    with pytest.raises(AssertionError, match="out: shape"):
        assert_close_to_reference(out[:1], *tensors)


def test_matches_sdpa_catches_wrong_calls():
    query, key, value = Shape(2, 4, 2, 34, 34, 64).make("cpu")
    assert_matches_sdpa(sa.fused_attention, query, key, value, is_causal=True)
    with pytest.raises(AssertionError, match="out: error"):
        assert_matches_sdpa(lambda *t, **c: sa.band_attention(*t, 20, **c), query, key, value)
    with pytest.raises(AssertionError, match="aligns the upper left corner"):
        assert_matches_sdpa(sa.fused_attention, query[:, :, :5], key, value, is_causal=True)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda out: out.double(), "out: dtype torch.float64, expected torch.float32"),
        (lambda out: out[None], r"out: shape \(1, 1, 2, 5, 8\), expected"),
        (lambda out: torch.ones(1), r"out: shape \(1,\), expected"),
        (lambda out: [out], "out: list, expected a tensor"),
        (lambda out: (out,), "out: tuple, expected a tensor"),
    ],
    ids=["dtype", "rank", "broadcast", "list", "tuple"],
)
def test_a_result_of_another_kind_fails(wrong, sentence):
    query, key, value = Shape(1, 2, 1, 5, 5, 8).make("cpu")
    value = torch.ones_like(value)

    def attention(*tensors):
        return wrong(sa.fused_attention(*tensors))

    with pytest.raises(AssertionError, match=sentence):
        assert_matches_sdpa(attention, query, key, value)
    with pytest.raises(AssertionError, match=sentence):
        assert_close_to_reference(attention(query, key, value), query, key, value)


@pytest.mark.parametrize("shape", [(1, 1, 2, 5), (1, 1, 1)], ids=str)
def test_an_lse_of_another_shape_fails(shape):
    query, key, value = torch.zeros(3, 1, 2, 5, 8)
    out, lse = sa.fused_attention(query, key, value, return_lse=True)
    lse = lse[None] if len(shape) == 4 else lse[:, :1, :1]
    with pytest.raises(AssertionError, match="lse: shape"):
        assert_close_to_reference((out, lse), query, key, value)


@pytest.mark.parametrize("bits", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_a_row_that_is_not_finite_excuses_no_other(bits):
    query, key, value = Shape(1, 2, 1, 5, 5, 8).make("cpu")
    if bits == torch.inf:
        value[0, 0, 4, 3] = bits
    else:
        query[0, 0, 2] = bits
    assert_matches_sdpa(sa.naive_attention, query, key, value)

    def attention(*tensors):
        out = sa.naive_attention(*tensors)
        return torch.where(out.isfinite(), out + 1, out)

    with pytest.raises(AssertionError, match="out: error"):
        assert_matches_sdpa(attention, query, key, value)
    with pytest.raises(AssertionError, match="out: error"):
        assert_close_to_reference(attention(query, key, value), query, key, value)


def test_an_empty_batch_matches():
    tensors = torch.randn(3, 0, 2, 5, 8)
    assert_matches_sdpa(sa.fused_attention, *tensors)
    assert_close_to_reference(sa.fused_attention(*tensors), *tensors)


Q = torch.zeros(1, 1, 4, 16)
F8 = Q.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: assert_close_to_reference(Q, Q, Q, Q, pattern=3),
            "pattern to be a pattern .* int",
        ),
        (lambda: assert_close_to_reference(Q, Q, Q, Q, sa.Band), "pattern .* write Band"),
        (lambda: assert_close_to_reference(Q, 3, Q, Q), "query to be a tensor, got int"),
        (
            lambda: assert_close_to_reference(Q, Q, Q, Q, casual=True),
            "unexpected keyword .*'casual'",
        ),
        (
            lambda: assert_close_to_reference(Q.half(), Q.half(), F8, F8),
            r"key that is read as it is",
        ),
        (lambda: reference_attention(Q, Q, Q, 3), "pattern to be a pattern"),
        (lambda: math_attention(Q, Q, Q, 3), "pattern to be a pattern"),
        (lambda: allowed_keys(Q, Q, 3), "pattern to be a pattern"),
        (lambda: allowed_keys(Q, 3), "key to be a tensor, got int"),
        (lambda: assert_matches_sdpa(3, Q, Q, Q), "attention to be a callable, got int"),
    ],
    ids=[
        *("pattern", "class", "query", "keyword", "float8"),
        *("reference", "math", "allowed", "allowed-key", "attention"),
    ],
)
def test_what_is_no_call_is_refused(call, sentence):
    with pytest.raises((TypeError, ValueError), match=rf"^sparse_attn\.\w+: .*{sentence}"):
        call()


def test_meta_results_fail():
    with pytest.raises(AssertionError, match="out: a meta tensor"):
        assert_close_to_reference(Q.to("meta"), *3 * [Q.to("meta")])

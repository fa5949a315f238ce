"""Sizes of zero and one, rows without keys, and values that must never matter."""

import pytest
import torch
from reference import DTYPES, PATTERNS, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

ZERO_SIZES = {
    "no-batch": Shape(0, 2, 1, 5, 7, 16),
    "no-heads": Shape(2, 0, 0, 5, 7, 16),
    "no-queries": Shape(2, 2, 1, 0, 7, 16),
    "no-keys": Shape(2, 2, 1, 5, 0, 16),
    "nothing": Shape(0, 0, 0, 0, 0, 16),
}


@pytest.mark.parametrize("shape", ZERO_SIZES.values(), ids=ZERO_SIZES)
@pytest.mark.parametrize("name", PATTERNS)
def test_sizes_of_zero(attend, device, name, shape):
    shape = attend.fit(shape)
    query, key, value = shape.make(device, attend.dtype)
    pattern = PATTERNS[name](shape, device)
    out, lse = attend(pattern, query, key, value, return_lse=True, is_causal=True)
    assert out.shape == query.shape and lse.shape == query.shape[:3]
    assert (out == 0).all() and (lse == -torch.inf).all()
    buffer = torch.full_like(query, torch.nan)
    assert attend(pattern, query, key, value, out=buffer) is buffer and (buffer == 0).all()


@pytest.mark.parametrize("Sq, Skv", [(1, 1), (1, 2), (2, 1), (17, 1)])
@pytest.mark.parametrize("name", PATTERNS)
def test_single_keys_and_queries(attend, device, name, Sq, Skv):
    shape = attend.fit(Shape(1, 1, 1, Sq, Skv, 64))
    query, key, value = shape.make(device, attend.dtype)
    pattern = PATTERNS[name](shape, device)
    result = attend(pattern, query, key, value, is_causal=True, return_lse=True)
    assert_close_to_reference(result, query, key, value, pattern, is_causal=True)


@pytest.mark.parametrize("batch, heads", [(2**32 + 1, 1), (1, 2**32), (2**20, 2**12)], ids=str)
def test_more_heads_than_int32_numbers_are_refused(device, batch, heads):
    tensor = torch.zeros(1, 1, 1, 16, device=device).expand(batch, heads, 1, 16)
    answer = sa.can_use(tensor, tensor, tensor)
    assert not answer and "query heads in all batch entries" in answer.reasons[0]


EMPTY = {
    "bounds": lambda rows: {"key_bounds": torch.tensor([40, 40]).int().expand(2, 1, rows, 2)},
    "inverted-bounds": lambda rows: {
        "key_bounds": torch.tensor([50, 3]).int().expand(2, 1, rows, 2)
    },
    "bool-mask": lambda rows: {"attn_mask": torch.zeros(rows, 67).bool()},
    "additive-mask": lambda rows: {"attn_mask": torch.full((rows, 67), -torch.inf)},
    "before-the-keys": lambda rows: {"is_causal": True, "query_offset": -1000},
}


@pytest.mark.parametrize("hides", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("name", PATTERNS)
def test_rows_without_keys_are_zero(attend, device, name, hides):
    shape = attend.fit(Shape(2, 2, 1, 34, 67, 64))
    query, key, value = shape.make(device, attend.dtype)
    common = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in hides(shape.Sq).items()
    }
    for sink_logits in (None, torch.ones(2, device=device)):
        out, lse = attend(
            PATTERNS[name](shape, device),
            query,
            key,
            value,
            return_lse=True,
            sink_logits=sink_logits,
            **common,
        )
        assert (out == 0).all() and (lse == -torch.inf).all()


def test_some_rows_without_keys(attend, device):
    query, key, value = Shape(1, 2, 1, 130, 65, 64).make(device, attend.dtype)
    layout = sa.BlockLayout(
        torch.tensor([1, 0, 2, 0, 1], device=device),
        torch.tensor([[3, 0], [0, 0], [1, 4], [0, 0], [2, 0]], device=device),
        32,
        16,
        5,
    )
    for pattern in (sa.BlockSparse(layout), sa.Band((3, 0)), sa.Dilated((2, 0), 5)):
        result = attend(pattern, query, key, value, return_lse=True, is_causal=True)
        assert torch.isinf(result[1]).any()
        assert_close_to_reference(result, query, key, value, pattern, is_causal=True)


@pytest.mark.parametrize("bits", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_keys_in_tiles_that_nothing_visits_never_matter(attend, device, engine, bits):
    if engine == "naive":
        pytest.skip("the naive engine's tile is the whole row")
    query, key, value = Shape(1, 2, 1, 64, 1024, 64).make(device, attend.dtype)
    pattern = sa.Band((63, 0))
    want = attend(pattern, query, key, value)
    key[:, :, :512] = bits
    value[:, :, :512] = bits
    assert torch.equal(attend(pattern, query, key, value), want)
    block = torch.zeros(1, 8, dtype=torch.bool, device=device)
    block[0, 7] = True
    listed = sa.BlockSparse(sa.BlockLayout.from_mask(block, 64, 128))
    assert torch.isfinite(attend(listed, query, key, value)).all()


LENGTH = 301  # of 512 keys that a cache has room for
TAILS = {
    "bounds": lambda Sq: {
        "key_bounds": torch.tensor([37, LENGTH]).int().expand(2, 1, Sq, 2),
        "query_offset": LENGTH - Sq,
    },
    "causal": lambda Sq: {"is_causal": True, "query_offset": LENGTH - Sq},
    "offsets": lambda Sq: {
        "is_causal": True,
        "query_offset": torch.tensor([LENGTH - Sq, LENGTH - Sq - 3]).int(),
    },
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize("Sq, head_dim", [(1, 64), (70, 128)])
@pytest.mark.parametrize("name", PATTERNS)
def test_tails_of_a_cache_never_matter(attend, device, name, Sq, head_dim, tail, dtype):
    shape = attend.fit(Shape(2, 4, 2, Sq, 512, head_dim))
    query, key, value = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    common = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in tail(Sq).items()
    }
    want = attend(pattern, query, key, value, return_lse=True, **common)
    key[:, :, LENGTH:], value[:, :, LENGTH:] = torch.nan, torch.inf
    if "key_bounds" in common:
        key[:, :, :37], value[:, :, :37] = torch.inf, torch.nan
    got = attend(pattern, query, key, value, return_lse=True, **common)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("Sq", [5, 300])
@pytest.mark.parametrize("name", sorted(PATTERNS.keys() - {"block-topk"}))  # it pools whole blocks
def test_nan_in_a_query_stays_in_its_row_and_shows(attend, device, name, Sq, dtype):
    shape = attend.fit(Shape(1, 2, 1, Sq, 2100, 64))
    query, key, value = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    want, want_lse = attend(pattern, query, key, value, return_lse=True)
    for sink_logits in (None, torch.zeros(2, device=device)):
        broken = query.clone()
        broken[0, 1, 2, 3] = torch.nan
        out, lse = attend(pattern, broken, key, value, return_lse=True, sink_logits=sink_logits)
        sees = want_lse[0, 1, 2] > -torch.inf
        assert out[0, 1, 2].isnan().all() == sees and lse[0, 1, 2].isnan() == sees
        lse[0, 1, 2], out[0, 1, 2] = want_lse[0, 1, 2], want[0, 1, 2]
        assert torch.equal(lse, want_lse) and (sink_logits is not None or torch.equal(out, want))


@pytest.mark.parametrize("name", ["full", "topk"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("Sq", [5, 300])
def test_nan_in_a_key_shows_in_every_row_that_keeps_all(attend, device, name, Sq, dtype):
    query, key, value = Shape(1, 2, 1, Sq, 2100, 64).make(device, dtype)
    key[0, 0, 1000, 5] = torch.nan
    pattern = {"full": sa.Full(), "topk": sa.TopK(2100)}[name]
    out, lse = attend(pattern, query, key, value, return_lse=True)
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("Sq", [1, 17, 130])
def test_nan_in_many_keys_shows(attend, device, Sq):
    """Whole chunks of keys that an engine may take by themselves have no score but NaN."""
    query, key, value = Shape(1, 2, 1, Sq, 4200, 64).make(device, attend.dtype)
    key[0, 0, 1900:3100] = torch.nan
    out, lse = attend(sa.Full(), query, key, value, return_lse=True)
    assert out.isnan().all() and lse.isnan().all()


def test_large_scores_stay_finite(attend, device):
    query, key, value = Shape(1, 2, 2, 65, 65, 64).make(device, attend.dtype)
    result = attend(sa.Band(20), 100 * query, 100 * key, value, return_lse=True)
    assert_close_to_reference(result, 100 * query, 100 * key, value, sa.Band(20))


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("term", [-2e10, -1e12, LOWEST, 1e10, 1e12], ids=lambda term: f"{term:.0e}")
@pytest.mark.parametrize("Sq", [1, 70])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_mask_terms_that_swallow_the_scores_leave_the_mean(attend, device, dtype, Sq, term):
    query, key, value = Shape(1, 2, 1, Sq, 70, 64).make(device, dtype)
    mask = torch.full((Sq, 70), term, device=device)
    mean = value.double().mean(2, keepdim=True).expand(1, 2, Sq, 64).to(dtype)
    near = dict.fromkeys(("rtol", "atol"), 1e-5 if dtype == torch.float32 else 1e-2)
    for pattern in (sa.Full(), sa.Band(100), sa.TopK(70)):
        out, lse = attend(pattern, query, key, value, attn_mask=mask, return_lse=True)
        torch.testing.assert_close(out, mean, **near)
        # CUDA keeps log2 units, in which the lowest lse is ln 2 times the lowest float.
        rtol = 0.31 if term == LOWEST else 1e-6
        torch.testing.assert_close(lse, torch.full_like(lse, term), rtol=rtol, atol=0)
        sink_logits = torch.zeros(2, device=device)
        out = attend(pattern, query, key, value, attn_mask=mask, sink_logits=sink_logits)
        torch.testing.assert_close(out, mean if term > 0 else torch.zeros_like(mean), **near)


@pytest.mark.parametrize("term", [-2e10, -1e12, LOWEST], ids=lambda term: f"{term:.0e}")
@pytest.mark.parametrize("name", PATTERNS)
def test_huge_mask_terms_in_parts_of_rows_forbid(attend, device, name, term):
    shape = attend.fit(Shape(1, 2, 1, 70, 70, 64))
    query, key, value = shape.make(device, attend.dtype)
    pattern = PATTERNS[name](shape, device)
    mask = torch.zeros(shape.Sq, 70, device=device)
    mask[:, 1::2] = term / 2 if name == "topk" else term  # top-k may keep such keys alone: see lse
    mask.diagonal(70 - shape.Sq).fill_(0)
    result = attend(pattern, query, key, value, attn_mask=mask, is_causal=True, return_lse=True)
    assert_close_to_reference(result, query, key, value, pattern, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("scale", [1e8, -1e8, 1e5])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_scales_that_leave_one_key(attend, device, dtype, scale):
    query, key, value = Shape(1, 2, 2, 70, 70, 64).make(device, dtype)
    out, lse = attend(sa.Full(), query, key, value, scale=scale, return_lse=True)
    top, index = (query.double() @ key.double().mT * scale).max(-1)
    torch.testing.assert_close(out, value.gather(2, index[..., None].expand_as(value)))
    torch.testing.assert_close(lse, top.float(), rtol=1e-5, atol=0)


def test_windows_beyond_32_bits_are_simply_large(attend, device):
    query, key, value = Shape(1, 2, 2, 40, 40, 64).make(device, attend.dtype)
    for large in (2**31 - 1, 2**31, 2**40, 2**63, 2**70):
        full = attend(sa.Full(), query, key, value, is_causal=True)
        assert torch.equal(attend(sa.Band((large, 0)), query, key, value), full)
        sinks = attend(sa.Band(0, sinks=large), query, key, value, is_causal=True)
        torch.testing.assert_close(sinks, full)
        own = attend(sa.Band(0), query, key, value)
        torch.testing.assert_close(attend(sa.Dilated(large, large), query, key, value), own)
        torch.testing.assert_close(attend(sa.Strided(1, large), query, key, value), own)
        torch.testing.assert_close(attend(sa.TopK(large), query, key, value, is_causal=True), full)


@pytest.mark.parametrize("step", [2**25, 2**28, 2**29 - 1], ids=str)
def test_masks_beside_steps_past_all_keys(attend, device, step):
    """A tile's other keys would lie past 32 bits, where no mask is read."""
    shape = attend.fit(Shape(1, 2, 2, 40, 100, 64))
    tensors = shape.make(device, attend.dtype)
    common = {"attn_mask": torch.rand(shape.Sq, shape.Skv, device=device) < 0.5}
    taps = sa.Dilated(1, step)
    assert_close_to_reference(attend(taps, *tensors, **common), *tensors, taps, **common)
    columns = sa.Strided(2, step)  # one of which is key 5
    common["key_origin"] = torch.tensor([6 - step], dtype=torch.int32, device=device)
    assert_close_to_reference(attend(columns, *tensors, **common), *tensors, columns, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("far", [2**31 - 1, -(2**31)])
def test_offset_tensors_at_the_ends_of_32_bits(attend, device, dtype, far):
    query, key, value = Shape(2, 2, 2, 70, 90, 64).make(device, dtype)
    offsets = torch.tensor([far, 20], dtype=torch.int32, device=device)
    plain = attend(sa.Full(), query, key, value)
    full = attend(sa.Full(), query, key, value, query_offset=offsets)
    torch.testing.assert_close(full, plain)
    out = attend(sa.Full(), query, key, value, query_offset=offsets, is_causal=True)
    torch.testing.assert_close(out[0], plain[0] if far > 0 else torch.zeros_like(out[0]))
    assert (attend(sa.Band(3), query, key, value, query_offset=offsets)[0] == 0).all()


@pytest.mark.parametrize("offset", [30, torch.tensor([25, 60], dtype=torch.int32)], ids=type)
def test_rows_past_the_keys_are_no_tokens(attend, device, offset):
    tensors = Shape(2, 2, 1, 70, 60, 64).make(device, attend.dtype)
    tokens = torch.tensor([3, 50, 75, 2**40], device=device)
    offset = offset.to(device) if isinstance(offset, torch.Tensor) else offset
    pattern, common = sa.Band((9, 2), global_tokens=tokens), {"query_offset": offset}
    out = attend(pattern, *tensors, **common)
    assert_close_to_reference(out, *tensors, pattern, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_global_tokens_just_before_the_first_window(attend, device, dtype):
    query, key, value = Shape(1, 2, 2, 64, 64, 64).make(device, dtype)
    tokens = torch.tensor([50, 57], dtype=torch.int32, device=device)
    pattern = sa.Band((1, 0), global_tokens=tokens)
    common = {"is_causal": True, "query_offset": 62}
    out = attend(pattern, query, key, value, **common)
    assert_close_to_reference(out, query, key, value, pattern, **common)


def test_blocks_far_higher_than_the_queries(attend, device):
    """Tiles of theirs that hold no query are none, however many heads there are."""
    tensors = attend.fit(Shape(19, 27, 27, 3, 48, 64)).make(device, attend.dtype)
    mask = torch.tensor([[True, False, True]], device=device)
    pattern = sa.BlockSparse(sa.BlockLayout.from_mask(mask, 2**29 - 128, 16))
    assert_close_to_reference(attend(pattern, *tensors), *tensors, pattern)

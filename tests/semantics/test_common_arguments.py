"""What every pattern takes: masks, bounds, offsets, softcap, sinks, scale, lse and out."""

import pytest
import torch
from reference import PATTERNS, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

SHAPE = Shape(2, 4, 2, 34, 67, 64)
INF = float("inf")


def cut(common, rows):
    """Masks and bounds of the first rows alone, for an engine that takes no more queries."""
    common = dict(common)
    for name in ("attn_mask", "key_bounds"):
        if name in common and common[name].dim() > 1:
            common[name] = common[name][..., :rows, :]
    return common


def check(attend, device, name, **common):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, attend.dtype)
    common = cut(common, shape.Sq)
    pattern = PATTERNS[name](shape, device)
    result = attend(pattern, query, key, value, return_lse=True, **common)
    assert_close_to_reference(result, query, key, value, pattern, **common)


MASK_SHAPES = [
    (34, 67),
    (67,),
    (1, 67),
    (34, 1),
    (4, 34, 67),
    (1, 34, 67),
    (2, 4, 34, 67),
    (2, 1, 34, 67),
    (2, 1, 1, 67),
    (1, 4, 34, 1),
    (1, 1, 1, 1),
]


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_of_every_rank(attend, device, shape, kind):
    keep = torch.rand(shape, device=device) < 0.7
    mask = keep if kind == "bool" else torch.randn(shape, device=device).masked_fill(~keep, -INF)
    check(attend, device, "band-sinks", attn_mask=mask)
    check(attend, device, "full", attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("name", PATTERNS)
def test_mask_joins_every_pattern(attend, device, name):
    mask = torch.randn(2, 1, 34, 67, device=device)
    mask[mask < -1] = -INF
    check(attend, device, name, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_mask_in_the_dtype_of_the_query_or_float32(attend, device, dtype):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, dtype)
    for mask_dtype in (dtype, torch.float32):
        mask = torch.randn(shape.Sq, 67, device=device).to(mask_dtype)
        out = attend(sa.Full(), query, key, value, attn_mask=mask)
        assert_close_to_reference(out, query, key, value, attn_mask=mask)


def test_strided_mask(attend, device):
    mask = torch.randn(67, 34, 2, device=device).permute(2, 1, 0)[:, None]
    check(attend, device, "full", attn_mask=mask)
    check(attend, device, "full", attn_mask=(mask > 0).expand(2, 4, 34, 67))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", PATTERNS)
def test_key_bounds(attend, device, name, heads):
    low = torch.randint(-3, 20, (2, heads, 34, 1), device=device)
    bounds = torch.cat([low, low + torch.randint(-2, 60, low.shape, device=device)], -1).int()
    check(attend, device, name, key_bounds=bounds)
    check(attend, device, name, key_bounds=bounds, is_causal=True)


def test_key_bounds_with_extreme_numbers(attend, device):
    bounds = torch.tensor([[-(2**31), 2**31 - 1], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    bounds = bounds.to(device).repeat(2, 1, 17, 1)
    check(attend, device, "band-globals", key_bounds=bounds)
    check(attend, device, "dilated-sinks", key_bounds=bounds)


@pytest.mark.parametrize("offset", [0, 5, 33, -7, 66, 200, -200, 2**40, -(2**40), 2**70], ids=str)
@pytest.mark.parametrize(
    "name", ["band-sinks", "band-globals", "dilated", "strided", "blocks", "topk"]
)
def test_query_offset(attend, device, name, offset):
    check(attend, device, name, query_offset=offset)
    check(attend, device, name, query_offset=offset, is_causal=True)


@pytest.mark.parametrize("pattern", [sa.Band((None, 0)), sa.Band((2**40, 9)), sa.Strided(2**40, 3)])
def test_windows_reach_back_from_offsets_beyond_any_length(attend, device, pattern):
    """As far as the offset counts, 2^29 - 1; the reference and `naive_attention`'s mask say so."""
    tensors = attend.fit(SHAPE).make(device, attend.dtype)
    long = torch.full((SHAPE.B,), 2**40, device=device)
    for offset in (2**40, long):
        common = dict(query_offset=offset, is_causal=True, return_lse=True)
        result = attend(pattern, *tensors, **common)
        assert_close_to_reference(result, *tensors, pattern, **common)
        assert torch.equal(
            result[0],
            attend(
                pattern,
                *tensors,
                **common | {"query_offset": 2**29},
            )[0],
        )


@pytest.mark.parametrize("name", PATTERNS)
def test_query_offset_of_each_batch_entry(attend, device, name):
    offsets = torch.tensor([-3, 40], dtype=torch.int32, device=device)
    check(attend, device, name, query_offset=offsets, is_causal=True)


def test_query_offset_of_each_entry_is_the_int(attend, device):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, attend.dtype)
    offsets = torch.tensor([5, 21], dtype=torch.int32, device=device)
    both = attend(sa.Band((9, 2)), query, key, value, query_offset=offsets)
    for b, offset in enumerate(offsets.tolist()):
        entry = (tensor[b : b + 1] for tensor in (query, key, value))
        assert torch.equal(both[b], attend(sa.Band((9, 2)), *entry, query_offset=offset)[0])


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("origins", [(7, 0), (40, -3), (2**31 - 1, -(2**31))], ids=str)
def test_key_origin(attend, device, name, origins):
    origin = torch.tensor(origins, dtype=torch.int32, device=device)
    check(attend, device, name, key_origin=origin)
    check(attend, device, name, key_origin=origin, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("queries", [1, 9, 200])
@pytest.mark.parametrize(
    "name", [n for n in PATTERNS if n != "band-scattered" and "blocks" not in n]
)
def test_padded_equals_alone(attend, device, name, queries, dtype):
    """Rows after 64 pads, which bounds hide, against the rows alone; no layouts and indices."""
    pads, length = 64, 330
    shape = Shape(1, 4, 2, queries, length, 64)
    query, key, value = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    junk = torch.full_like(key[:, :, :pads], torch.nan)
    low = torch.tensor([pads, length + pads], dtype=torch.int32, device=device)
    common = {"is_causal": True, "return_lse": True}
    alone = attend(pattern, query, key, value, **common)
    padded = attend(
        pattern,
        query,
        torch.cat([junk, key], 2),
        torch.cat([junk, value], 2),
        key_bounds=low.expand(1, 1, queries, 2),
        key_origin=low[:1].contiguous(),
        **common,
    )
    torch.testing.assert_close(padded, alone, atol=4e-3, rtol=1.6e-2)


@pytest.mark.parametrize("name", PATTERNS)
def test_softcap_and_sink_logits(attend, device, name):
    sinks = torch.randn(4, device=device)
    check(attend, device, name, softcap=1.5)
    check(attend, device, name, sink_logits=sinks, is_causal=True)
    check(attend, device, name, softcap=30.0, sink_logits=3 * sinks, scale=2.0)


@pytest.mark.parametrize("by_entry", [False, True], ids=["heads", "entries"])
@pytest.mark.parametrize("name", PATTERNS)
def test_alibi_slopes(attend, device, name, by_entry):
    slopes = 2.0 ** -torch.arange(1.0, 9.0, device=device).view(2, 4)
    slopes = slopes if by_entry else slopes[0]
    check(attend, device, name, alibi_slopes=slopes, is_causal=True)
    offset = torch.tensor([-3, 40], dtype=torch.int32, device=device)
    check(attend, device, name, alibi_slopes=slopes, softcap=1.5, query_offset=offset)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_a_large_softcap_leaves_small_scores_exact(attend, device, head_dim):
    """Rows of one to three keys: their lse is near 0, where its error may be 2^-18 at most."""
    tensors = Shape(4, 8, 2, 70, 70, head_dim).make(device, torch.float16)
    common = {"softcap": 50.0, "return_lse": True}
    result = attend(sa.Band((2, 0)), *tensors, **common)
    assert_close_to_reference(result, *tensors, sa.Band((2, 0)), **common)


def test_sink_logits_in_half_precision(attend, device):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, torch.bfloat16)
    sinks = torch.randn(4, device=device).bfloat16()
    out = attend(sa.Full(), query, key, value, sink_logits=sinks)
    assert_close_to_reference(out, query, key, value, sink_logits=sinks)


def test_infinite_sink_logits(attend, device):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, attend.dtype)
    nothing = torch.full((4,), -INF, device=device)
    plain = attend(sa.Band(9), query, key, value, return_lse=True)
    out, lse = attend(sa.Band(9), query, key, value, sink_logits=nothing, return_lse=True)
    torch.testing.assert_close(out, plain[0])
    assert torch.equal(lse, plain[1])


@pytest.mark.parametrize("scale", [0.0, 1e-3, 3, -0.7], ids=str)
@pytest.mark.parametrize("name", ["full", "band-sinks", "dilated", "blocks", "topk"])
def test_scale(attend, device, name, scale):
    check(attend, device, name, scale=scale)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16], ids=str)
def test_scale_may_be_a_tensor_of_one_number(attend, device, kind):
    """As torch's SDPA takes it."""
    query, key, value = attend.fit(SHAPE).make(device, attend.dtype)
    out = attend(sa.Full(), query, key, value, scale=torch.tensor(0.5, dtype=kind))
    assert torch.equal(out, attend(sa.Full(), query, key, value, scale=0.5))


@pytest.mark.parametrize(
    "scale, got",
    [
        (torch.ones(2), r"a tensor of shape \(2,\)"),
        (torch.tensor(True), "bool"),
        (torch.tensor(0.5, requires_grad=True), "a tensor that requires grad; write scale.item"),
        (torch.tensor(0.5, device="meta"), "a tensor on meta; write scale.item"),
    ],
    ids=["several", "bool", "grad", "another-device"],
)
def test_scale_of_a_wrong_kind(scale, got):
    query, key, value = torch.randn(3, 1, 1, 16, 16)
    with pytest.raises(TypeError, match=f"^sparse_attn.*scale to be a float or None, got {got}"):
        sa.fused_attention(query, key, value, scale=scale)


def test_scale_zero_is_uniform_attention(attend, device):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, attend.dtype)
    out = attend(sa.Full(), query, key, value, scale=0)
    mean = value.repeat_interleave(2, 1).mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, mean)


@pytest.mark.parametrize("name", PATTERNS)
def test_lse_is_extra(attend, device, name):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, attend.dtype)
    pattern = PATTERNS[name](shape, device)
    out, lse = attend(pattern, query, key, value, return_lse=True)
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, shape.Sq)
    assert torch.equal(out, attend(pattern, query, key, value))


@pytest.mark.parametrize("start", [3, 8], ids=["odd", "aligned"])
@pytest.mark.parametrize("name", PATTERNS)
def test_out_is_filled_and_returned(attend, device, name, start):
    shape = attend.fit(SHAPE)
    query, key, value = shape.make(device, attend.dtype)
    pattern = PATTERNS[name](shape, device)
    want, want_lse = attend(pattern, query, key, value, return_lse=True)
    buffer = torch.full((2, shape.Sq + 2, 4, 64 + 2 * start), 7.0, device=device).to(query.dtype)
    out = buffer[:, 1:-1, :, start:-start].transpose(1, 2)
    assert attend(pattern, query, key, value, out=out) is out
    assert torch.equal(out, want)
    out.zero_()
    result, lse = attend(pattern, query, key, value, out=out, return_lse=True)
    assert result is out and torch.equal(out, want) and torch.equal(lse, want_lse)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


def test_all_at_once(attend, device):
    bounds = torch.stack(
        [torch.randint(0, 9, (2, 1, 34)), torch.randint(30, 70, (2, 1, 34))], -1
    ).int()
    common = {
        "attn_mask": torch.rand(2, 1, 1, 67, device=device) < 0.8,
        "is_causal": True,
        "scale": 0.4,
        "key_bounds": bounds.to(device),
        "query_offset": torch.tensor([10, 33], dtype=torch.int32, device=device),
        "softcap": 5.0,
        "sink_logits": torch.randn(4, device=device),
    }
    for name in PATTERNS:
        check(attend, device, name, **common)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
def test_index_arguments_of_other_whole_numbers_are_converted(device, dtype):
    query, key, value = Shape(2, 4, 2, 33, 40, 16).make(device)
    row = torch.arange(33, device=device)
    bounds = torch.stack([row // 2, row + 9], -1).expand(2, 1, -1, -1)
    calls = {
        "key_bounds": bounds,
        "query_offset": torch.tensor([3, 7], device=device),
        "key_origin": torch.tensor([2, 0], device=device),
    }
    for name, argument in calls.items():
        want = sa.band_attention(query, key, value, (5, 0), sinks=2, **{name: argument.int()})
        given = {name: argument.to(dtype)}
        assert torch.equal(sa.band_attention(query, key, value, (5, 0), sinks=2, **given), want)
    if dtype == torch.int64:
        far = bounds.long().clone()
        far[..., 1] = 2**40
        want = sa.fused_attention(query, key, value, key_bounds=far.clamp(max=40).int())
        assert torch.equal(sa.fused_attention(query, key, value, key_bounds=far), want)


def test_bounds_past_63_bits_are_no_limit(device):
    query, key, value = Shape(1, 2, 1, 9, 40, 16).make(device)
    ends = torch.tensor([3, 2**64 - 1], dtype=torch.uint64, device=device).expand(1, 1, 9, 2)
    last = torch.tensor([3, 40], dtype=torch.int32, device=device).expand(1, 1, 9, 2)
    want = sa.fused_attention(query, key, value, key_bounds=last)
    assert torch.equal(sa.fused_attention(query, key, value, key_bounds=ends), want)

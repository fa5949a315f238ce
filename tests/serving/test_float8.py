"""Keys and values of float8_e4m3fn: attention on what they stand for, within the error rule."""

import math

import pytest
import torch
from ragged import RAGGED_PATTERNS, Serving, make_pages
from reference import Shape

import sparse_attn as sa
from sparse_attn._reference import PlainCall, math_attention
from sparse_attn.testing import _assert_lse, _assert_output

SHAPE = Shape(2, 4, 2, 33, 150, 64)
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
FLOAT8 = torch.float8_e4m3fn
SCALES = {
    "none": lambda device: (None, None),
    "tensor": lambda device: (torch.tensor(0.7, device=device), torch.tensor(3.0, device=device)),
    "head": lambda device: tuple(torch.rand(2, SHAPE.Hkv, device=device) + 0.3),
    "entry": lambda device: tuple(torch.rand(2, SHAPE.B, SHAPE.Hkv, device=device) + 0.3),
}


@pytest.fixture
def attend(device, engine):
    """The call with the engine under test; skips where that does not serve it."""

    return Serving(device, engine)


def inputs(device, dtype, shape=SHAPE):
    query, key, value = shape.make(device, dtype)
    return query, key.to(FLOAT8), value.to(FLOAT8)


def dequantized(tensor, scale):
    """What the codes stand for, in float64."""
    if scale is None:
        return tensor.double()
    return tensor.double() * scale.double().reshape(-1, scale.shape[-1] if scale.dim() else 1, 1, 1)


def assert_close(result, query, key, value, scales, pattern, **common):
    """The error rule against float64, with plain attention on keys of query's dtype beside it."""
    key, value = (dequantized(t, s) for t, s in zip((key, value), scales, strict=True))
    exact = PlainCall((query, key, value), pattern, common)
    want, want_lse = exact.reference()
    rounded = (tensor.to(query.dtype) for tensor in (key, value))
    _assert_output(result[0], want, math_attention(query, *rounded, pattern, **common))
    _assert_lse(result[1], want_lse, exact.sizes)


@pytest.mark.parametrize(
    "name", ["full", "band-sinks", "band-globals", "dilated", "strided", "blocks"]
)
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_attention_on_what_the_codes_stand_for(attend, device, dtype, scales, name):
    query, key, value = inputs(device, dtype)
    pattern = RAGGED_PATTERNS[name](SHAPE.Sq, SHAPE.Skv, device)
    key_scale, value_scale = scales(device)
    common = {"is_causal": True, "sink_logits": torch.randn(SHAPE.Hq, device=device)}
    result = attend(
        sa.sparse_attention,
        *(query, key, value, pattern),
        key_scale=key_scale,
        value_scale=value_scale,
        return_lse=True,
        **common,
    )
    assert_close(result, query, key, value, (key_scale, value_scale), pattern, **common)


@pytest.mark.parametrize("rows, keys", [(1, 1000), (4, 77), (16, 300), (200, 200)])
@pytest.mark.parametrize(
    "head_dim, value_dim", [(64, 64), (96, 96), (128, 128), (192, 128), (64, 72), (72, 8)]
)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_decode_and_prefill(attend, device, dtype, head_dim, value_dim, rows, keys):
    shape = Shape(2, 8, 2, rows, keys, head_dim, Dv=value_dim)
    query, key, value = inputs(device, dtype, shape)
    scales = SCALES["head"](device)
    given = {"key_scale": scales[0], "value_scale": scales[1], "is_causal": True}
    result = attend(sa.fused_attention, query, key, value, return_lse=True, **given)
    assert_close(result, query, key, value, scales, None, is_causal=True)


@pytest.mark.parametrize("common", [{"softcap": 5.0}, {"scale": -0.3}, {"scale": 0.0}], ids=str)
def test_common_arguments(attend, device, common):
    query, key, value = inputs(device, torch.float16)
    scales = SCALES["entry"](device)
    given = {"key_scale": scales[0], "value_scale": scales[1], **common}
    result = attend(sa.fused_attention, query, key, value, return_lse=True, **given)
    assert_close(result, query, key, value, scales, None, **common)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_every_code_is_read_exactly(attend, device, dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FLOAT8)
    codes = torch.where(codes.float().isnan(), 0.0, codes.float()).to(FLOAT8)
    value = codes.reshape(1, 1, 4, 64)
    query = torch.zeros(1, 1, 1, 64, device=device, dtype=dtype)
    for j in range(4):
        bounds = torch.tensor([j, j + 1], dtype=torch.int32, device=device).reshape(1, 1, 1, 2)
        out = attend(sa.fused_attention, query, value, value, key_bounds=bounds)
        assert torch.equal(out.float(), value[:, :, j : j + 1].float())


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_a_code_that_is_no_number_shows(attend, device, dtype):
    query = torch.ones(1, 1, 1, 64, device=device, dtype=dtype)
    key, value = torch.ones(2, 1, 1, 40, 64, device=device).to(FLOAT8)
    broken = value.float()
    broken[..., 7, 5] = torch.nan
    out = attend(sa.fused_attention, query, key, broken.to(FLOAT8))
    assert out[..., 5].isnan().all() and out.isnan().sum() == 1
    assert attend(sa.fused_attention, query, broken.to(FLOAT8), value).isnan().all()


@pytest.mark.parametrize("layout", ["separate", "interleaved"])
@pytest.mark.parametrize("rows", [1, 16, 60])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_pages_have_the_bits_of_contiguous_keys(attend, device, dtype, rows, layout):
    shape = Shape(1, 8, 2, rows, 333, 64)
    made = [inputs(device, dtype, shape) for _ in range(3)]
    query, keys, values = (list(part) for part in zip(*made, strict=True))
    pages = make_pages(keys, values, 64, layout)
    scales = [torch.rand(3, 2, device=device) + 0.5 for _ in range(2)]
    out = attend(
        sa.paged_attention,
        *(torch.cat(query), pages.key, pages.value, pages.table, pages.used),
        key_scale=scales[0],
        value_scale=scales[1],
        pattern=sa.Band((100, 0), sinks=3),
    )
    for b, call in enumerate(made):
        given = {"key_scale": scales[0][b], "value_scale": scales[1][b]}
        want = attend(sa.sparse_attention, *call, sa.Band((100, 0), sinks=3), **given)
        assert torch.equal(out[b : b + 1], want)


def test_a_quantized_cache_is_close(attend, device):
    query, key, value = SHAPE.make(device, torch.bfloat16)
    key8, value8, key_scale, value_scale = sa.quantize_cache(key, value)
    given = {"key_scale": key_scale, "value_scale": value_scale}
    out = attend(sa.fused_attention, query, key8, value8, **given).float()
    want = sa.fused_attention(query, key, value).float()
    assert (out - want).abs().sum() < 0.05 * want.abs().sum()


WRONG = {
    "float32": (
        {"query": lambda t: t.float()},
        "query of dtype float16 or bfloat16 beside keys of",
    ),
    "query": ({"query": lambda t: t.to(FLOAT8)}, "query of dtype float32, float16 or bfloat16"),
    "value": ({"value": lambda t: t.half()}, "value of key's dtype float8_e4m3fn, got float16"),
    "e5m2": (
        {"key": lambda t: t.to(torch.float8_e5m2)},
        "key of dtype float32, float16, bfloat16 or float8_e4m3fn, got float8_e5m2",
    ),
    "shape": (
        {"key_scale": lambda t: torch.ones(3)},
        r"key_scale of shape \(\), \(2\) or \(2, 2\)",
    ),
    "dtype": ({"value_scale": lambda t: torch.ones(2).half()}, "value_scale of dtype float32"),
    "device": (
        {"key_scale": lambda t: torch.ones(2, device="meta")},
        "key_scale on query's device",
    ),
}


@pytest.mark.parametrize("change, sentence", WRONG.values(), ids=WRONG)
def test_wrong_calls(device, change, sentence):
    query, key, value = inputs(device, torch.float16)
    call = {"query": query, "key": key, "value": value}
    ((name, make),) = change.items()
    made = make(call.get(name))
    call[name] = made if made.is_meta else made.to(device)
    with pytest.raises(ValueError, match=f"^sparse_attn::fused: expected {sentence}"):
        sa.fused_attention(**call)


def test_scales_without_float8_are_refused(device):
    query, key, value = SHAPE.make(device, torch.float16)
    scale = torch.ones((), device=device)
    with pytest.raises(
        ValueError, match="key_scale beside keys of dtype float8_e4m3fn, got float16"
    ):
        sa.fused_attention(query, key, value, key_scale=scale)


@pytest.mark.parametrize("sizes", [(0, 2), (1, 0)], ids=["no-entry", "no-head"])
def test_calls_without_entries_or_heads(device, sizes):
    query = torch.randn(*sizes, 33, 64, device=device).half()
    key = query.to(FLOAT8)
    assert sa.can_use(query, key, key)
    assert sa.fused_attention(query, key, key).shape == query.shape


def test_pages_without_a_sequence(device):
    """All rows of the query lie past the sequences, of which there are none."""
    query = torch.randn(3, 2, 64, device=device).half()
    cache = torch.randn(2, 16, 2, 64, device=device).to(FLOAT8)
    table, lengths, starts = (
        torch.zeros(size, dtype=torch.int32, device=device) for size in ((0, 1), 0, 1)
    )
    given = {"cu_seq_q": starts, "max_q": 16}
    out = torch.full_like(query, 7)
    sa.paged_attention(query, cache, cache, table, lengths, out=out, **given)
    assert bool((out == 7).all())


@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_scales_of_no_use_are_refused_on_a_cpu(name, number):
    """As other contents that the host can see; a GPU's are not looked at."""
    query, key, value = inputs("cpu", torch.float16)
    scale = {name: torch.tensor([1.0, number])}
    sentence = f"expected {name} above 0 and finite, got {number:g}$"
    with pytest.raises(ValueError, match=f"^sparse_attn::fused: {sentence}"):
        sa.fused_attention(query, key, value, **scale)
    caches = [torch.zeros(2, 16, 2, 64).to(FLOAT8) for _ in range(2)]
    tokens = torch.randn(3, 2, 64)
    with pytest.raises(ValueError, match=f"^sparse_attn::append_to_cache: {sentence}"):
        sa.append_to_cache(tokens, tokens, *caches, torch.arange(3), **scale)

"""Many queries on keys of float8: the error rule, and bits that no layout of the keys changes."""

import pytest
import torch
from ragged import Ragged, Serving, alone, make_pages, malformed, split
from reference import Shape
from test_float8 import assert_close

import sparse_attn as sa

FLOAT8 = torch.float8_e4m3fn


@pytest.fixture
def serving(device, engine):
    return Serving(device, engine)


def rows_for(engine, rows):
    return min(rows, 16) if engine == "decode" else rows


def blocks(rows, keys, device):
    mask = torch.rand((1, 1, -(-rows // 128), -(-keys // 64)), device=device) < 0.4
    return sa.BlockSparse(sa.BlockLayout.from_mask(mask, 128, 64))


PATTERNS = {
    "full": lambda rows, keys, device: sa.Full(),
    "band-sinks": lambda rows, keys, device: sa.Band((150, 0), sinks=5),
    "band": lambda rows, keys, device: sa.Band((90, 40)),
    "dilated": lambda rows, keys, device: sa.Dilated((60, 5), 3),
    "strided": lambda rows, keys, device: sa.Strided(32, 16),
    "band-globals": lambda rows, keys, device: sa.Band(40, global_tokens=300),
    "band-scattered": lambda rows, keys, device: sa.Band(
        30, sinks=2, global_tokens=torch.tensor([500, 0, 33], device=device)
    ),
    "blocks": blocks,
}


def scales_for(batch, heads, device):
    return {
        "key_scale": torch.rand(batch, heads, device=device) + 0.3,
        "value_scale": torch.rand(batch, heads, device=device) + 0.3,
    }


def check(serving, device, shape, dtype, pattern, **common):
    """The error rule for a call on float8 with scales by entry and head."""
    query, key, value = shape.make(device, dtype)
    key, value = key.to(FLOAT8), value.to(FLOAT8)
    scales = scales_for(shape.B, shape.Hkv, device)
    call = (sa.sparse_attention, query, key, value, pattern)
    result = serving(*call, return_lse=True, **scales, **common)
    assert_close(result, query, key, value, tuple(scales.values()), pattern, **common)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_patterns(serving, engine, device, dtype, name, is_causal):
    rows, keys = rows_for(engine, 300), 900
    pattern = PATTERNS[name](rows, keys, device)
    common = {"is_causal": is_causal, "sink_logits": torch.randn(4, device=device)}
    check(serving, device, Shape(2, 4, 2, rows, keys, 64), dtype, pattern, **common)


@pytest.mark.parametrize(
    "head_dim, value_dim", [(64, 64), (128, 128), (72, 72), (128, 64), (64, 96)]
)
@pytest.mark.parametrize("rows, keys", [(100, 3000), (2000, 2100)])
def test_sizes(serving, engine, device, rows, keys, head_dim, value_dim):
    shape = Shape(1, 2, 1, rows_for(engine, rows), keys, head_dim, Dv=value_dim)
    check(serving, device, shape, torch.bfloat16, sa.Full(), is_causal=True)


@pytest.mark.parametrize("page_size, layout", [(16, "interleaved"), (64, "separate")])
@pytest.mark.parametrize("name", ["full", "band-sinks", "band", "blocks"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192])
@pytest.mark.parametrize("rows", [40, 520])
def test_pages_have_the_bits_of_contiguous_keys(
    serving, engine, device, rows, head_dim, name, page_size, layout
):
    rows = rows_for(engine, rows)
    ragged = Ragged((rows,) * 2, (2300, 700), 4, 2, head_dim)
    made = [
        (query, key.to(FLOAT8), value.to(FLOAT8))
        for query, key, value in ragged.sequences(device, torch.bfloat16)
    ]
    queries, keys, values = zip(*made, strict=True)
    pages = make_pages(keys, values, page_size, layout)
    pattern = PATTERNS[name](rows, 2300, device)
    scales = scales_for(2, 2, device)
    out, lse = serving(
        sa.paged_attention,
        *(torch.cat(queries), pages.key, pages.value, pages.table, pages.used),
        pattern=pattern,
        is_causal=True,
        return_lse=True,
        **scales,
    )
    for b, call in enumerate(made):
        own = {name: scale[b] for name, scale in scales.items()}
        mine = alone(pattern, b, rows, ragged.keys[b])
        want = serving(sa.sparse_attention, *call, mine, is_causal=True, return_lse=True, **own)
        assert torch.equal(out[b : b + 1], want[0]) and torch.equal(lse[b : b + 1], want[1])


def test_packed_keys_have_the_bits_of_calls_of_their_own(serving, engine, device):
    lengths = tuple(rows_for(engine, rows) for rows in (1, 700, 0, 129, 300))
    ragged = Ragged(lengths, lengths, 4, 2, 128)
    made = [
        (query, key.to(FLOAT8), value.to(FLOAT8))
        for query, key, value in ragged.sequences(device, torch.bfloat16)
    ]
    query, key, value = (
        torch.cat([t[0].transpose(0, 1) for t in part]) for part in zip(*made, strict=True)
    )
    starts = ragged.starts(device, lengths)
    given = {"is_causal": True, "key_scale": torch.full((), 0.7, device=device)}
    bounds = (starts, starts, max(lengths), max(lengths))
    out = serving(sa.varlen_attention, query, key, value, *bounds, **given)
    for part, call in zip(split(out, lengths), made, strict=True):
        assert torch.equal(part, serving(sa.fused_attention, *call, **given))


@pytest.mark.parametrize("batch, heads", [(2, 10), (3, 4), (9, 1)])
def test_a_large_cache_has_the_bits_of_its_heads(serving, engine, device, batch, heads):
    """On a GPU larger than what is laid out at once, so that calls are cut into sections."""
    keys = 500 if device == "cpu" else 1 << 16
    rows = rows_for(engine, 140)
    query = torch.randn(batch, 2 * heads, rows, 128, device=device, dtype=torch.bfloat16)
    codes = torch.randint(0, 120, (2, batch, heads, keys, 128), dtype=torch.uint8, device=device)
    key, value = codes.view(FLOAT8)
    scales = scales_for(batch, heads, device)
    scales["key_scale"] *= 1e-3
    offsets = torch.randint(200, keys - rows, (batch,), dtype=torch.int32, device=device)
    sink_logits = torch.randn(2 * heads, device=device)
    common = {"is_causal": True, "return_lse": True}
    pattern = sa.Band((200, 0), sinks=4)
    given = {"query_offset": offsets, "sink_logits": sink_logits, **scales, **common}
    out, lse = serving(sa.sparse_attention, query, key, value, pattern, **given)
    for b, h in ((0, 0), (batch - 1, heads - 1), (batch - 1, 0), (0, heads - 1)):
        mine = slice(2 * h, 2 * h + 2)
        own = {name: scale[b, h] for name, scale in scales.items()}
        own |= {"query_offset": offsets[b : b + 1], "sink_logits": sink_logits[mine], **common}
        tensors = (query[b : b + 1, mine], key[b : b + 1, h : h + 1], value[b : b + 1, h : h + 1])
        want = serving(sa.sparse_attention, *tensors, pattern, **own)
        assert torch.equal(out[b : b + 1, mine], want[0])
        assert torch.equal(lse[b : b + 1, mine], want[1])


@pytest.mark.sanitizer
def test_wild_tables_read_nothing_outside(serving, engine, device):
    rows = rows_for(engine, 200)
    query = torch.randn(2, 4, rows, 64, device=device, dtype=torch.float16)
    caches = torch.randn(2, 5, 32, 2, 64, device=device).to(FLOAT8)
    table = torch.randint(-(2**31), 2**31 - 1, (2, 8), dtype=torch.int64).int().to(device)
    used = torch.tensor([250, 2**31 - 1], dtype=torch.int32, device=device)
    with malformed(device, r"seqused_k\[1\] from 0 to 256, the keys it has room for"):
        call, out = (query, *caches, table, used), torch.full_like(query, torch.nan)
        serving(sa.paged_attention, *call, is_causal=True, out=out)
        assert torch.isfinite(out.cpu()).all()

"""paged_attention: the bits of contiguous keys, wherever pages lie and whatever the rest holds."""

from contextlib import nullcontext

import pytest
import torch
from engines import main_dtype
from ragged import (
    RAGGED,
    RAGGED_PATTERNS,
    Ragged,
    Serving,
    alone,
    assert_same,
    make_pages,
    malformed,
    packed,
    ragged_for,
    split,
    split_lse,
    watched,
)
from reference import DTYPES

import sparse_attn as sa

#: Few queries on many keys, as in decode.
FEW = Ragged((1, 1, 1, 1), (400, 37, 1025, 5), 8, 2, 64)


@pytest.fixture
def paged(device, engine):
    """paged_attention with the engine under test; skips where that does not serve the call."""

    serving = Serving(device, engine)
    return lambda *args, **common: serving(sa.paged_attention, *args, **common)


def run(paged, ragged, sequences, device, pages, pattern, **common):
    """The outputs and lse of each sequence, from one call with packed queries."""
    query = packed([q for q, _, _ in sequences], gap=3)
    starts = ragged.starts(device, ragged.rows)
    out, lse = paged(
        query,
        *(pages.key, pages.value, pages.table, pages.used),
        cu_seq_q=starts,
        max_q=ragged.bound(9),
        pattern=pattern,
        return_lse=True,
        **common,
    )
    assert out.shape == (*query.shape[:2], pages.value.shape[3])
    assert lse.shape == (ragged.Hq, len(query))
    return zip(split(out, ragged.rows), split_lse(lse, ragged.rows), strict=True)


def pages_of(sequences, page_size, layout="separate"):
    _, keys, values = zip(*sequences, strict=True)
    return make_pages(keys, values, page_size, layout)


@pytest.mark.parametrize("page_size, layout", [(16, "interleaved"), (48, "separate")])
@pytest.mark.parametrize("name", RAGGED_PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_pages_have_the_bits_of_contiguous_keys(
    paged, engine, device, dtype, name, page_size, layout
):
    ragged = ragged_for(engine)
    pattern = RAGGED_PATTERNS[name](max(ragged.rows), max(ragged.keys), device)
    sequences = ragged.sequences(device, dtype)
    common = {"is_causal": True, "sink_logits": torch.randn(ragged.Hq, device=device)}
    pages = pages_of(sequences, page_size, layout)
    parts = run(paged, ragged, sequences, device, pages, pattern, **common)
    for b, (part, sequence) in enumerate(zip(parts, sequences, strict=True)):
        own = alone(pattern, b, ragged.rows[b], ragged.keys[b])
        want = sa.sparse_attention(*sequence, own, engine=engine, return_lse=True, **common)
        assert_same(part, want)


@pytest.mark.parametrize("value_dim", [32, 128])
@pytest.mark.parametrize("layout", ["separate", "interleaved"])
@pytest.mark.parametrize("float8", [False, True], ids=["half", "float8"])
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_value_head_dims(paged, engine, device, rows, float8, layout, value_dim):
    ragged = Ragged((rows,) * 4, FEW.keys, FEW.Hq, FEW.Hkv, FEW.D, value_dim)
    sequences = ragged.sequences(device, torch.bfloat16)
    if float8:
        kind = torch.float8_e4m3fn
        sequences = [(q, k.to(kind), v.to(kind)) for q, k, v in sequences]
    pages = pages_of(sequences, 48, layout)
    query = torch.cat([q for q, _, _ in sequences])
    caches = (pages.key, pages.value, pages.table, pages.used)
    for pattern in (sa.Full(), sa.Band((300, 0), sinks=4)):
        out, lse = paged(query, *caches, pattern=pattern, return_lse=True)
        for b, sequence in enumerate(sequences):
            want = sa.sparse_attention(*sequence, pattern, engine=engine, return_lse=True)
            assert_same((out[b : b + 1], lse[b : b + 1]), want)


@pytest.mark.parametrize("layout", ["separate", "interleaved"])
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_queries_of_one_length(paged, engine, device, dtype, rows, page_size, layout):
    ragged = Ragged((rows,) * 4, FEW.keys, FEW.Hq, FEW.Hkv, FEW.D)
    sequences = ragged.sequences(device, dtype)
    pages = pages_of(sequences, page_size, layout)
    query = torch.cat([q for q, _, _ in sequences])
    caches = (pages.key, pages.value, pages.table, pages.used)
    pattern = sa.Band((300, 0), sinks=4)
    out, lse = paged(query, *caches, pattern=pattern, return_lse=True)
    for b, sequence in enumerate(sequences):
        want = sa.sparse_attention(*sequence, pattern, engine=engine, return_lse=True)
        assert_same((out[b : b + 1], lse[b : b + 1]), want)


@pytest.mark.parametrize("name", [n for n in RAGGED_PATTERNS if n != "blocks-of-all"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_decode_with_every_pattern(paged, engine, device, dtype, name):
    pattern = RAGGED_PATTERNS[name](1, max(FEW.keys), device)
    sequences = FEW.sequences(device, dtype)
    pages = pages_of(sequences, 32)
    parts = run(paged, FEW, sequences, device, pages, pattern, is_causal=True)
    for b, (part, sequence) in enumerate(zip(parts, sequences, strict=True)):
        own = alone(pattern, b, 1, FEW.keys[b])
        want = sa.sparse_attention(*sequence, own, engine=engine, return_lse=True, is_causal=True)
        assert_same(part, want)


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("pattern", [sa.Full(), sa.Band((300, 0), sinks=4)], ids=["full", "band"])
def test_the_engine_of_auto_is_that_of_contiguous_keys(device, pattern, page_size):
    ragged = Ragged((600, 600), (2300, 700), 4, 2, 128)
    sequences = ragged.sequences(device, torch.float32 if device == "cpu" else torch.bfloat16)
    pages = pages_of(sequences, page_size)
    query = torch.cat([q for q, _, _ in sequences])
    caches = (pages.key, pages.value, pages.table, pages.used)
    given = {"pattern": pattern, "is_causal": True, "return_lse": True}
    out, lse = sa.paged_attention(query, *caches, **given)
    for b, sequence in enumerate(sequences):
        assert_same((out[b : b + 1], lse[b : b + 1]), sa.sparse_attention(*sequence, **given))


def test_shared_prefix_pages(paged, engine, device):
    ragged = Ragged((5, 7), (64, 64), 4, 2, 64)
    (first, (query, *_)) = ragged.sequences(device, main_dtype(device, engine))
    pages = pages_of([first], 16)
    table = pages.table[:1].repeat(2, 1)
    used = torch.tensor([64, 48], dtype=torch.int32, device=device)
    shared = type(pages)(pages.key, pages.value, table, used)
    sequences = [first, (query, first[1][:, :, :48], first[2][:, :, :48])]
    parts = run(paged, ragged, sequences, device, shared, sa.Full(), is_causal=True)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.fused_attention(*sequence, is_causal=True, engine=engine, return_lse=True)
        assert_same(part, want)


def test_a_prefill_in_chunks_is_the_prefill(paged, engine, device):
    ragged = Ragged((200,), (200,), 4, 2, 64)
    ((query, key, value),) = ragged.sequences(device, torch.float32)
    pages = make_pages([key], [value], 16)
    whole = sa.fused_attention(query, key, value, is_causal=True, engine="naive")
    for begin, end in ((0, 64), (64, 65), (65, 200)):
        used = torch.tensor([end], dtype=torch.int32, device=device)
        out = paged(
            query[:, :, begin:end], pages.key, pages.value, pages.table, used, is_causal=True
        )
        torch.testing.assert_close(out, whole[:, :, begin:end])


@pytest.mark.parametrize("used", [[-5, 10**6, 2**31 - 1, -(2**31)], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("entry", watched([None, -1, 10**6, 2**31 - 1, -(2**31)], None, 2**31 - 1))
def test_malformed_tables_stay_inside_the_caches(paged, device, entry, used):
    sequences = FEW.sequences(device, torch.float16)
    pages = pages_of(sequences, 64)
    table = pages.table if entry is None else torch.full_like(pages.table, entry)
    wrong = torch.tensor(used, dtype=torch.int32, device=device)
    query = torch.cat([q for q, _, _ in sequences])
    out = torch.full_like(query, torch.nan)
    with malformed(device, r"seqused_k\[0\] from 0 to \d+") if any(used) else nullcontext():
        assert paged(query, pages.key, pages.value, table, wrong, out=out) is out
        assert (out.cpu()[wrong.cpu() <= 0] == 0).all()
    with malformed(device, r"block_table\[0, 0\] to name one") if entry else nullcontext():
        paged(query, pages.key, pages.value, table, pages.used)
    again = torch.full_like(query, torch.nan)
    paged(query, pages.key, pages.value, pages.table, pages.used, out=again)
    assert torch.isfinite(again.cpu()).all()


def test_tables_and_lengths_of_64_bits(paged, device):
    sequences = FEW.sequences(device, torch.float16)
    pages = pages_of(sequences, 64)
    query = torch.cat([q for q, _, _ in sequences])
    want = paged(query, pages.key, pages.value, pages.table, pages.used)
    got = paged(query, pages.key, pages.value, pages.table.long(), pages.used.long())
    assert torch.equal(got, want)


@pytest.mark.parametrize("pages, width", [(0, 3), (4, 0)], ids=["no-pages", "no-entries"])
def test_caches_without_keys(paged, engine, device, pages, width):
    dtype = main_dtype(device, engine)
    query = torch.randn(2, 2, 3, 16, device=device).to(dtype)
    cache = torch.randn(pages, 16, 1, 16, device=device).to(dtype)
    table = torch.zeros(2, width, dtype=torch.int32, device=device)
    used = torch.tensor([5, 9], dtype=torch.int32, device=device)
    with malformed(device, r"seqused_k\[0\] from 0 to 0, the keys it has room for, got 5"):
        out, lse = paged(query, cache, cache, table, used, return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all()
    out, lse = paged(query, cache, cache, table, 0 * used, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


WRONG = {
    "cache": ({"key_cache": lambda t: t[0]}, r"key_cache of shape \(pages, page_size, heads, he"),
    "page": (
        {"key_cache": lambda t: t[:, :40]},
        "key_cache with a page_size that is a multiple of",
    ),
    "table-shape": ({"block_table": lambda t: t[1:]}, r"block_table of shape \(4, 19\)"),
    "table-dim": ({"block_table": lambda t: t[0]}, r"block_table of shape \(batch, pages of a"),
    "used": ({"seqused_k": lambda t: t[1:]}, r"seqused_k of shape \(4\), got shape \(3\)"),
    "bound": ({"max_q": lambda _: 3}, "max_q beside cu_seq_q alone, got no cu_seq_q"),
    "query": ({"query": lambda t: t[0]}, r"query of shape \(batch, heads, length, head_dim\)"),
    "packed": (
        {"query": lambda t: t[:, :, 0]},
        "query of shape .*; packed queries .* come with cu_seq_q and max_q",
    ),
    "value": (
        {"value_cache": lambda t: t[:, :, :1]},
        r"value_cache of shape \(\d+, (\d+), 2, \d+\), got shape \(\d+, \1, 1, ",
    ),
    "dtype": (
        {"key_cache": lambda t: t.to(torch.complex64)},
        "key_cache of dtype float32, float16, bfloat16 or float8_e4m3fn, got complex64",
    ),
    "value-dtype": (
        {"value_cache": lambda t: t.float()},
        "value_cache of key_cache's dtype float16, got float32",
    ),
    "head-dim": (
        {"key_cache": lambda t: t[..., :8]},
        r"key_cache of shape \(pages, page_size, heads, 64\) as query has it, got .* 8\)",
    ),
}


@pytest.mark.parametrize("change, sentence", WRONG.values(), ids=WRONG)
def test_wrong_calls(device, change, sentence):
    sequences = FEW.sequences(device, torch.float16)
    pages = pages_of(sequences, 64)
    call = {"query": torch.cat([q for q, _, _ in sequences]), "key_cache": pages.key}
    call |= {"value_cache": pages.value, "block_table": pages.table, "seqused_k": pages.used}
    ((name, make),) = change.items()
    call[name] = make(call.get(name))
    with pytest.raises(ValueError, match=f"^sparse_attn::paged: expected {sentence}"):
        sa.paged_attention(**call)


def test_packed_queries_need_a_bound(device):
    sequences = RAGGED.sequences(device, torch.float32)
    pages = pages_of(sequences, 16)
    query, starts = packed([q for q, _, _ in sequences]), RAGGED.starts(device, RAGGED.rows)
    caches = (pages.key, pages.value, pages.table, pages.used)
    with pytest.raises(ValueError, match="paged: expected max_q beside cu_seq_q, got None"):
        sa.paged_attention(query, *caches, cu_seq_q=starts)


def test_opcheck(device):
    sequences = FEW.sequences(device, torch.float16)
    pages = pages_of(sequences, 16)
    query = torch.cat([q for q, _, _ in sequences])
    caches = (pages.key.nan_to_num(), pages.value.nan_to_num(), pages.table, pages.used)
    given = {"left": 9, "right": 0, "return_lse": True}
    torch.library.opcheck(torch.ops.sparse_attn.paged.default, (query, *caches), given)
    given = {"out": torch.empty_like(query)}
    torch.library.opcheck(torch.ops.sparse_attn.paged_out.default, (query, *caches), given)

"""Sequences of many tiles, packed and in pages: the bits of calls of their own."""

import pytest
import torch
from ragged import Ragged, Serving, alone, make_pages, packed, split, split_lse

import sparse_attn as sa

#: Ends off every tile's edge; the last sequence is long, so that tiles of others come before it.
ROWS, KEYS = (1, 300, 129, 0, 70, 400), (500, 300, 65, 40, 0, 701)


def layout_for(block_q, block_kv):
    """Makes a random layout for all sequences."""

    def make(device):
        blocks = -(-max(ROWS) // block_q), -(-max(KEYS) // block_kv)
        mask = torch.rand((1, 1, *blocks), device=device) < 0.5
        return sa.BlockSparse(sa.BlockLayout.from_mask(mask, block_q, block_kv))

    return make


PATTERNS = {
    "full": lambda device: sa.Full(),
    "band": lambda device: sa.Band((200, 30)),
    "band-sinks": lambda device: sa.Band((150, 0), sinks=5),
    "dilated": lambda device: sa.Dilated((60, 5), 3),
    "dilated-sinks": lambda device: sa.Dilated((60, 5), 3, sinks=70),
    "blocks-128-64": layout_for(128, 64),
    "blocks-128-16": layout_for(128, 16),
    "blocks-64-32": layout_for(64, 32),
}


@pytest.fixture
def ragged(engine):
    most = 16 if engine == "decode" else max(ROWS)
    return Ragged(tuple(min(rows, most) for rows in ROWS), KEYS, 2, 1)


@pytest.fixture
def serving(device, engine):
    return Serving(device, engine)


def with_head_dim(ragged, head_dim):
    return Ragged(ragged.rows, ragged.keys, ragged.Hq, ragged.Hkv, head_dim)


def assert_own_bits(out, lse, ragged, sequences, pattern, **common):
    """Every sequence has the bits of a contiguous call of its own."""
    parts = zip(split(out, ragged.rows), split_lse(lse, ragged.rows), strict=True)
    for b, (part, sequence) in enumerate(zip(parts, sequences, strict=True)):
        own = alone(pattern, b, ragged.rows[b], ragged.keys[b])
        want = sa.sparse_attention(*sequence, own, return_lse=True, **common)
        for mine, other in zip(part, want, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_packed(serving, engine, device, dtype, head_dim, name, is_causal, ragged):
    ragged, pattern = with_head_dim(ragged, head_dim), PATTERNS[name](device)
    sequences = ragged.sequences(device, dtype)
    query, key, value = (packed(list(parts), gap=40) for parts in zip(*sequences, strict=True))
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    bounds = (ragged.bound(500), max(ragged.keys) + 70)
    common = {"is_causal": is_causal, "sink_logits": torch.randn(ragged.Hq, device=device)}
    given = {"out": torch.full_like(query, 7.0), "return_lse": True, "pattern": pattern}
    tensors = (query, key, value, *starts, *bounds)
    out, lse = serving(sa.varlen_attention, *tensors, **given, **common)
    assert (out[sum(ragged.rows) :] == 7).all()
    assert_own_bits(out, lse, ragged, sequences, pattern, engine=engine, **common)


@pytest.mark.parametrize(
    "page_size, layout", [(16, "interleaved"), (48, "separate"), (256, "separate")]
)
@pytest.mark.parametrize("name", [name for name in PATTERNS if "dilated" not in name])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16], ids=["fp16"])
def test_paged(serving, engine, device, dtype, head_dim, name, page_size, layout, ragged):
    ragged, pattern = with_head_dim(ragged, head_dim), PATTERNS[name](device)
    sequences = ragged.sequences(device, dtype)
    queries, keys, values = zip(*sequences, strict=True)
    pages = make_pages(keys, values, page_size, layout)
    common = {"is_causal": True, "sink_logits": torch.randn(ragged.Hq, device=device)}
    out, lse = serving(
        sa.paged_attention,
        packed(list(queries)),
        *(pages.key, pages.value, pages.table, pages.used),
        cu_seq_q=ragged.starts(device, ragged.rows),
        max_q=ragged.bound(9),
        pattern=pattern,
        return_lse=True,
        **common,
    )
    assert_own_bits(out, lse, ragged, sequences, pattern, engine=engine, **common)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [48, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16], ids=["fp16"])
def test_self_attention(serving, engine, device, dtype, head_dim, is_causal):
    """One tensor says where queries and keys begin, as in a prefill or a vision model."""
    most = 16 if engine == "decode" else 4000
    lengths = tuple(min(length, most) for length in (1, 2500, 0, 129, 600, 64))
    ragged = Ragged(lengths, lengths, 2, 1, head_dim)
    sequences = ragged.sequences(device, dtype)
    tensors = [packed(list(parts)) for parts in zip(*sequences, strict=True)]
    starts = ragged.starts(device, lengths)
    common = {"is_causal": is_causal, "engine": engine}
    out, lse = serving(
        sa.varlen_attention,
        *tensors,
        *(starts, starts, ragged.bound(100), ragged.bound(100)),
        return_lse=True,
        is_causal=is_causal,
    )
    assert_own_bits(out, lse, ragged, sequences, sa.Full(), **common)


@pytest.mark.parametrize("heads", [2, 16], ids=["few-readers", "many-readers"])
@pytest.mark.parametrize("pattern", [sa.Full(), sa.Band((300, 0), sinks=5)], ids=["full", "band"])
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_a_long_chunk_on_pages(serving, engine, device, dtype, pattern, heads):
    """Queries of one length, more than are few, on caches of many pages."""
    rows = 16 if engine == "decode" else 520
    ragged = Ragged((rows,) * 2, (2300, 700), heads, 2 if heads > 2 else 1, 64)
    sequences = ragged.sequences(device, dtype)
    queries, keys, values = zip(*sequences, strict=True)
    pages = make_pages(keys, values, 32)
    caches = (pages.key, pages.value, pages.table, pages.used)
    out, lse = serving(
        sa.paged_attention,
        *(torch.cat(queries), *caches),
        pattern=pattern,
        is_causal=True,
        return_lse=True,
    )
    for b, sequence in enumerate(sequences):
        given = {"is_causal": True, "engine": engine, "return_lse": True}
        want = sa.sparse_attention(*sequence, pattern, **given)
        assert torch.equal(out[b : b + 1], want[0]) and torch.equal(lse[b : b + 1], want[1])


@pytest.mark.parametrize("holding", ["varlen", "paged"])
def test_a_graph_follows_lengths_and_tables(serving, device, engine, holding, ragged):
    """Captured once, a call serves the lengths and pages that lie in its tensors at each replay."""
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    dtype = torch.float16
    pattern, common = sa.Band((150, 0), sinks=5), {"is_causal": True}
    sequences = ragged.sequences(device, dtype)
    queries, keys, values = zip(*sequences, strict=True)
    query, starts = packed(list(queries)), ragged.starts(device, ragged.rows)
    starts_k = ragged.starts(device, ragged.keys)
    pages = make_pages(keys, values, 16)
    bounds = (max(ragged.rows), max(ragged.keys))

    def call():
        if holding == "varlen":
            tensors = (query, packed_key, packed_value, starts, starts_k, *bounds)
            return serving(sa.varlen_attention, *tensors, pattern=pattern, **common)
        caches = (pages.key, pages.value, pages.table, pages.used)
        given = {"cu_seq_q": starts, "max_q": bounds[0], "pattern": pattern, **common}
        return serving(sa.paged_attention, query, *caches, **given)

    packed_key, packed_value = packed(list(keys)), packed(list(values))
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for shift in (0, 1, 2):
        order = [(b + shift) % ragged.batch for b in range(ragged.batch)]
        turned = Ragged(
            tuple(ragged.rows[b] for b in order), tuple(ragged.keys[b] for b in order), 2, 1
        )
        query.copy_(packed([queries[b] for b in order]))
        starts.copy_(turned.starts(device, turned.rows))
        starts_k.copy_(turned.starts(device, turned.keys))
        packed_key.copy_(packed([keys[b] for b in order]))
        packed_value.copy_(packed([values[b] for b in order]))
        pages.table.copy_(pages.table.roll(-min(shift, 1), 0))
        pages.used.copy_(pages.used.roll(-min(shift, 1), 0))
        graph.replay()
        for part, b in zip(split(out, turned.rows), order, strict=True):
            want = sa.sparse_attention(*sequences[b], pattern, engine=engine, **common)
            assert torch.equal(part, want)

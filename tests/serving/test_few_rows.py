"""Few rows on long caches, packed and in pages: an engine may share the keys of a sequence out to
thread blocks, which changes no bit of what a call of its own gives."""

import pytest
import torch
from engines import main_dtype
from ragged import Ragged, Serving, make_pages, malformed, packed, split, split_lse

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

#: Rows and keys of sequences: alone, alike, so many that most tiles stay whole, of all lengths,
#: with more rows than are few, and on so few keys that heads share tiles which nothing splits.
BATCHES = {
    "one": ((17,), (5000,)),
    "four-alike": ((64,) * 4, (3000,) * 4),
    "many": ((40,) * 33, (1100,) * 33),
    "of-all-lengths": ((33, 1, 0, 50, 64, 17, 20), (9000, 700, 30, 1024, 2500, 20, 0)),
    "one-is-long": ((100, 300, 17, 512, 128), (2100, 2500, 9000, 3000, 15)),
    "beside-many-rows": ((900, 20, 70), (900, 9000, 4000)),
    "short": ((16, 9, 1, 12, 0) * 9, (300, 41, 7, 500, 90) * 9),
    "short-of-64": ((64, 40, 17) * 11, (300, 500, 64) * 11),
}
#: A pattern, and whether the call is causal.
CASES = {
    "full": (sa.Full(), False),
    "causal": (sa.Full(), True),
    "band": (sa.Band((1700, 0)), True),
    "both-sides": (sa.Band((3000, 40)), False),
}
#: Query heads and key heads.
HEADS = {"alone": (3, 3), "group": (10, 2)}


@pytest.fixture
def serving(device, engine):
    return Serving(device, engine)


def make(name, heads, engine, device, head_dim=64, value_dim=None):
    """A batch; shorter on the CPU, which shares nothing out."""
    rows, keys = BATCHES[name]
    if engine == "decode":
        rows = tuple(min(n, 16) for n in rows)
    if device == "cpu":
        rows, keys = (tuple(-(-n // 6) for n in lengths) for lengths in (rows, keys))
    return Ragged(rows, keys, *HEADS[heads], head_dim, value_dim)


def call(serving, ragged, sequences, holding, **common):
    """One call, with bounds above all lengths."""
    queries, keys, values = zip(*sequences, strict=True)
    starts = [ragged.starts(queries[0].device, n) for n in (ragged.rows, ragged.keys)]
    query = packed(list(queries), gap=3)
    most = max(ragged.rows)
    bound = most if most in (16, 64, 512) else ragged.bound(3)
    if holding == "packed":
        tensors = (query, packed(list(keys), gap=200), packed(list(values), gap=200), *starts)
        return serving(sa.varlen_attention, *tensors, bound, max(ragged.keys) + 300, **common)
    pages = make_pages(keys, values, int(holding))
    caches = (pages.key, pages.value, pages.table, pages.used)
    given = {"cu_seq_q": starts[0], "max_q": bound, **common}
    return serving(sa.paged_attention, query, *caches, **given)


def assert_own_bits(result, ragged, sequences, **common):
    """Every sequence has the bits of a contiguous call of its own."""
    parts = zip(split(result[0], ragged.rows), split_lse(result[1], ragged.rows), strict=True)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.sparse_attention(*sequence, **common)
        for mine, other in zip(part, want, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("holding", ["packed", "48", "256"])
@pytest.mark.parametrize("batch", BATCHES)
def test_bits_of_own_calls(serving, engine, device, batch, holding, heads, case):
    ragged = make(batch, heads, engine, device)
    sequences = ragged.sequences(device, main_dtype(device, engine))
    pattern, is_causal = CASES[case]
    common = {
        "pattern": pattern,
        "is_causal": is_causal,
        "sink_logits": torch.randn(ragged.Hq, device=device),
        "return_lse": True,
    }
    result = call(serving, ragged, sequences, holding, **common)
    assert_own_bits(result, ragged, sequences, engine=engine, **common)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("holding", ["packed", "48"])
def test_hundreds_of_sequences(serving, engine, device, holding, heads):
    """More than the kernel that sorts them holds at once."""
    ragged = Ragged((16, 3) * 300, (100, 41, 7) * 200, *HEADS[heads], 64)
    sequences = ragged.sequences(device, main_dtype(device, engine))
    common = {"pattern": sa.Full(), "is_causal": True, "return_lse": True}
    result = call(serving, ragged, sequences, holding, **common)
    assert_own_bits(result, ragged, sequences, engine=engine, **common)


#: Where sequences begin, of 300 queries or 9000 keys.
MALFORMED = {
    "decreasing": [0, 250, 20, 260, 10, 300],
    "negative": [-7, -3, 4, 4, -20, 300],
    "beyond": [0, 3, 50000, 2**31 - 1, -(2**31), 2**31 - 1],
    "overlapping": [0, 300, 0, 300, 0, 300],
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("which", ["queries", "keys", "used"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_lengths_stay_inside_the_tensors(serving, engine, device, name, which, heads):
    """Also where they have more query tiles than there is room for."""
    scale = 1 if device == "cuda" else 10
    most = 16 if engine == "decode" else 60
    ragged = Ragged(
        (most,) * 5, tuple(n // scale for n in (1800, 100, 5000, 1700, 400)), *HEADS[heads], 64
    )
    sequences = ragged.sequences(device, main_dtype(device, engine))
    query, key, value = (packed(list(parts)) for parts in zip(*sequences, strict=True))
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    bounds = (most, 9000 // scale)
    wrong = torch.tensor(MALFORMED[name], dtype=torch.int32, device=device)
    given = list(starts)
    used = wrong[:5] if which == "used" else None
    if which != "used":
        given[which == "keys"] = wrong
    guarded = torch.full((len(query) + 2, *query.shape[1:]), 7.0, device=device, dtype=query.dtype)
    own = {"is_causal": True, "return_lse": True}
    names = {"queries": "cu_seq_q", "keys": "cu_seq_k", "used": "seqused_k"}
    with malformed(device, rf"{names[which]}[\[ ]|max_q of|max_k of"):
        serving(
            sa.varlen_attention,
            query,
            key,
            value,
            *given,
            *bounds,
            seqused_k=used,
            out=guarded[1:-1],
        )
    assert (guarded[[0, -1]] == 7).all()
    result = serving(sa.varlen_attention, query, key, value, *starts, *bounds, **own)
    assert_own_bits(result, ragged, sequences, engine=engine, pattern=sa.Full(), **own)


@pytest.mark.parametrize("which", ["queries", "used"])
def test_malformed_lengths_of_many_short_sequences(serving, engine, device, which):
    """Whose tiles are dealt whole, without room for parts of one."""
    ragged = Ragged((16, 9, 12) * 12, (90, 41, 70) * 12, 10, 2, 64)
    sequences = ragged.sequences(device, main_dtype(device, engine))
    queries, keys, values = zip(*sequences, strict=True)
    query, starts = packed(list(queries)), ragged.starts(device, ragged.rows)
    pages = make_pages(keys, values, 48)
    wild = torch.randint(-(2**31), 2**31 - 1, (ragged.batch,), dtype=torch.int64).int().to(device)
    given = {"cu_seq_q": starts.flip(0) if which == "queries" else starts, "max_q": 16}
    used = wild if which == "used" else pages.used
    guarded = torch.full((len(query) + 2, *query.shape[1:]), 7.0, device=device, dtype=query.dtype)
    caches = (pages.key, pages.value, pages.table)
    with malformed(device, r"cu_seq_q[\[ ]|seqused_k\["):
        serving(sa.paged_attention, query, *caches, used, **given, out=guarded[1:-1])
    assert (guarded[[0, -1]] == 7).all()
    own = {"is_causal": True, "return_lse": True}
    given["cu_seq_q"] = starts
    result = serving(sa.paged_attention, query, *caches, pages.used, **given, **own)
    assert_own_bits(result, ragged, sequences, engine=engine, pattern=sa.Full(), **own)


@pytest.mark.parametrize(
    "head_dim, value_dim",
    [(72, 72), (96, 96), (128, 128), (128, 64), (160, 160), (192, 128), (208, 208), (256, 256)],
)
@pytest.mark.parametrize("holding", ["packed", "64"])
@pytest.mark.parametrize("batch", ["one", "of-all-lengths", "one-is-long"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_head_dims(serving, engine, device, dtype, batch, holding, head_dim, value_dim):
    ragged = make(batch, "group", engine, device, head_dim, value_dim)
    sequences = ragged.sequences(device, dtype)
    common = {"pattern": sa.Full(), "is_causal": True, "return_lse": True}
    result = call(serving, ragged, sequences, holding, **common)
    assert_own_bits(result, ragged, sequences, engine=engine, **common)
    parts = zip(split(result[0], ragged.rows), split_lse(result[1], ragged.rows), strict=True)
    for part, sequence in zip(parts, sequences, strict=True):
        assert_close_to_reference(part, *sequence, sa.Full(), is_causal=True)


@pytest.mark.parametrize("case", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("holding", ["packed", "64"])
@pytest.mark.parametrize("head_dim", [64, 112, 128])
def test_many_rows_on_many_more_keys(serving, engine, device, head_dim, holding, case):
    """What a chunk of a long prompt sees, beside short sequences."""
    rows, keys = (700, 30, 1100), (17000, 500, 33000)
    if engine == "decode":
        rows = tuple(min(n, 16) for n in rows)
    if device == "cpu":
        rows, keys = (tuple(-(-n // 12) for n in lengths) for lengths in (rows, keys))
    ragged = Ragged(rows, keys, 4, 2, head_dim)
    sequences = ragged.sequences(device, main_dtype(device, engine))
    common = {
        "pattern": sa.Band((keys[0], 0), sinks=4) if case == "sinks" else sa.Full(),
        "is_causal": True,
        "softcap": 30.0 if case == "softcap" else 0.0,
        "return_lse": True,
    }
    result = call(serving, ragged, sequences, holding, **common)
    assert_own_bits(result, ragged, sequences, engine=engine, **common)
    parts = zip(split(result[0], ragged.rows), split_lse(result[1], ragged.rows), strict=True)
    pattern = common.pop("pattern")
    del common["return_lse"]
    for part, sequence in zip(parts, sequences, strict=True):
        assert_close_to_reference(part, *sequence, pattern, **common)


@pytest.mark.parametrize("case", ["softcap", "sinks", "global-rows", "dilated"])
@pytest.mark.parametrize("holding", ["packed", "64"])
@pytest.mark.parametrize("batch", ["one-is-long", "beside-many-rows"])
@pytest.mark.parametrize("head_dim", [80, 128, 192, 256])
def test_calls_that_are_not_shared_out(serving, engine, device, head_dim, batch, holding, case):
    """A thread block takes all chunks of a tile in turn."""
    patterns = {
        "sinks": sa.Band((1700, 0), sinks=4),
        "global-rows": sa.Band((200, 200), global_tokens=5),
        "dilated": sa.Dilated(700, 3),
    }
    common = {
        "pattern": patterns.get(case, sa.Full()),
        "is_causal": case in ("softcap", "sinks"),
        "softcap": 30.0 if case == "softcap" else 0.0,
        "return_lse": True,
    }
    ragged = make(batch, "group", engine, device, head_dim)
    sequences = ragged.sequences(device, main_dtype(device, engine))
    result = call(serving, ragged, sequences, holding, **common)
    assert_own_bits(result, ragged, sequences, engine=engine, **common)


@pytest.mark.parametrize("head_dim", [64, 96, 208])
@pytest.mark.parametrize("holding", ["packed", "16"])
def test_positions_of_each_sequence(serving, engine, device, holding, head_dim):
    """Queries that stand before keys of theirs, and far past them, visit fewer."""
    ragged = make("of-all-lengths", "group", engine, device, head_dim)
    sequences = ragged.sequences(device, main_dtype(device, engine))
    offsets = torch.tensor([4000, 0, 3, 200, 9000, -5, 0], dtype=torch.int32, device=device)
    common = {"pattern": sa.Band((2000, 0)), "is_causal": True, "return_lse": True}
    result = call(serving, ragged, sequences, holding, query_offset=offsets, **common)
    parts = zip(split(result[0], ragged.rows), split_lse(result[1], ragged.rows), strict=True)
    for b, (part, sequence) in enumerate(zip(parts, sequences, strict=True)):
        own = {"query_offset": offsets[b : b + 1], "engine": engine, **common}
        want = sa.sparse_attention(*sequence, **own)
        for mine, other in zip(part, want, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("holding", ["packed", "16"])
@pytest.mark.parametrize("heads", HEADS)
def test_a_graph_follows_lengths(serving, device, engine, heads, holding):
    """Captured once: which sequence is long, and so which is shared out, changes at each replay."""
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    ragged = make("of-all-lengths", heads, engine, device)
    sequences = ragged.sequences(device, torch.float16)
    queries, keys, values = (list(parts) for parts in zip(*sequences, strict=True))
    query, key, value = packed(queries), packed(keys), packed(values)
    starts, starts_k = (ragged.starts(device, n) for n in (ragged.rows, ragged.keys))
    pages = make_pages(keys, values, int(holding)) if holding != "packed" else None
    bounds = (max(ragged.rows), max(ragged.keys))

    def run():
        if pages is None:
            tensors = (query, key, value, starts, starts_k, *bounds)
            return serving(sa.varlen_attention, *tensors, is_causal=True)
        caches = (pages.key, pages.value, pages.table, pages.used)
        given = {"cu_seq_q": starts, "max_q": bounds[0], "is_causal": True}
        return serving(sa.paged_attention, query, *caches, **given)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for shift in (0, 1, 3):
        order = [(b + shift) % ragged.batch for b in range(ragged.batch)]
        rows, lengths = ([n[b] for b in order] for n in (ragged.rows, ragged.keys))
        query.copy_(packed([queries[b] for b in order]))
        starts.copy_(ragged.starts(device, rows))
        starts_k.copy_(ragged.starts(device, lengths))
        key.copy_(packed([keys[b] for b in order]))
        value.copy_(packed([values[b] for b in order]))
        if pages is not None:
            turn = (0, 1, 2)[(0, 1, 3).index(shift)]
            pages.table.copy_(pages.table.roll(-turn, 0))
            pages.used.copy_(pages.used.roll(-turn, 0))
        graph.replay()
        for part, b in zip(split(out, rows), order, strict=True):
            want = sa.fused_attention(*sequences[b], is_causal=True, engine=engine)
            assert torch.equal(part, want)


@pytest.mark.parametrize("case", ["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("holding", ["packed", "16"])
@pytest.mark.parametrize("rows", [8, 9, 16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("keys", [(1100, 1024), (4500, 9000, 5000, 4096)], ids=max)
def test_the_fastest_engine_has_the_bits_of_own_calls(device, keys, head_dim, rows, holding, case):
    """Whichever engine serves 8 to 16 rows of so many keys, it is the same wherever keys lie."""
    keys = keys if device == "cuda" else tuple(n // 30 for n in keys)
    ragged = Ragged((rows,) * len(keys), keys, 8, 2, head_dim)
    sequences = ragged.sequences(device, torch.float16)
    patterns = {"window": sa.Band((1200, 0)), "sinks": sa.Band((1200, 0), sinks=4)}
    common = {"pattern": patterns.get(case, sa.Full()), "is_causal": True, "return_lse": True}
    if case == "softcap":
        common["softcap"] = 30.0
    result = call(Serving(device, "auto"), ragged, sequences, holding, **common)
    assert_own_bits(result, ragged, sequences, **common)


@pytest.mark.parametrize("holding", ["packed", "64"])
def test_the_same_bits_each_time(serving, engine, device, holding):
    ragged = make("of-all-lengths", "group", engine, device)
    sequences = ragged.sequences(device, main_dtype(device, engine))
    common = {"is_causal": True, "return_lse": True}
    torch.manual_seed(5)  # of the pages' places
    first = call(serving, ragged, sequences, holding, **common)
    for _ in range(5):
        again = call(serving, ragged, sequences, holding, **common)
        rows = sum(ragged.rows)
        assert torch.equal(again[0][:rows], first[0][:rows])
        assert torch.equal(again[1][:, :rows], first[1][:, :rows])

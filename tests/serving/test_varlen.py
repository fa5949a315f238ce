"""varlen_attention: every sequence has the bits of a call of its own."""

from dataclasses import replace

import pytest
import torch
from engines import main_dtype
from ragged import (
    RAGGED,
    RAGGED_PATTERNS,
    Ragged,
    Serving,
    alone,
    malformed,
    packed,
    ragged_for,
    split,
    split_lse,
)
from reference import DTYPES

import sparse_attn as sa

#: Patterns that ``auto`` gives to the engine of each sequence alone, on every device.
OF_AUTO = ("full", "band", "band-sinks", "band-globals", "dilated", "dilated-sinks", "strided")


@pytest.fixture
def varlen(device, engine):
    """varlen_attention with the engine under test; skips where that does not serve the call."""
    serving = Serving(device, engine)
    return lambda *args, **common: serving(sa.varlen_attention, *args, **common)


@pytest.fixture
def ragged(engine):
    return ragged_for(engine)


@pytest.fixture
def any_dtype(device, engine):
    """A dtype that the engine serves."""
    return main_dtype(device, engine)


def run(varlen, ragged, sequences, device, pattern, gap=3, slack=50, **common):
    """The outputs and lse of each sequence, from one packed call."""
    query, key, value = (packed(list(parts), gap) for parts in zip(*sequences, strict=True))
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    bounds = (ragged.bound(slack), max(ragged.keys) + slack)
    out, lse = varlen(
        query, key, value, *starts, *bounds, pattern=pattern, return_lse=True, **common
    )
    assert out.shape == (*query.shape[:2], value.shape[2])
    assert lse.shape == (ragged.Hq, len(query))
    return zip(split(out, ragged.rows), split_lse(lse, ragged.rows), strict=True)


def assert_same(got, want):
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", RAGGED_PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sequences_have_the_bits_of_their_own_calls(
    varlen, engine, device, dtype, name, is_causal, ragged
):
    pattern = RAGGED_PATTERNS[name](max(ragged.rows), max(ragged.keys), device)
    sequences = ragged.sequences(device, dtype)
    common = {"is_causal": is_causal, "sink_logits": torch.randn(ragged.Hq, device=device)}
    parts = run(varlen, ragged, sequences, device, pattern, **common)
    for b, (part, sequence) in enumerate(zip(parts, sequences, strict=True)):
        own = alone(pattern, b, ragged.rows[b], ragged.keys[b])
        want = sa.sparse_attention(*sequence, own, engine=engine, return_lse=True, **common)
        assert_same(part, want)


@pytest.mark.parametrize("value_dim", [32, 128])
@pytest.mark.parametrize("name", ["full", "band-globals", "dilated", "blocks", "topk"])
def test_value_head_dims(varlen, engine, device, ragged, any_dtype, name, value_dim):
    ragged = replace(ragged, Dv=value_dim)
    pattern = RAGGED_PATTERNS[name](max(ragged.rows), max(ragged.keys), device)
    sequences = ragged.sequences(device, any_dtype)
    parts = run(varlen, ragged, sequences, device, pattern, is_causal=True)
    for b, (part, sequence) in enumerate(zip(parts, sequences, strict=True)):
        own = alone(pattern, b, ragged.rows[b], ragged.keys[b])
        common = {"engine": engine, "return_lse": True, "is_causal": True}
        assert_same(part, sa.sparse_attention(*sequence, own, **common))


@pytest.mark.parametrize(
    "common", [{"softcap": 5.0}, {"scale": -0.3}, {"query_offset": 4}], ids=str
)
def test_common_arguments(varlen, engine, device, common, ragged, any_dtype):
    sequences = ragged.sequences(device, any_dtype)
    pattern = sa.Band((20, 0), sinks=2)
    parts = run(varlen, ragged, sequences, device, pattern, **common)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.sparse_attention(*sequence, pattern, engine=engine, return_lse=True, **common)
        assert_same(part, want)


def test_positions_and_origins_of_each_sequence(varlen, engine, device, ragged, any_dtype):
    sequences = ragged.sequences(device, any_dtype)
    offsets = torch.tensor([0, 3, 70, -5, 2, 100], dtype=torch.int32, device=device)
    origins = torch.tensor([1, 0, 13, -2, 4, 90], dtype=torch.int32, device=device)
    pattern, common = sa.Band((9, 0), sinks=3), {"is_causal": True}
    parts = run(
        varlen,
        ragged,
        sequences,
        device,
        pattern,
        query_offset=offsets,
        key_origin=origins,
        **common,
    )
    for b, (part, sequence) in enumerate(zip(parts, sequences, strict=True)):
        own = {"query_offset": offsets[b : b + 1], "key_origin": origins[b : b + 1], **common}
        want = sa.sparse_attention(*sequence, pattern, engine=engine, return_lse=True, **own)
        assert_same(part, want)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_used_keys_shorten_each_sequence(varlen, engine, device, dtype, ragged):
    sequences = ragged.sequences(device, dtype)
    used = [4, 0, 97, 64, 0, 16]
    if device != "cpu":
        used[-1] = 40  # more than there are
    parts = run(
        varlen,
        ragged,
        [(q, *(nan_past(t, n) for t in kv)) for (q, *kv), n in zip(sequences, used, strict=True)],
        device,
        sa.Full(),
        is_causal=True,
        seqused_k=torch.tensor(used, dtype=torch.int32, device=device),
    )
    for (q, k, v), n, part in zip(sequences, used, parts, strict=True):
        own = (q, k[:, :, :n], v[:, :, :n])
        want = sa.fused_attention(*own, is_causal=True, engine=engine, return_lse=True)
        assert_same(part, want)


def nan_past(tensor, length):
    tensor = tensor.clone()
    tensor[:, :, length:] = torch.nan
    return tensor


@pytest.mark.parametrize("slack", [0, 1, 1000, 10**6])
def test_larger_bounds_change_no_bit(varlen, device, slack, ragged, any_dtype):
    sequences = ragged.sequences(device, any_dtype)
    parts = run(varlen, ragged, sequences, device, sa.Band((30, 0)), slack=slack)
    wants = run(varlen, ragged, sequences, device, sa.Band((30, 0)), slack=7)
    for part, want in zip(parts, wants, strict=True):
        assert_same(part, want)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("common", [{}, {"softcap": 5.0}], ids=["scaled", "capped"])
@pytest.mark.parametrize("name", [n for n in RAGGED_PATTERNS if n in OF_AUTO])
def test_the_engine_of_auto_is_that_of_each_sequence(device, name, common, head_dim):
    ragged = Ragged((70, 300, 17, 129), (70, 300, 17, 129), 4, 2, head_dim)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sequences = ragged.sequences(device, dtype)
    pattern, common = RAGGED_PATTERNS[name](300, 300, device), {"is_causal": True, **common}
    parts = run(sa.varlen_attention, ragged, sequences, device, pattern, **common)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.sparse_attention(*sequence, pattern, return_lse=True, **common)
        assert_same(part, want)


def test_rows_past_the_last_sequence_are_not_written(varlen, device, ragged, any_dtype):
    sequences = ragged.sequences(device, any_dtype)
    query, key, value = (packed(list(parts), 5) for parts in zip(*sequences, strict=True))
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    out = torch.full_like(query, 7.0)
    assert varlen(query, key, value, *starts, 70, 150, out=out) is out
    assert (out[-5:] == 7).all() and (out[:-5] != 7).any(-1).all()


def test_lengths_a_thousandfold_apart(varlen, engine, device, any_dtype):
    ragged = Ragged((1, 1100, 2, 1), (1100, 1100, 3, 1), 2, 1, 32)
    sequences = ragged.sequences(device, any_dtype)
    parts = run(varlen, ragged, sequences, device, sa.Full(), is_causal=True)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.fused_attention(*sequence, is_causal=True, engine=engine, return_lse=True)
        assert_same(part, want)


@pytest.mark.parametrize("name", ["full", "band", "band-sinks", "dilated", "strided"])
def test_few_rows_on_many_keys(varlen, engine, device, any_dtype, name):
    """An engine may cut the keys of few rows into chunks, as many as the rows and keys ask for."""
    keys = (2500, 6000, 5000, 4000, 4500, 9000, 9)
    ragged = Ragged((1, 33, 64, 100, 200, 300, 2), keys, 4, 2, 64)
    pattern = RAGGED_PATTERNS[name](max(ragged.rows), max(ragged.keys), device)
    sequences = ragged.sequences(device, any_dtype)
    common = {"is_causal": True, "sink_logits": torch.randn(ragged.Hq, device=device)}
    parts = run(varlen, ragged, sequences, device, pattern, **common)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.sparse_attention(*sequence, pattern, engine=engine, return_lse=True, **common)
        assert_same(part, want)


def test_global_rows_on_many_keys(varlen, engine, device, any_dtype):
    """An engine may cut the keys of the few rows that see them all."""
    keys = (200, 4500, 1, 9000)
    rows = (16, 3, 1, 9) if engine == "decode" else keys
    ragged = Ragged(rows, keys, 2, 1, 64)
    sequences, pattern = ragged.sequences(device, any_dtype), sa.Band(130, global_tokens=3)
    parts = run(varlen, ragged, sequences, device, pattern)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.sparse_attention(*sequence, pattern, engine=engine, return_lse=True)
        assert_same(part, want)


@pytest.mark.parametrize("softcap", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_scores_of_the_next_sequence_change_no_bit(
    varlen, engine, device, any_dtype, head_dim, softcap
):
    """A tile's scores may choose how it is capped: those of its own sequence alone."""
    ragged = replace(ragged_for(engine), D=head_dim)
    sequences = ragged.sequences(device, any_dtype)
    sequences = [(q * (0.02 if b % 2 == 0 else 9), k, v) for b, (q, k, v) in enumerate(sequences)]
    parts = run(varlen, ragged, sequences, device, sa.Full(), softcap=softcap)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.fused_attention(*sequence, softcap=softcap, engine=engine, return_lse=True)
        assert_same(part, want)


@pytest.mark.parametrize("rows", [(0, 0), (), (4, 2)], ids=["no-rows", "no-sequences", "no-keys"])
def test_empty_batches(varlen, device, rows):
    ragged = Ragged(rows, tuple(0 for _ in rows), 2, 1, 16)
    query = torch.randn(sum(rows), 2, 16, device=device)
    key = torch.randn(0, 1, 16, device=device)
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    out, lse = varlen(query, key, key, *starts, 4, 0, return_lse=True)
    assert out.shape == query.shape and (out == 0).all() and (lse == -torch.inf).all()


MALFORMED = {
    "decreasing": [0, 50, 20, 60, 10, 5, 112],
    "negative": [-7, -3, 4, 4, 90, -20, 112],
    "beyond": [0, 3, 5000, 2**31 - 1, -(2**31), 7, 2**31 - 1],
}


@pytest.mark.parametrize("which", ["queries", "keys", "used"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_lengths_stay_inside_the_tensors(varlen, device, name, which, ragged, any_dtype):
    sequences = ragged.sequences(device, any_dtype)
    query, key, value = (packed(list(parts)) for parts in zip(*sequences, strict=True))
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    wrong = torch.tensor(MALFORMED[name], dtype=torch.int32, device=device)
    given = list(starts)
    used = wrong[:6] if which == "used" else None
    if which != "used":
        given[which == "keys"] = wrong
    size = (len(query) + 2, *query.shape[1:])
    guarded = torch.full(size, 7.0, device=device, dtype=query.dtype)
    out = guarded[1:-1]
    names = {"queries": "cu_seq_q", "keys": "cu_seq_k", "used": "seqused_k"}
    with malformed(device, rf"{names[which]}[\[ ]"):
        varlen(query, key, value, *given, 70, 150, seqused_k=used, out=out)
    assert (guarded[[0, -1]] == 7).all()
    again = varlen(query, key, value, *starts, 70, 150)
    assert torch.isfinite(again).all()


def test_bounds_below_a_length_cut_it(varlen, device, ragged, any_dtype):
    sequences = ragged.sequences(device, any_dtype)
    query, key, value = (packed(list(parts)) for parts in zip(*sequences, strict=True))
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    out = torch.full_like(query, 7.0)
    most = max(ragged.rows)
    with malformed(device, f"max_q of at least {most}, the longest sequence's queries, got 16"):
        varlen(query, key, value, *starts, 16, max(ragged.keys), out=out)
        rows = split(out, ragged.rows)[2]
        assert (rows[:, :, 16:] == 7).all() and (rows[:, :, :16] != 7).all()
    most = max(ragged.keys)
    with malformed(device, f"max_k of at least {most}, the longest sequence's keys, got 40"):
        varlen(query, key, value, *starts, max(ragged.rows), 40)
    used = torch.full((ragged.batch,), 40, dtype=torch.int32, device=device)
    used = torch.minimum(used, (starts[1][1:] - starts[1][:-1]))
    varlen(query, key, value, *starts, max(ragged.rows), 40, seqused_k=used)


REFUSED = {
    "falls": ([0, 7, 5, 9], None, r"cu_seq_k\[2\] of at least 7, the number before it, got 5"),
    "negative": ([-1, 2, 5, 9], None, r"cu_seq_k\[0\] of at least 0, got -1"),
    "beyond": ([0, 2, 5, 11], None, "cu_seq_k up to 10, the tokens that there are, got 11"),
    "used": (
        [0, 2, 5, 9],
        [2, 4, 0],
        r"seqused_k\[1\] from 0 to 3, the keys it has room for, got 4",
    ),
    "used-negative": ([0, 2, 5, 9], [-2, 3, 0], r"seqused_k\[0\] from 0 to 2, .*, got -2"),
}


@pytest.mark.parametrize("starts, used, sentence", REFUSED.values(), ids=REFUSED)
def test_what_the_host_sees_is_refused(starts, used, sentence):
    query, key = torch.randn(2, 10, 2, 16)
    rows, keys = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 3, 3, 10], starts))
    used = None if used is None else torch.tensor(used, dtype=torch.int32)
    call = (query, key, key, rows, keys, 7, 10)
    with pytest.raises(ValueError, match=f"^sparse_attn::varlen: expected {sentence}"):
        sa.varlen_attention(*call, seqused_k=used)
    with pytest.raises(ValueError, match=f"^sparse_attn::select_blocks: expected {sentence}"):
        sa.select_blocks(
            query,
            key,
            sa.BlockTopK(16),
            cu_seq_q=rows,
            cu_seq_k=keys,
            max_q=7,
            max_k=10,
            seqused_k=used,
        )


@pytest.mark.parametrize("kind", [torch.int64, torch.int16], ids=str)
def test_index_arguments_of_any_integer_dtype(varlen, ragged, device, any_dtype, kind):
    query, key, value = (
        packed(list(p)) for p in zip(*ragged.sequences(device, any_dtype), strict=True)
    )
    rows, keys = (ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys))
    used = (keys[1:] - keys[:-1]).clamp(max=9)
    bounds = max(ragged.rows), max(ragged.keys)
    want = varlen(query, key, value, rows, keys, *bounds, seqused_k=used)
    others = (rows.to(kind), keys.to(kind), *bounds)
    assert torch.equal(varlen(query, key, value, *others, seqused_k=used.to(kind)), want)


WRONG = {
    "query": ({"query": lambda t: t[None]}, r"query of shape \(tokens, heads, head_dim\)"),
    "key": ({"key": lambda t: t[0]}, r"key of shape \(tokens, heads, head_dim\)"),
    "cu-dtype": ({"cu_seq_q": lambda t: t.float()}, "cu_seq_q of dtype int32, got float32"),
    "cu-shape": ({"cu_seq_k": lambda t: t[1:]}, r"cu_seq_k of shape \(7\), got shape \(6\)"),
    "cu-dim": ({"cu_seq_q": lambda t: t[None]}, r"cu_seq_q of shape \(batch \+ 1\)"),
    "cu-stride": ({"cu_seq_q": lambda t: t.repeat(2)[::2]}, "cu_seq_q that is contiguous"),
    "bound": ({"max_q": lambda n: -1}, "max_q of at least 0, got -1"),
    "used": ({"seqused_k": lambda t: torch.zeros(5).int()}, r"seqused_k of shape \(6\)"),
    "out": (
        {"out": lambda t: torch.zeros(1, 4, 112, 64)},
        r"out of shape \(tokens, heads, head_dim",
    ),
    "float8": ({"key": lambda t: t.to(torch.float8_e4m3fn)}, "query of dtype float16 or bfloat16"),
}


@pytest.mark.parametrize("change, sentence", WRONG.values(), ids=WRONG)
def test_wrong_calls(device, change, sentence):
    parts = zip(*RAGGED.sequences(device, torch.float32), strict=True)
    call = dict(zip(("query", "key", "value"), (packed(list(part)) for part in parts), strict=True))
    call |= {"cu_seq_q": RAGGED.starts(device, RAGGED.rows), "max_q": 70, "max_k": 150}
    call |= {"cu_seq_k": RAGGED.starts(device, RAGGED.keys), "seqused_k": None, "out": None}
    ((name, make),) = change.items()
    call[name] = make(call[name])
    if isinstance(call[name], torch.Tensor):
        call[name] = call[name].to(device)
    with pytest.raises(ValueError, match=f"^sparse_attn::varlen: expected {sentence}"):
        sa.varlen_attention(**call)


@pytest.mark.parametrize("name", ["attn_mask", "key_bounds"])
def test_what_needs_a_batch_is_refused(device, name):
    query = torch.randn(4, 1, 16, device=device)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match=f"^sparse_attn::varlen: not served: {name} with"):
        mask = {name: torch.zeros(1, 1, 4, 2, device=device).int()}
        sa.varlen_attention(query, query, query, starts, starts, 4, 4, **mask)


def test_wrong_kinds():
    query, starts = torch.randn(4, 1, 16), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="varlen_attention: expected max_q to be an int, got float"):
        sa.varlen_attention(query, query, query, starts, starts, 4.0, 4)
    with pytest.raises(TypeError, match="varlen_attention: expected cu_seq_k to be a tensor"):
        sa.varlen_attention(query, query, query, starts, [0, 4], 4, 4)
    with pytest.raises(TypeError, match="varlen_attention: expected seqused_k to be a tensor"):
        sa.varlen_attention(query, query, query, starts, starts, 4, 4, seqused_k=[4])


def test_opcheck(device):
    sequences = RAGGED.sequences(device, torch.float32)
    query, key, value = (packed(list(parts)) for parts in zip(*sequences, strict=True))
    starts = [RAGGED.starts(device, lengths) for lengths in (RAGGED.rows, RAGGED.keys)]
    call = (query, key, value, *starts, 70, 150)
    given = {"left": 9, "right": 0, "return_lse": True}
    torch.library.opcheck(torch.ops.sparse_attn.varlen.default, call, given)
    given = {"out": torch.empty_like(query), "lse": torch.empty(4, 112, device=device)}
    torch.library.opcheck(torch.ops.sparse_attn.varlen_out.default, call, given)


def test_one_graph_serves_all_lengths(device):
    torch._dynamo.reset()
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(query, key, value, starts_q, starts_k, bound_q, bound_k):
        return sa.varlen_attention(
            query, key, value, starts_q, starts_k, bound_q, bound_k, pattern=sa.Band((9, 0))
        )

    for rows, keys in (((3, 5), (7, 9)), ((30, 2, 4), (30, 3, 5)), ((5, 6), (6, 40))):
        ragged = Ragged(rows, keys)
        sequences = ragged.sequences(device, torch.float32)
        call = [packed(list(parts)) for parts in zip(*sequences, strict=True)]
        call += [ragged.starts(device, rows), ragged.starts(device, keys), max(rows), max(keys)]
        assert torch.equal(attend(*call), sa.varlen_attention(*call, pattern=sa.Band((9, 0))))
    assert len(compiles) == 1

"""varlen_attention: every sequence has the bits of a call of its own."""

from dataclasses import replace

import pytest
import torch
from ragged import (
    RAGGED,
    RAGGED_PATTERNS,
    Ragged,
    alone,
    assert_same,
    check_one_graph,
    packed,
    ragged_for,
    split,
    split_lse,
)
from reference import DTYPES

import sparse_attn as sa

#: Patterns that ``auto`` gives to the engine of each sequence alone, on every device.
OF_AUTO = ("full", "band", "band-sinks", "band-globals", "dilated", "dilated-sinks", "strided")


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
@pytest.mark.parametrize("name", OF_AUTO)
def test_the_engine_of_auto_is_that_of_each_sequence(device, name, common, head_dim):
    ragged = Ragged((70, 300, 17, 129), (70, 300, 17, 129), 4, 2, head_dim)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sequences = ragged.sequences(device, dtype)
    pattern, common = RAGGED_PATTERNS[name](300, 300, device), {"is_causal": True, **common}
    parts = run(sa.varlen_attention, ragged, sequences, device, pattern, **common)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.sparse_attention(*sequence, pattern, return_lse=True, **common)
        assert_same(part, want)


@pytest.mark.parametrize("before", [0, 5])
def test_rows_around_the_sequences_are_not_written(varlen, device, ragged, any_dtype, before):
    sequences = ragged.sequences(device, any_dtype)
    lengths = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    call = [packed(list(parts), 5) for parts in zip(*sequences, strict=True)]
    want = varlen(*call, *lengths, 70, 150)[:-5]
    call = [torch.cat([torch.full_like(t[:before], torch.nan), t]) for t in call]
    out = torch.full_like(call[0], 7.0)
    assert varlen(*call, *(starts + before for starts in lengths), 70, 150, out=out) is out
    assert torch.equal(out[before:-5], want)
    assert (out[:before] == 7).all() and (out[-5:] == 7).all()


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"k": 3}, {"left": 3, "global_tokens": torch.tensor([1])}],
    ids=["full", "topk", "globals"],
)
def test_rows_of_no_sequence_are_not_written_without_keys(
    engine, device, any_dtype, tokens, arguments
):
    query, key = (
        torch.randn(n, h, 16, device=device).to(any_dtype) for n, h in ((7, 2), (tokens, 1))
    )
    out, lse = torch.full_like(query, 7.0), torch.full((2, 7), 7.0, device=device)
    starts = (torch.tensor(at, device=device).int() for at in ([1, 3, 5], [0, 0, 0]))
    placed = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    torch.ops.sparse_attn.varlen_out(
        query, key, key, *starts, 2, 0, **placed, engine=engine, out=out, lse=lse
    )
    inside = torch.tensor([0, 1, 1, 1, 1, 0, 0], device=device).bool()
    assert (out[inside] == 0).all() and (lse[:, inside] == -torch.inf).all()
    assert (out[~inside] == 7).all() and (lse[:, ~inside] == 7).all()


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
    batches = (((3, 5), (7, 9)), ((30, 2, 4), (30, 3, 5)), ((5, 6), (6, 40)))
    check_one_graph(device, sa.Band((9, 0)), batches)

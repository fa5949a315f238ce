"""varlen_attention: what is refused, and lengths that only the device knows to be wrong."""

import pytest
import torch
from ragged import RAGGED, malformed, packed, split, watched

import sparse_attn as sa

MALFORMED = {
    "decreasing": [0, 50, 20, 60, 10, 5, 112],
    "negative": [-7, -3, 4, 4, 90, -20, 112],
    "beyond": [0, 3, 5000, 2**31 - 1, -(2**31), 7, 2**31 - 1],
}


@pytest.mark.parametrize("which", ["queries", "keys", "used"])
@pytest.mark.parametrize("name", watched(MALFORMED, "beyond"))
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
    again = varlen(query, key, value, *starts, 70, 150, out=torch.full_like(query, torch.nan))
    assert torch.isfinite(again.cpu()).all()


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
    "cu-shape": ({"cu_seq_k": lambda t: t[1:]}, r"cu_seq_k of shape \(7\), got shape \(6\)"),
    "cu-dim": ({"cu_seq_q": lambda t: t[None]}, r"cu_seq_q of shape \(batch \+ 1\)"),
    "cu-stride": (
        {"cu_seq_q": lambda t: t.repeat(2)[::2]},
        r"cu_seq_q to be contiguous, got strides \(2\)",
    ),
    "bound": ({"max_q": lambda n: -1}, "max_q of at least 0, got -1"),
    "used": ({"seqused_k": lambda t: torch.zeros(5).int()}, r"seqused_k of shape \(6\)"),
    "out": (
        {"out": lambda t: torch.zeros(1, 4, 112, 64)},
        r"out of shape \(tokens, heads, head_dim",
    ),
    "out-rows": (
        {"out": lambda t: torch.zeros(5, 4, 64)},
        r"out of shape \(\d+, 4, 64\), got shape \(5, 4, 64\)",
    ),
    "value-heads": (
        {"value": lambda t: t[:, :1]},
        r"value of shape \((\d+), 2, 64\), got shape \(\1, 1, 64\)",
    ),
    "head-dim": (
        {"key": lambda t: t[..., :8]},
        r"key of shape \(tokens, heads, 64\) as query has it, got shape \(\d+, 2, 8\)",
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


BEYOND = {
    "table": (dict(block_table=[[0, 2**40]]), r"block_table\[0, 1\] .* got 2147483647 or more"),
    "table-below": (dict(block_table=[[0, -(2**40)]]), "got -2147483648 or less"),
    "used": (dict(seqused_k=[2**31]), r"seqused_k\[0\] from 0 to 32, .* got 2147483647 or more"),
    "rows": (dict(cu_seq_q=[0, 2**33]), "cu_seq_q up to 3, .* got 2147483647 or more"),
    "used-within": (dict(seqused_k=[2**31 - 2]), "got 2147483646"),
}


@pytest.mark.parametrize("pattern", [None, sa.BlockTopK(16)], ids=["full", "block-topk"])
@pytest.mark.parametrize("name", ["block_table", "seqused_k", "cu_seq_q", "key_origin"])
def test_any_integer_dtype_is_what_sentences_ask_for(name, pattern):
    query, cache = torch.randn(3, 2, 16), torch.randn(4, 16, 2, 16)
    given = {"block_table": [[0, 1]], "seqused_k": [32], "cu_seq_q": [0, 3], "key_origin": [0]}
    tensors = {name: torch.tensor(numbers) for name, numbers in given.items()}
    tensors[name] = tensors[name].float()
    sentence = rf"^sparse_attn\.\w+: expected {name} of an integer dtype, got float32$"
    compiled = torch.compile(sa.paged_attention, backend="eager")
    for attention in (sa.paged_attention, compiled):
        with pytest.raises(ValueError, match=sentence):
            attention(query, cache, cache, **tensors, max_q=3, pattern=pattern)
    with pytest.raises(ValueError, match=sentence):
        sa.select_blocks(query, cache, sa.BlockTopK(16), **tensors, max_q=3)


@pytest.mark.parametrize("pattern", [None, sa.BlockTopK(16)], ids=["full", "block-topk"])
@pytest.mark.parametrize(("wrong", "sentence"), BEYOND.values(), ids=BEYOND)
def test_numbers_beyond_int32_are_told_truly(wrong, sentence, pattern):
    """Indices of 64 bits are cut to 32 before the op sees them."""
    query, cache = torch.randn(3, 2, 16), torch.randn(4, 16, 2, 16)
    given = {"block_table": [[0, 1]], "seqused_k": [32], "cu_seq_q": [0, 3]} | wrong
    tensors = {name: torch.tensor(numbers) for name, numbers in given.items()}
    with pytest.raises(ValueError, match=rf"^sparse_attn::\w+: expected .*{sentence}$"):
        sa.paged_attention(query, cache, cache, **tensors, max_q=3, pattern=pattern)
    with pytest.raises(ValueError, match=rf"^sparse_attn::\w+: expected .*{sentence}$"):
        sa.select_blocks(query, cache, sa.BlockTopK(16), **tensors, max_q=3)


@pytest.mark.parametrize("blocks", [(5, 9), (9, 5)])
def test_layout_too_small_for_a_sequence(blocks):
    """Rows past it would see no key. Lengths on a GPU are not looked at."""
    kind = "query" if blocks[0] < blocks[1] else "key"
    sentence = (
        rf"expected a layout of at least 9 {kind} blocks for the longest sequence's 130 in blocks "
        r"of 16, got 5$"
    )
    pattern = sa.BlockSparse(
        sa.BlockLayout.from_mask(torch.ones(*blocks, dtype=torch.bool), 16, 16)
    )
    starts = torch.tensor([0, 40, 170], dtype=torch.int32)
    query, key, value = torch.randn(3, 170, 2, 16)
    with pytest.raises(ValueError, match=rf"^sparse_attn::varlen: {sentence}"):
        sa.varlen_attention(query, key, value, starts, starts, 200, 200, pattern=pattern)
    cache = torch.randn(20, 16, 2, 16)
    call = (
        cache,
        cache,
        torch.arange(20, dtype=torch.int32).view(2, 10),
        starts[1:].clamp(max=130),
    )
    with pytest.raises(ValueError, match=rf"^sparse_attn::paged: {sentence}"):
        sa.paged_attention(
            query[:130].transpose(0, 1)[None].repeat(2, 1, 1, 1), *call, pattern=pattern
        )

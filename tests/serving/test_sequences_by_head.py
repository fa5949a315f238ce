"""A pattern for each key head, of packed and paged sequences."""

import pytest
import torch
from engines import main_dtype
from ragged import Ragged, Serving, make_pages, packed
from test_chosen_blocks import Batch

import sparse_attn as sa

PATTERNS = {
    "windows": sa.ByHead({1: sa.Band((9, 0), sinks=2)}, rest=sa.Full()),
    "one": sa.ByHead({}, rest=sa.Band((5, 0))),
    "chosen": sa.ByHead(
        {0: sa.BlockTopK(16, mass=0.5, local_blocks=1)}, rest=sa.TopK(7, inside=sa.BlockTopK(32))
    ),
    "equal-neighbours": sa.ByHead({0: sa.Strided(3, 5), 1: sa.Strided(3, 5)}, rest=sa.Full()),
}
RAGGED = Ragged((3, 0, 16, 1, 9, 5), (5, 9, 150, 300, 0, 16), 6, 3)


def alone(batch, serving, pattern, head, **common):
    """The rows of a key head's query heads, from a call on its tensors alone."""
    rows = slice(2 * head, 2 * head + 2)
    axis = 1 if batch.function is sa.varlen_attention else 2
    key, value = (t.narrow(axis, head, 1) for t in (batch.key, batch.value))
    for name in ("sink_logits", "alibi_slopes"):
        if name in common:
            common[name] = common[name][rows]
    call = {**batch.placing, **common, "pattern": pattern, "return_lse": True}
    return serving(batch.function, batch.query[:, rows].contiguous(), key, value, **call)


@pytest.mark.parametrize("page_size", [None, 16, 48])
@pytest.mark.parametrize("name", PATTERNS)
def test_each_head_has_the_bits_of_its_own_call(device, engine, name, page_size):
    serving, pattern = Serving(device, engine), PATTERNS[name]
    sequences = RAGGED.sequences(device, main_dtype(device, engine))
    batch = Batch(RAGGED, sequences, page_size, slack=0)
    common = {"is_causal": True, "sink_logits": torch.randn(RAGGED.Hq, device=device)}
    call = {**batch.placing, **common, "pattern": pattern}
    tensors = (batch.query, batch.key, batch.value)
    out, lse = serving(batch.function, *tensors, return_lse=True, **call)
    written = torch.arange(len(out), device=device) < sum(RAGGED.rows)
    for head in range(RAGGED.Hkv):
        want, want_lse = alone(batch, serving, pattern.of(head), head, **common)
        rows = slice(2 * head, 2 * head + 2)
        assert torch.equal(out[written][:, rows], want[written])
        assert torch.equal(lse[rows, written], want_lse[:, written])
    given = torch.full_like(out, 7.0)
    assert serving(batch.function, *tensors, out=given, **call) is given
    assert torch.equal(given[written], out[written]) and (given[~written] == 7).all()


def test_queries_of_one_length_over_pages(device):
    ragged = Ragged((4, 4), (70, 33), 4, 2)
    queries, keys, values = zip(*ragged.sequences(device, torch.float32), strict=True)
    pages = make_pages(list(keys), list(values), 16)
    pattern = PATTERNS["windows"]
    call = (torch.cat(queries), pages.key, pages.value, pages.table, pages.used)
    out = sa.paged_attention(*call, pattern=pattern, is_causal=True)
    for b, sequence in enumerate(zip(queries, keys, values, strict=True)):
        assert torch.equal(out[b : b + 1], sa.sparse_attention(*sequence, pattern, is_causal=True))


@pytest.mark.parametrize("by", [(3,), (6, 3)], ids=["head", "entry"])
def test_scales_of_8_bit_pages_go_with_their_heads(device, by):
    codes = [
        (q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn))
        for q, k, v in RAGGED.sequences(device, torch.float16)
    ]
    batch, pattern = Batch(RAGGED, codes, 16), PATTERNS["chosen"]
    key_scale, value_scale = torch.rand(2, *by, device=device) + 0.3

    def call(query, key, value, pattern, heads):
        scales = {"key_scale": key_scale[..., heads], "value_scale": value_scale[..., heads]}
        return sa.paged_attention(query, key, value, pattern=pattern, **batch.placing, **scales)

    out = call(batch.query, batch.key, batch.value, pattern, slice(None))
    written = slice(sum(RAGGED.rows))
    for head in range(RAGGED.Hkv):
        rows, own = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        parts = batch.query[:, rows], batch.key[:, :, own], batch.value[:, :, own]
        want = call(*parts, pattern.of(head), own)
        assert torch.equal(out[written, rows], want[written])


def test_compiled_calls(device):
    ragged = Ragged((4, 30), (70, 33), 4, 2)
    queries, keys, values = zip(*ragged.sequences(device, torch.float32), strict=True)
    tensors = [packed(list(part)) for part in (queries, keys, values)]
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]

    def call(query, key, value, starts_q, starts_k):
        pattern = PATTERNS["windows"]
        return sa.varlen_attention(
            query, key, value, starts_q, starts_k, 30, 70, pattern=pattern, is_causal=True
        )

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors, *starts), call(*tensors, *starts))


def test_wrong_calls(device):
    query = torch.randn(4, 2, 16, device=device)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    beyond = sa.ByHead({2: sa.Full()})
    with pytest.raises(ValueError, match="patterns for the call's 2 key heads, got one for head 2"):
        sa.varlen_attention(query, query, query, starts, starts, 4, 4, pattern=beyond)
    pattern = sa.ByHead({0: sa.Full()}, rest=sa.Band(3))
    with pytest.raises(ValueError, match="varlen: expected query of shape"):
        sa.varlen_attention(query[0], query, query, starts, starts, 4, 4, pattern=pattern)
    with pytest.raises(ValueError, match="sink_logits of shape"):
        logits = torch.zeros(5, device=device)
        sa.varlen_attention(
            query, query, query, starts, starts, 4, 4, pattern=pattern, sink_logits=logits
        )


def test_out_that_meets_other_heads_is_refused(device):
    heads = torch.randn(20, 6, 16, device=device)
    keys, values = torch.randn(2, 32, 2, 16, device=device)
    starts = torch.tensor([0, 20], dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    placing = {
        "varlen": (keys, values, starts, starts, 20, 20),
        "paged": (keys[None], values[None], table, starts[1:]),
    }
    packed_on_pages = {"cu_seq_q": starts, "max_q": 20}
    for name, function in (("varlen", sa.varlen_attention), ("paged", sa.paged_attention)):
        common = {"pattern": PATTERNS["windows"], **(packed_on_pages if name == "paged" else {})}
        with pytest.raises(ValueError, match=f"{name}: expected out that does not overlap query"):
            function(heads[:, :4], *placing[name], out=heads[:, 2:], **common)
        want = function(heads[:, :4], *placing[name], **common)
        out = torch.empty_like(want)
        assert torch.equal(function(heads[:, :4], *placing[name], out=out, **common), want)

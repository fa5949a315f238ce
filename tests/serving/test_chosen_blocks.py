"""Block top-k of packed and paged sequences: the lists and the bits of each sequence alone."""

import pytest
import torch
from engines import main_dtype
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged import (
    Ragged,
    Serving,
    assert_same,
    check_one_graph,
    make_pages,
    malformed,
    packed,
    ragged_for,
    split,
    split_lse,
    watched,
)
from reference import DTYPES
from selection import SELECTORS
from selection_cases import selections

import sparse_attn as sa

#: A selection of every kind. Blocks are small, so that short sequences have several.
SELECTIONS = {
    "mixed": sa.BlockTopK((32, 16), local_blocks=1, row_step=8),
    "mixed-budget": sa.BlockTopK(32, mass=None, budget_share=0.4, local_blocks=1, row_step=16),
    "mixed-by-key-head": sa.BlockTopK(16, mass=0.6, local_blocks=1, group="kv"),
    "mean": sa.BlockTopK((64, 16), mass=None, selector="mean", budget_blocks=3, local_blocks=1),
    "mean-by-key-head": sa.BlockTopK(16, mass=0.7, selector="mean", local_blocks=1, group="kv"),
    "antidiagonal": sa.BlockTopK(32, mass=0.7, selector="antidiagonal", local_blocks=1),
    "minmax": sa.BlockTopK((64, 16), mass=0.5, selector="minmax", local_blocks=1),
    "vertical_slash": sa.BlockTopK(16, mass=0.5, selector="vertical_slash", local_blocks=1),
}
PAGE_SIZES = [None, 16, 48]


@pytest.fixture
def serving(device, engine):
    return Serving(device, engine)


class Batch:
    """A ragged batch as one call has it: packed keys, or pages where there is a page size."""

    def __init__(self, ragged, sequences, page_size, slack=50):
        queries, keys, values = (list(part) for part in zip(*sequences, strict=True))
        device = queries[0].device
        self.ragged, self.query = ragged, packed(queries, gap=2)
        self.placing = {"cu_seq_q": ragged.starts(device, ragged.rows)}
        self.placing["max_q"] = ragged.bound(slack)
        if page_size is None:
            self.key, self.value = packed(keys, gap=3), packed(values, gap=3)
            self.placing["cu_seq_k"] = ragged.starts(device, ragged.keys)
            self.placing["max_k"] = max(ragged.keys) + slack
            self.function = sa.varlen_attention
        else:
            pages = make_pages(keys, values, page_size)
            self.key, self.value = pages.key, pages.value
            self.placing |= {"block_table": pages.table, "seqused_k": pages.used}
            self.function = sa.paged_attention

    def lists(self, pattern, **common):
        return sa.select_blocks(self.query, self.key, pattern, **self.placing, **common)

    def attend(self, serving, pattern, **common):
        tensors = (self.query, self.key, self.value)
        call = {**self.placing, **common, "pattern": pattern, "return_lse": True}
        out, lse = serving(self.function, *tensors, **call)
        parts = split(out, self.ragged.rows), split_lse(lse, self.ragged.rows)
        return list(zip(*parts, strict=True))


def assert_lists_of(layout, b, own):
    """Sequence b of a layout has the lists of a layout of its own, and no others."""
    queries, keys = own.counts.shape[-1], own.num_kv_blocks
    assert torch.equal(layout.counts[b, :, :queries], own.counts[0])
    assert not layout.counts[b, :, queries:].any()
    assert torch.equal(layout.indices[b, :, :queries, :keys], own.indices[0])
    assert not layout.indices[b, :, :queries, keys:].any()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_lists_are_those_of_each_sequence_alone(device, dtype, name, is_causal, page_size):
    ragged, pattern = Ragged((3, 0, 170, 1, 33, 70), (5, 9, 350, 64, 0, 216)), SELECTIONS[name]
    sequences = ragged.sequences(device, dtype)
    layout = Batch(ragged, sequences, page_size).lists(pattern, is_causal=is_causal)
    for b, (query, key, _) in enumerate(sequences):
        assert_lists_of(layout, b, sa.select_blocks(query, key, pattern, is_causal=is_causal))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_outputs_have_the_bits_of_each_sequence_alone(
    serving, engine, device, dtype, name, page_size
):
    ragged, pattern = ragged_for(engine), SELECTIONS[name]
    sequences = ragged.sequences(device, dtype)
    common = {"is_causal": True, "sink_logits": torch.randn(ragged.Hq, device=device)}
    parts = Batch(ragged, sequences, page_size).attend(serving, pattern, **common)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.sparse_attention(*sequence, pattern, engine=engine, return_lse=True, **common)
        assert_same(part, want)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("softcap", [0.5, 5.0])
def test_capped_outputs_of_blocks_of_128(serving, engine, device, softcap, page_size):
    rows = (16, 3, 9) if engine == "decode" else (300, 70, 17)
    ragged, dtype = Ragged(rows, (700, 150, 64)), main_dtype(device, engine)
    pattern = sa.BlockTopK(128, mass=None, selector="mean", budget_blocks=2, local_blocks=1)
    sequences = ragged.sequences(device, dtype)
    common = {"is_causal": True, "softcap": softcap}
    parts = Batch(ragged, sequences, page_size).attend(serving, pattern, **common)
    for part, sequence in zip(parts, sequences, strict=True):
        want = sa.sparse_attention(*sequence, pattern, engine=engine, return_lse=True, **common)
        assert_same(part, want)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    "common", [{"softcap": 5.0}, {"scale": -0.3}, {"query_offset": 4}], ids=str
)
def test_common_arguments(device, common, page_size):
    ragged, pattern = Ragged((70, 1, 33), (150, 64, 40)), SELECTIONS["mixed"]
    sequences = ragged.sequences(device, torch.float32)
    layout = Batch(ragged, sequences, page_size).lists(pattern, **common)
    for b, (query, key, _) in enumerate(sequences):
        assert_lists_of(layout, b, sa.select_blocks(query, key, pattern, **common))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_positions_and_origins_of_each_sequence(device, page_size):
    ragged, pattern = Ragged((70, 1, 33), (150, 64, 140)), SELECTIONS["mean"]
    sequences = ragged.sequences(device, torch.float32)
    places = {"query_offset": [70, 3, -5], "key_origin": [33, -2, 64]}
    places = {
        name: torch.tensor(at, dtype=torch.int32, device=device) for name, at in places.items()
    }
    layout = Batch(ragged, sequences, page_size).lists(pattern, is_causal=True, **places)
    for b, (query, key, _) in enumerate(sequences):
        own = {name: at[b : b + 1] for name, at in places.items()}
        assert_lists_of(layout, b, sa.select_blocks(query, key, pattern, is_causal=True, **own))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", ["mixed", "mean", "vertical_slash"])
def test_larger_bounds_change_no_list(device, name, page_size):
    ragged, pattern = Ragged((70, 1, 33), (150, 64, 140)), SELECTIONS[name]
    sequences = ragged.sequences(device, torch.float32)
    least = Batch(ragged, sequences, page_size, slack=0).lists(pattern)
    most = Batch(ragged, sequences, page_size, slack=10**6).lists(pattern)
    rows, columns = least.counts.shape[-1], least.num_kv_blocks
    assert torch.equal(most.counts[..., :rows], least.counts)
    assert torch.equal(most.indices[..., :rows, :columns], least.indices)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_used_keys_shorten_packed_sequences(device, page_size):
    ragged, pattern = Ragged((70, 1, 33), (150, 64, 140)), SELECTIONS["mixed"]
    sequences = ragged.sequences(device, torch.float32)
    batch = Batch(ragged, sequences, page_size)
    used = torch.tensor([97, 0, 140], dtype=torch.int32, device=device)
    batch.placing["seqused_k"] = used
    for b, (query, key, _) in enumerate(sequences):
        own = sa.select_blocks(query, key[:, :, : int(used[b])], pattern)
        assert_lists_of(batch.lists(pattern), b, own)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_scores_of_the_caller(device, page_size):
    """They count blocks of each sequence, up to the bounds."""
    ragged = Ragged((70, 1, 33), (150, 64, 140))
    sequences = ragged.sequences(device, torch.float32)
    batch = Batch(ragged, sequences, page_size, slack=0)
    width = (
        -(-150 // 16)
        if page_size is None
        else batch.placing["block_table"].shape[1] * (page_size // 16)
    )
    scores = torch.randn(3, 4, -(-70 // 32), width, device=device)

    def by(own):
        return sa.BlockTopK((32, 16), mass=0.6, selector=own, local_blocks=1)

    layout = batch.lists(by(scores))
    for b, (query, key, _) in enumerate(sequences):
        blocks = -(-query.shape[2] // 32), -(-key.shape[2] // 16)
        own = by(scores[b : b + 1, :, : blocks[0], : blocks[1]].contiguous())
        assert_lists_of(layout, b, sa.select_blocks(query, key, own))
    with pytest.raises(ValueError, match=rf"scores of shape \(1 or 3, 1, 2 or 4, 3, {width}\)"):
        batch.lists(by(scores[..., 1:]))


def test_scores_of_the_caller_by_bounds(device):
    """Larger bounds have scores of more blocks, which are past the texts."""
    query = torch.randn(48, 2, 16, device=device)
    starts = torch.tensor([0, 32, 48], dtype=torch.int32, device=device)
    scores = torch.randn(2, 2, 7, 7, device=device)
    outs = []
    for most, blocks in ((48, 3), (100, 3), (100, 7)):
        pattern = sa.BlockTopK(16, selector=scores[..., :blocks, :blocks], budget_blocks=1)
        outs.append(sa.varlen_attention(*[query] * 3, starts, starts, most, most, pattern=pattern))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    with pytest.raises(ValueError, match=r"scores of shape \(1 or 2, 1 or 2, 7, 7\)"):
        pattern = sa.BlockTopK(16, selector=scores[..., :6, :6], budget_blocks=1)
        sa.varlen_attention(*[query] * 3, starts, starts, 100, 100, pattern=pattern)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", ["mixed", "mean-by-key-head"])
def test_token_topk_inside_chosen_blocks(serving, engine, device, name, page_size):
    ragged, pattern = ragged_for(engine), sa.TopK(7, inside=SELECTIONS[name])
    sequences = ragged.sequences(device, main_dtype(device, engine))
    parts = Batch(ragged, sequences, page_size).attend(serving, pattern, is_causal=True)
    for part, sequence in zip(parts, sequences, strict=True):
        call = {"engine": engine, "return_lse": True, "is_causal": True}
        assert_same(part, sa.sparse_attention(*sequence, pattern, **call))


@pytest.mark.parametrize("rows", [(0, 0), (), (4, 2)], ids=["no-rows", "no-sequences", "no-keys"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_empty_batches(serving, device, rows, page_size):
    ragged = Ragged(rows, tuple(0 for _ in rows), 2, 1, 16)
    query = torch.randn(sum(rows), 2, 16, device=device)
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    key = torch.randn(0, 1, 16, device=device)
    if page_size is None:
        call = (query, key, key, *starts, 4, 0)
        out = serving(sa.varlen_attention, *call, pattern=SELECTIONS["mixed"])
    else:
        cache = torch.full((3, page_size, 1, 16), torch.nan, device=device)
        table = torch.full((len(rows), 2), -9, dtype=torch.int32, device=device)
        placing = {"cu_seq_q": starts[0], "max_q": 4, "pattern": SELECTIONS["mixed"]}
        used = torch.zeros(len(rows), dtype=torch.int32, device=device)
        out = serving(sa.paged_attention, query, cache, cache, table, used, **placing)
    assert out.shape == query.shape and (out == 0).all()


MALFORMED = {
    "decreasing": [0, 350, 320, 360],
    "negative": [-7, -3, 4, 90],
    "beyond": [0, 5000, -(2**31), 2**31 - 1],
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", watched(MALFORMED, "beyond"))
def test_malformed_lengths_and_tables_stay_inside_the_tensors(device, name, selection):
    """Lists stay inside the sequences that remain, and the next call is right."""
    ragged, pattern = Ragged((70, 1, 33), (150, 64, 140)), SELECTIONS[selection]
    sequences = ragged.sequences(device, torch.float32)
    wrong = torch.tensor(MALFORMED[name], dtype=torch.int32, device=device)
    for page_size in (None, 16):
        batch = Batch(ragged, sequences, page_size)
        right = dict(batch.placing)
        want = batch.lists(pattern)
        names = {"cu_seq_q": wrong, "cu_seq_k": wrong, "seqused_k": wrong[1:]}
        names["block_table"] = wrong[1:, None].expand(3, 10).contiguous()
        for argument in right.keys() & names.keys():
            batch.placing = {**right, argument: names[argument]}
            with malformed(device, rf"{argument}[\[ ]"):
                layout = batch.lists(pattern)
                assert (layout.counts >= 0).all() and (layout.counts <= layout.num_kv_blocks).all()
                assert (layout.indices >= 0).all() and (layout.indices < layout.num_kv_blocks).all()
        batch.placing = right
        assert torch.equal(batch.lists(pattern).counts, want.counts)


def test_wrong_calls(device):
    ragged = Ragged((4, 2), (9, 5), 2, 1, 16)
    sequences = ragged.sequences(device, torch.float32)
    batch, pages = (Batch(ragged, sequences, size, slack=0) for size in (None, 16))
    pattern = sa.BlockTopK(16)
    wrong = {
        "expected cu_seq_q beside cu_seq_k, got None": {"cu_seq_q": None, "max_q": None},
        "expected cu_seq_k or block_table, got both": pages.placing,
        "expected max_k beside": {"max_k": None},
        "expected cu_seq_k of shape": {"cu_seq_k": batch.placing["cu_seq_k"][1:]},
    }
    for sentence, change in wrong.items():
        with pytest.raises(ValueError, match=f"sparse_attn::select_blocks: {sentence}"):
            sa.select_blocks(batch.query, batch.key, pattern, **{**batch.placing, **change})
    plain = sequences[0][:2]
    for name, sentence in {
        "max_q": "expected max_q with packed queries only, got queries of one length",
        "max_k": "expected max_k with packed keys only, got keys of one length",
        "cu_seq_q": "expected cu_seq_k or block_table beside cu_seq_q, got neither",
    }.items():
        with pytest.raises(ValueError, match=f"sparse_attn::select_blocks: {sentence}"):
            sa.select_blocks(*plain, pattern, **{name: batch.placing[name]})
    with pytest.raises(ValueError, match="expected max_k with packed keys only, got pages"):
        sa.select_blocks(pages.query, pages.key, pattern, **pages.placing, max_k=9)
    with pytest.raises(TypeError, match="select_blocks: expected max_q to be an int or None"):
        sa.select_blocks(*plain, pattern, max_q=2.0)
    many = Ragged((70, 1), (150, 64))
    with pytest.raises(ValueError, match="up to 16 queries with selector sketch"):
        long = Batch(many, many.sequences(device, torch.float32), None)
        long.lists(sa.BlockTopK(16, selector="sketch", budget_tokens=16))
    kept = sa.KeySketch(torch.zeros(2, 2, 64, 64, device=device))
    with pytest.raises(NotImplementedError, match="a kept sketch with packed keys"):
        batch.lists(sa.BlockTopK(16, selector="sketch", budget_tokens=16, sketch=kept))
    with pytest.raises(NotImplementedError, match="not served: key_bounds with packed"):
        bounds = torch.zeros(2, 1, 4, 2, dtype=torch.int32, device=device)
        batch.lists(pattern, key_bounds=bounds)


@pytest.mark.parametrize("page_size", [None, 16])
def test_opcheck(device, page_size):
    ragged = Ragged((70, 1, 33), (150, 64, 140))
    batch = Batch(ragged, ragged.sequences(device, torch.float32), page_size)
    arguments = SELECTIONS["mixed-by-key-head"]._arguments() | batch.placing
    key = batch.key.nan_to_num()
    op = torch.ops.sparse_attn.select_blocks.default
    torch.library.opcheck(op, (batch.query.nan_to_num(), key), arguments)


def test_one_graph_serves_all_lengths(device):
    batches = (((3, 5), (7, 9)), ((130, 2, 4), (130, 3, 5)), ((5, 66), (6, 140)))
    check_one_graph(device, SELECTIONS["mixed"], batches)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("pattern", [SELECTIONS["mixed"], sa.TopK(5, inside=SELECTIONS["mixed"])])
@pytest.mark.parametrize("page_size", [None, 16])
def test_jit_trace_of_lists_is_refused(device, page_size, pattern):
    """It would hold the example's number of blocks, and cut the lists of longer sequences."""
    ragged = Ragged((3, 40), (30, 50))
    batch = Batch(ragged, ragged.sequences(device, torch.float32), page_size)

    def attend(query, key, value):
        return batch.function(query, key, value, pattern=pattern, **batch.placing)

    call = (batch.query.nan_to_num(), batch.key.nan_to_num(), batch.value.nan_to_num())
    with pytest.raises(TypeError, match=r"_attention: expected a layout .*torch.jit.trace"):
        torch.jit.trace(attend, call, check_trace=False)
    assert attend(*call).shape == batch.query.shape


lengths = st.one_of(st.integers(0, 90), st.sampled_from([0, 1, 15, 16, 17, 64, 65, 129, 300]))


@st.composite
def batches(draw):
    count = draw(st.integers(1, 4))
    rows, keys = (tuple(draw(lengths) for _ in range(count)) for _ in range(2))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    return Ragged(rows, keys, heads_kv * group, heads_kv, draw(st.sampled_from([16, 64, 72, 128])))


@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_fuzz(device, data):
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    ragged = data.draw(batches(), label="batch")
    dtype = data.draw(st.sampled_from(list(DTYPES.values())), label="dtype")
    pattern = data.draw(st.sampled_from(SELECTORS).flatmap(selections), label="pattern")
    page_size = data.draw(st.sampled_from([None, 16, 48, 128]), label="page size")
    common = {
        "is_causal": data.draw(st.booleans()),
        "softcap": data.draw(st.sampled_from([0.0, 5.0])),
        "scale": data.draw(st.sampled_from([None, 0.5, -0.2])),
    }
    sequences = ragged.sequences(device, dtype)
    layout = Batch(ragged, sequences, page_size).lists(pattern, **common)
    for b, (query, key, _) in enumerate(sequences):
        assert_lists_of(layout, b, sa.select_blocks(query, key, pattern, **common))

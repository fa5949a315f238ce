"""Sketches of paged caches: written with the cache, and decode over the pages that they choose."""

import pytest
import torch
from ragged import malformed
from reference import DTYPES

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

HEADS, DIM, PAGES = 2, 40, 40
LENGTHS = [300, 17, 64, 211]


def make_cache(device, page_size, dtype=torch.float32, seed=0):
    """Caches full of NaN, a table of pages in any order, and the keys and values of sequences."""
    torch.manual_seed(seed)
    pages = PAGES * 64 // page_size
    caches = torch.full((2, pages, page_size, HEADS, DIM), torch.nan, device=device).to(dtype)
    each = -(-max(LENGTHS) // page_size) + 1
    table = torch.randperm(pages)[: len(LENGTHS) * each].view(len(LENGTHS), each)
    news = [torch.randn(2, n, HEADS, DIM, device=device).to(dtype) for n in LENGTHS]
    return *caches, table.int().to(device), news


def slots_of(table, sequence, positions, page_size):
    positions = torch.tensor(list(positions), dtype=torch.int64, device=table.device)
    return table[sequence, positions // page_size].long() * page_size + positions % page_size


def used_of(device):
    return torch.tensor(LENGTHS, dtype=torch.int32, device=device)


def whole(device, page_size, dtype=torch.float32):
    """The caches with all tokens, and a sketch that came with them at once."""
    key_cache, value_cache, table, news = make_cache(device, page_size, dtype)
    sketch = sa.KeySketch(key_cache, paged=True)
    slots = [slots_of(table, b, range(n), page_size) for b, n in enumerate(LENGTHS)]
    key, value = torch.cat(news, 1)
    sa.append_to_cache(key, value, key_cache, value_cache, torch.cat(slots), sketch=sketch)
    return key_cache, value_cache, table, news, sketch


def assert_same(left, right):
    assert torch.equal(left.codes, right.codes)
    assert torch.equal(left.ranges, right.ranges)
    assert torch.equal(left.lengths, right.lengths)


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
def test_groups_are_those_of_a_tensor(device, page_size):
    """A page has the codes of its keys alone, in groups of 64, 32 or 16."""
    *_, table, news, sketch = whole(device, page_size)
    group = next(size for size in (64, 32, 16) if page_size % size == 0)
    assert sketch.ranges.shape[2] == page_size // group
    for b, (new, _) in enumerate(news):
        for first in range(0, LENGTHS[b], group):
            keys = new[first : first + group].transpose(0, 1)[None]
            alone = sa.KeySketch(keys)
            page, row = table[b, first // page_size], first % page_size
            codes = sketch.codes[page, :, row : row + keys.shape[2]]
            assert torch.equal(codes, alone.codes[0, :, : keys.shape[2]])
            assert torch.equal(sketch.ranges[page, :, row // group], alone.ranges[0, :, 0])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_tokens_may_come_in_any_steps_and_order(device, page_size, dtype):
    *_, sketch = whole(device, page_size, dtype)
    key_cache, value_cache, table, news = make_cache(device, page_size, dtype)
    steps = sa.KeySketch(key_cache, paged=True)
    at = [0] * len(LENGTHS)
    while at != LENGTHS:
        parts = []
        for b, length in enumerate(LENGTHS):
            end = min(at[b] + 1 + 37 * b, length)
            parts.append(
                (news[b][:, at[b] : end], slots_of(table, b, range(at[b], end), page_size))
            )
            at[b] = end
        key, value = torch.cat([new for new, _ in parts], 1)
        slots = torch.cat([slots for _, slots in parts])
        order = torch.randperm(len(slots), device=device)
        sa.append_to_cache(
            key[order], value[order], key_cache, value_cache, slots[order], sketch=steps
        )
    assert_same(steps, sketch)
    made = sa.KeySketch(key_cache, paged=True, block_table=table, seqused_k=used_of(device))
    assert_same(made, sketch)


@pytest.mark.parametrize("page_size", [16, 64, 96])
def test_many_slots_in_any_order(device, page_size):
    """More than are taken as they come, some twice and some that the cache does not have."""
    cache = torch.randn(4096 // page_size, page_size, HEADS, DIM, device=device)
    slots = torch.randperm(cache.shape[0] * page_size)[:2000]
    slots = torch.cat([slots, slots[:30], torch.tensor([-1, 2**40, -(2**40)])]).to(device)
    slots = slots[torch.randperm(len(slots), device=device)]
    sketch, want = (sa.KeySketch(cache, paged=True) for _ in range(2))
    sketch.append(cache, slots)
    torch.ops.sparse_attn.sketch_pages(cache, slots, want.codes, want.ranges, want.lengths)
    assert_same(sketch, want)
    assert sketch.codes.any()


def chosen(query, cache, table, used, sketch, selector, group="q"):
    """The blocks of 16 (of pages of more 64) keys that decode keeps, few of which are forced."""
    block = 16 if selector == "sketch" or cache.shape[1] == 16 else 64
    pattern = sa.BlockTopK(
        (64, block), selector=selector, budget_blocks=2, sink_blocks=0, local_blocks=0,
        group=group, sketch=sketch,
    )  # fmt: skip
    pages = {"block_table": table, "seqused_k": used}
    return sa.select_blocks(query, cache, pattern, is_causal=True, **pages).to_mask(), block


@pytest.mark.parametrize("selector", ["sketch", "minmax", "mean"])
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("Sq", [1, 3])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_keys_that_were_never_appended_are_kept(device, page_size, Sq, group, selector):
    """Those of whole groups, and those past what a group holds; the others have their budget."""
    key_cache, _, table, _ = whole(device, page_size)[:4]
    used = used_of(device)
    held = (used - torch.tensor([77, 0, 64, 9], device=device)).int()
    sketch = sa.KeySketch(key_cache, paged=True, block_table=table, seqused_k=held)
    late = 279  # appended where those before it in its group are too
    sketch.append(key_cache, slots_of(table, 0, [late], page_size))
    group_size = min(64, page_size)
    known = torch.arange(table.shape[1] * page_size, device=device) < held[:, None]
    known[0, late // group_size * group_size : late + 1] = True
    query = torch.randn(len(LENGTHS), 4, Sq, DIM, device=device)
    kept, block = chosen(query, key_cache, table, used, sketch, selector, group)
    exists = torch.arange(known.shape[1], device=device) < used[:, None]
    lacks = (exists & ~known)[:, : kept.shape[-1] * block].unflatten(1, (-1, block)).any(-1)
    assert kept[lacks[:, None, None].expand_as(kept)].all()
    # The diagonal's block is forced inside the budget.
    others = (kept & ~lacks[:, None, None]).sum(-1)
    assert (others <= 2).all() and lacks[[0, 2, 3]].any(-1).all() and not lacks[1].any()


@pytest.mark.parametrize("mass", [0.3, 0.8])
def test_shares_are_of_the_keys_that_are_held(device, mass):
    """Of each row: what slots have of keys that were never appended weighs nothing in it."""
    key_cache, _, table, news, stale = whole(device, 64)
    used = used_of(device)
    held = used // 2 // 16 * 16
    sketch = sa.KeySketch(key_cache, paged=True, block_table=table, seqused_k=held)
    kept_groups = torch.arange(table.shape[1], device=device) * 64 < held[:, None]
    others = table[~kept_groups].long()
    sketch.codes[others], sketch.ranges[others] = stale.codes[others], 9 * stale.ranges[others]
    query = 2 * torch.randn(len(LENGTHS), 4, 16, DIM, device=device)
    choice = dict(selector="sketch", mass=mass, sink_blocks=0, local_blocks=0)
    pages = {"block_table": table, "seqused_k": used}
    layout = sa.select_blocks(query, key_cache, sa.BlockTopK(16, sketch=sketch, **choice), **pages)
    for b, (key, _) in enumerate(news):
        own = key.transpose(0, 1)[None]
        alone = sa.BlockTopK(16, sketch=sa.KeySketch(own[:, :, : int(held[b])]), **choice)
        want = sa.select_blocks(query[b : b + 1], own, alone).to_mask()
        kept = layout.to_mask()[b : b + 1, ..., : want.shape[-1]]
        assert (kept == want).double().mean() > 0.98 and (b > 0 or not kept.all())


def test_a_key_that_was_never_appended_is_found(device):
    """One that outweighs all others: the attention of a cache that grew past the sketch."""
    key_cache, value_cache, table, news = whole(device, 16)[:4]
    used = used_of(device)
    query = torch.randn(len(LENGTHS), 4, 1, DIM, device=device)
    sketch = sa.KeySketch(key_cache, paged=True, block_table=table, seqused_k=used // 2)
    slot = slots_of(table, 0, [200], 16)
    key_cache.flatten(0, 1)[slot] = 9 * query[0, ::2, 0]
    value_cache.flatten(0, 1)[slot] = 5
    for selector in ("sketch", "minmax", "mean"):
        pattern = sa.BlockTopK(16, selector=selector, budget_blocks=2, sketch=sketch)
        out = sa.paged_attention(query, key_cache, value_cache, table, used, pattern=pattern)
        assert (out[0, ::2] > 4.9).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("selector", ["sketch", "minmax", "mean"])
def test_any_lengths_give_lists(device, selector):
    key_cache, _, table, _, sketch = whole(device, 64)
    lengths = torch.tensor([-(2**31), 0, 65, 2**31 - 1], dtype=torch.int32, device=device)
    sketch.lengths[table[:, :4].flatten().long(), 0] = lengths.repeat(len(LENGTHS))
    query = torch.randn(len(LENGTHS), 4, 1, DIM, device=device)
    kept, _ = chosen(query, key_cache, table, used_of(device), sketch, selector)
    blocks = 4 if selector == "sketch" else 1
    assert kept[0, ..., : 2 * blocks].all()  # of the groups that hold nothing


@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("Sq", [1, 3])
@pytest.mark.parametrize("page_size", [16, 64, 96])
@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_decode_chooses_as_on_a_tensor(device, given, page_size, Sq, group):
    """Each sequence has the list of its keys alone, where groups are the same, and its output."""
    key_cache, value_cache, table, news, sketch = whole(device, page_size)
    query = 2 * torch.randn(len(LENGTHS), 4, Sq, DIM, device=device)
    pattern = sa.BlockTopK(
        16, selector="sketch", budget_tokens=96, group=group, local_blocks=1,
        sketch=sketch if given else None,
    )  # fmt: skip
    call = (query, key_cache, value_cache, table, used_of(device))
    out = sa.paged_attention(*call, pattern=pattern, is_causal=True)
    pages = {"block_table": table, "seqused_k": used_of(device)}
    layout = sa.select_blocks(query, key_cache, pattern, is_causal=True, **pages)
    again = sa.paged_attention(*call, pattern=sa.BlockSparse(layout), is_causal=True)
    assert torch.equal(out, again)
    mask = layout.to_mask()
    for b, (key, value) in enumerate(news):
        own = query[b : b + 1], *(t.transpose(0, 1)[None] for t in (key, value))
        blocks = -(-LENGTHS[b] // 16)
        kept = mask[b : b + 1, ..., :blocks]
        assert (kept.sum(-1) == min(6, blocks)).all() and not mask[b, ..., blocks:].any()
        if not given or page_size == 64:  # groups of 64 keys of the sequence
            alone = sa.BlockTopK(
                16, selector="sketch", budget_tokens=96, group=group, local_blocks=1
            )
            want = sa.select_blocks(*own[:2], alone, is_causal=True).to_mask()
            assert (kept == want).double().mean() > 0.98
        listed = sa.BlockSparse(sa.BlockLayout.from_mask(kept, 16, 16))
        assert_close_to_reference(out[b : b + 1], *own, listed, is_causal=True)


@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (1, 0, 1, 0), (3, 0, 16, 1)], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("amount", [{"budget_tokens": 96}, {"mass": 0.4}], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_packed_queries_choose_as_alone(device, given, amount, page_size, rows, group):
    key_cache, value_cache, table, _, sketch = whole(device, page_size)
    query = 2 * torch.randn(sum(rows), 4, DIM, device=device)
    pattern = sa.BlockTopK(
        16,
        selector="sketch",
        group=group,
        local_blocks=1,
        sketch=sketch if given else None,
        **amount,
    )
    ends = torch.tensor([0, *rows], device=device).cumsum(0)
    packed = {"cu_seq_q": ends.int(), "max_q": max(rows)}
    call = (key_cache, value_cache, table, used_of(device))
    out = sa.paged_attention(query, *call, pattern=pattern, is_causal=True, **packed)
    pages = {"block_table": table, "seqused_k": used_of(device)}
    layout = sa.select_blocks(query, key_cache, pattern, is_causal=True, **pages, **packed)
    for b, count in enumerate(rows):
        if count == 0:
            assert not layout.counts[b].any()
            continue
        part = slice(int(ends[b]), int(ends[b + 1]))
        own = query[part].transpose(0, 1)[None]
        pages = {"block_table": table[b : b + 1], "seqused_k": used_of(device)[b : b + 1]}
        alone = sa.select_blocks(own, key_cache, pattern, is_causal=True, **pages)
        assert torch.equal(layout.counts[b], alone.counts[0])
        assert torch.equal(layout.indices[b], alone.indices[0])
        want = sa.paged_attention(
            own, key_cache, value_cache, *pages.values(), pattern=pattern, is_causal=True
        )
        assert torch.equal(out[part].transpose(0, 1), want[0])


def test_packed_keys_choose_by_a_sketch_of_the_call(device):
    *_, news = make_cache(device, 64)
    rows = (2, 1, 5, 3)
    query = torch.randn(sum(rows), 4, DIM, device=device)
    key, value = torch.cat(news, 1)
    starts = (torch.tensor([0, *sizes], device=device).cumsum(0).int() for sizes in (rows, LENGTHS))
    pattern = sa.BlockTopK(16, selector="sketch", budget_tokens=96, local_blocks=1)
    out = sa.varlen_attention(
        query, key, value, *starts, max(rows), max(LENGTHS), pattern=pattern, is_causal=True
    )
    first = 0
    for (key, value), count in zip(news, rows, strict=True):
        own = (t.transpose(0, 1)[None] for t in (query[first : first + count], key, value))
        want = sa.sparse_attention(*own, pattern, is_causal=True)
        assert torch.equal(out[first : first + count].transpose(0, 1), want[0])
        first += count


@pytest.mark.sanitizer
def test_malformed_tables_and_slots_read_and_write_nothing_outside(device):
    key_cache, value_cache, table, _, sketch = whole(device, 64)
    before = sketch.codes.clone()
    slots = torch.tensor([-1, 2**40, -(2**62), PAGES * 64, 2**62], device=device)
    sketch.append(key_cache, slots)
    assert torch.equal(sketch.codes, before)
    value_cache.nan_to_num_(0)
    query = torch.randn(len(LENGTHS), 4, 1, DIM, device=device)
    wild = torch.full_like(table, 2**30)
    wild[:, 1:] = -5
    used = torch.tensor([2**30, -3, 0, 90], dtype=torch.int32, device=device)
    for own in (sketch, None):
        pattern = sa.BlockTopK(16, selector="sketch", budget_tokens=64, sketch=own)
        with malformed(device, r"seqused_k\[0\] from 0 to \d+, the keys it has room for"):
            sa.paged_attention(query, key_cache, value_cache, wild, used, pattern=pattern)
    with malformed(device, r"seqused_k from 0 to \d+, the tokens that block_table has room for"):
        made = sa.KeySketch(key_cache, paged=True, block_table=wild, seqused_k=used)
        assert made.codes.shape == before.shape


def test_wrong_calls(device):
    key_cache, value_cache, table, news, sketch = whole(device, 64)
    query = torch.randn(len(LENGTHS), 4, 1, DIM, device=device)
    call = (query, key_cache, value_cache, table, used_of(device))

    def by(sketch=None, selector="sketch", **changes):
        return sa.BlockTopK(16, selector=selector, budget_tokens=64, sketch=sketch, **changes)

    key = news[0][:1].transpose(1, 2)
    plain = sa.KeySketch(key)
    for wrong, sentence in {
        by(plain): "select_blocks: expected a paged sketch, got a sketch that is not paged",
        by(sa.KeySketch(key_cache[:5], paged=True)): "select_blocks: expected a sketch of key's",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            sa.paged_attention(*call, pattern=wrong)
    with pytest.raises(ValueError, match="expected a sketch that is not paged, got a paged sketch"):
        sa.select_blocks(key[:, :, :1], key, by(sketch))
    with pytest.raises(ValueError, match="block_table and seqused_k together, got block_table"):
        sa.select_blocks(query, key_cache, by(), block_table=table)
    with pytest.raises(ValueError, match="append_to_cache: expected a paged sketch, got KeySketch"):
        sa.append_to_cache(*news[0], key_cache, value_cache, torch.arange(300), sketch=plain)
    with pytest.raises(TypeError, match="append_to_cache: expected sketch to be a KeySketch"):
        sa.append_to_cache(*news[0], key_cache, value_cache, torch.arange(300), sketch=key)
    with pytest.raises(TypeError, match="expected slot_mapping to be a tensor"):
        sketch.append(key_cache)
    with pytest.raises(ValueError, match="slot_mapping with paged=True alone"):
        plain.append(key, torch.arange(3))
    with pytest.raises(ValueError, match="capacity without paged=True"):
        sa.KeySketch(key_cache, paged=True, capacity=9)
    used = torch.full((len(table),), 9, device=device)
    for name, pages, lengths in (
        ("block_table", table.float(), used),
        ("seqused_k", table, used > 3),
    ):
        with pytest.raises(
            ValueError, match=f"KeySketch: expected {name} of an integer dtype, got"
        ):
            sa.KeySketch(key_cache, paged=True, block_table=pages, seqused_k=lengths)
    with pytest.raises(ValueError, match="KeySketch: expected seqused_k on key's device .*, got m"):
        sa.KeySketch(key_cache, paged=True, block_table=table, seqused_k=used.to("meta"))
    with pytest.raises(
        ValueError, match=r"KeySketch\.append: expected slot_mapping of an integer d"
    ):
        sa.KeySketch(key_cache, paged=True).append(key_cache, torch.zeros(3, device=device))
    with pytest.raises(ValueError, match="paged=True with block_table"):
        sa.KeySketch(key, block_table=table)
    with pytest.raises(ValueError, match="key_cache with a page_size that is a multiple of 16"):
        sa.KeySketch(key_cache[:, :24], paged=True)


def test_a_sketch_that_does_not_fit_leaves_the_cache_as_it_is(device):
    key_cache, value_cache, _, news, _ = whole(device, 64)
    before = key_cache.clone(), value_cache.clone()
    key, value = news[0]
    slots = torch.arange(len(key), device=device)
    for other in (key_cache[:5], key_cache.bfloat16(), key_cache[:, :, :1]):
        with pytest.raises(ValueError, match="expected a sketch of key_cache's"):
            sa.append_to_cache(
                *(key, value, key_cache, value_cache, slots),
                sketch=sa.KeySketch(other.contiguous(), paged=True),
            )
    for cache, kept in zip((key_cache, value_cache), before, strict=True):
        torch.testing.assert_close(cache, kept, rtol=0, atol=0, equal_nan=True)


def test_opcheck(device):
    key_cache, value_cache, table, _, sketch = whole(device, 64)
    slots = slots_of(table, 0, range(290, 300), 64)
    op = torch.ops.sparse_attn.sketch_pages.default
    stored = sketch.codes, sketch.ranges, sketch.lengths
    torch.library.opcheck(op, (key_cache.nan_to_num(0), slots, *stored))
    query = torch.randn(len(LENGTHS), 4, 1, DIM, device=device)
    given = sa.BlockTopK(16, selector="sketch", group="kv", sketch=sketch)._arguments()
    given |= {"block_table": table, "seqused_k": used_of(device)}
    torch.library.opcheck(torch.ops.sparse_attn.select_blocks.default, (query, key_cache), given)

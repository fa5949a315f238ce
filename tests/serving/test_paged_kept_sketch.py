"""Selectors ``minmax`` and ``mean`` over pages by their sketch: chunks of prompts, any queries."""

from dataclasses import replace

import pytest
import torch
from ragged import malformed
from reference import DTYPES
from selection import pattern_of
from sketches import sketched_keys
from test_paged_sketch import DIM, HEADS, LENGTHS, PAGES, used_of, whole

import sparse_attn as sa

#: Keys of a block beside each page size: of one page, of a part of one, and of several.
SIZES = [(16, 16), (16, 64), (48, 32), (64, 64), (64, 192), (96, 96), (128, 64)]
CASES = [(selector, *sizes) for selector in ("minmax", "mean") for sizes in SIZES]
CASES += [("mean", 64, 48), ("mean", 128, 80)]  # blocks that end inside groups


def pooled(selector, sketch=None, block=64, **changes):
    return pattern_of(selector, block, sketch=sketch, **changes)


def alone(pattern, query, b, key, table):
    """The call of sequence b without pages or sketch: on its keys, or on what codes stand for."""
    key = key.transpose(0, 1)[None]
    plain = replace(pattern, sketch=None)
    if pattern.selector == "minmax":
        return query, key, plain
    pages = sketched_keys(pattern.sketch)[table[b].long().cpu()]
    numbers = pages.transpose(0, 1).flatten(1, 2)[None, :, : key.shape[2]]
    return query.float(), numbers.to(key.device, torch.float32), plain


def assert_lists_of(layout, b, own):
    """Sequence b of a layout has the lists of a layout of its own, and no others."""
    queries, keys = own.counts.shape[-1], own.num_kv_blocks
    assert torch.equal(layout.counts[b, :, :queries], own.counts[0])
    assert not layout.counts[b, :, queries:].any()
    assert torch.equal(layout.indices[b, :, :queries, :keys], own.indices[0])


@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("Sq", [1, 70])
@pytest.mark.parametrize("selector, page_size, block", CASES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_lists_are_those_of_the_keys_alone(device, selector, dtype, page_size, block, Sq, group):
    """Lengths end inside groups and pages; the cache is full of NaN where no token is."""
    key_cache, value_cache, table, news, sketch = whole(device, page_size, dtype)
    query = 2 * torch.randn(len(LENGTHS), 4, Sq, DIM, device=device).to(dtype)
    pattern = pooled(selector, sketch, (32, block), group=group)
    pages = {"block_table": table, "seqused_k": used_of(device)}
    layout = sa.select_blocks(query, key_cache, pattern, is_causal=True, **pages)
    for b, (key, _) in enumerate(news):
        own = alone(pattern, query[b : b + 1], b, key, table)
        assert_lists_of(layout, b, sa.select_blocks(*own, is_causal=True))
    call = (query, key_cache, value_cache, *pages.values())
    out = sa.paged_attention(*call, pattern=pattern, is_causal=True)
    again = sa.paged_attention(*call, pattern=sa.BlockSparse(layout), is_causal=True)
    assert torch.equal(out, again)
    nothing = torch.full_like(key_cache, torch.nan)
    unread = sa.select_blocks(query, nothing, pattern, is_causal=True, **pages)
    assert torch.equal(unread.indices, layout.indices)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (70, 0, 40, 1), (3, 33, 0, 0)], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_packed_queries_choose_as_alone(device, selector, is_causal, page_size, rows, group):
    key_cache, value_cache, table, news, sketch = whole(device, page_size)
    query = 2 * torch.randn(sum(rows), 4, DIM, device=device)
    pattern = pooled(selector, sketch, (16, 64), group=group)
    ends = torch.tensor([0, *rows], device=device).cumsum(0)
    placing = {"is_causal": is_causal, "cu_seq_q": ends.int(), "max_q": max(rows) + 9}
    pages = {"block_table": table, "seqused_k": used_of(device)}
    layout = sa.select_blocks(query, key_cache, pattern, **pages, **placing)
    for b, (key, _) in enumerate(news):
        rows_of_b = query[ends[b] : ends[b + 1]].transpose(0, 1)[None]
        own = alone(pattern, rows_of_b, b, key, table)
        assert_lists_of(layout, b, sa.select_blocks(*own, is_causal=is_causal))
    call = (query, key_cache, value_cache, *pages.values())
    out = sa.paged_attention(*call, pattern=pattern, **placing)
    again = sa.paged_attention(*call, pattern=sa.BlockSparse(layout), **placing)
    assert torch.equal(out, again)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
def test_groups_keep_their_ranges(device, selector):
    """Tokens of a group that a sequence does not count are in its ranges, those of others not."""
    key_cache, _, table, news, sketch = whole(device, 64)
    used = used_of(device) - torch.tensor([37, 16, 40, 66], dtype=torch.int32, device=device)
    query = 2 * torch.randn(len(LENGTHS), 4, 50, DIM, device=device)
    pattern = pooled(selector, sketch, (16, 64), mass=None, budget_blocks=2, sink_blocks=0)
    pages = {"block_table": table, "seqused_k": used}
    layout = sa.select_blocks(query, key_cache, pattern, **pages)
    for b, (key, _) in enumerate(news):
        key = key.transpose(0, 1)[None]
        own = replace(pattern, sketch=sa.KeySketch(key))
        counted = key[:, :, : int(used[b])]
        assert_lists_of(layout, b, sa.select_blocks(query[b : b + 1], counted, own))


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.sanitizer
def test_malformed_tables_read_nothing_outside(device, selector):
    key_cache, value_cache, table, _, sketch = whole(device, 64)
    value_cache.nan_to_num_(0)
    query = torch.randn(len(LENGTHS), 4, 40, DIM, device=device)
    wild = torch.full_like(table, 2**30)
    wild[:, 1:] = -5
    used = torch.tensor([2**30, -3, 0, 90], dtype=torch.int32, device=device)
    with malformed(device, r"seqused_k\[0\] from 0 to \d+, the keys it has room for"):
        sa.paged_attention(
            query, key_cache, value_cache, wild, used, pattern=pooled(selector, sketch)
        )
    used.clamp_(0, 100)
    with malformed(device, r"block_table\[0, 0\] to name one of the \d+ pages of the cache"):
        sa.paged_attention(
            query, key_cache, value_cache, wild, used, pattern=pooled(selector, sketch)
        )


def test_wrong_calls(device):
    key_cache, value_cache, table, news, sketch = whole(device, 96)
    query = torch.randn(len(LENGTHS), 4, 40, DIM, device=device)
    call = (query, key_cache, value_cache, table, used_of(device))
    key = news[0][:1].transpose(1, 2)
    for wrong, sentence in {
        pooled("minmax", sa.KeySketch(key)): "a paged sketch, got a sketch that is not paged",
        pooled("minmax", sa.KeySketch(key_cache[:5], paged=True)): "a sketch of key's shape",
        pooled(
            "minmax", sa.KeySketch(key_cache[:, :, :1].contiguous(), paged=True)
        ): "a sketch of key's sha",
        pooled(
            "minmax", sketch, 48
        ): "a block_size of keys that is a multiple of 32, the tokens of a group",
    }.items():
        with pytest.raises(ValueError, match=f"select_blocks: expected {sentence}"):
            sa.paged_attention(*call, pattern=wrong)
    with pytest.raises(ValueError, match="expected a sketch that is not paged, got a paged sketch"):
        sa.select_blocks(query[:1], key, pooled("minmax", sketch))


@pytest.mark.parametrize("selector", ["minmax", "mean"])
def test_opcheck(device, selector):
    key_cache, _, table, _, sketch = whole(device, 64)
    assert key_cache.shape == (PAGES, 64, HEADS, DIM)
    query = torch.randn(len(LENGTHS), 4, 40, DIM, device=device)
    given = pooled(selector, sketch)._arguments()
    given |= {"block_table": table, "seqused_k": used_of(device)}
    torch.library.opcheck(
        torch.ops.sparse_attn.select_blocks.default, (query, key_cache.nan_to_num(0)), given
    )

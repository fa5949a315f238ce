"""What the lists of block selection keep (NaN, ties, planted keys), and attention over them.

The lists depend on no other entry of the batch, and on no plan of the device.
"""

import dataclasses
import time

import pytest
import torch
from reference import Shape
from selection import BLOCK, SELECTORS, by_budget, pattern_of

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference


@pytest.mark.parametrize("selector", SELECTORS)
def test_keys_that_do_not_exist_never_count(device, selector):
    """Padding and the tail of a cache hold NaN; a block of nothing else is not chosen by mass."""
    query, key, _ = Shape(1, 2, 1, 64, 128, 32).make(device)
    pattern = pattern_of(selector, row_step=8, sink_blocks=0)
    bounds = torch.tensor([21, 64], dtype=torch.int32, device=device).expand(1, 1, 64, 2)
    clean = sa.select_blocks(query, key, pattern, is_causal=True, key_bounds=bounds, query_offset=0)
    key[:, :, :21] = torch.nan
    key[:, :, 64:] = torch.nan
    dirty = sa.select_blocks(query, key, pattern, is_causal=True, key_bounds=bounds, query_offset=0)
    assert clean == dirty and int(dirty.counts.max()) <= 3


@pytest.mark.parametrize("selector", [*SELECTORS, "sketch"])
@pytest.mark.parametrize("group", ["q", "kv"])
def test_a_row_never_loses_all_that_it_sees(device, selector, group):
    """Few keys or rows may have no pair on an antidiagonal, so that no block has a share."""
    query, key, _ = Shape(1, 2, 1, 1, 1024, 16).make(device)
    pattern = pattern_of(selector, 64, 0.9, row_step=1, group=group)
    bounds = torch.tensor([96, 103], dtype=torch.int32, device=device).view(1, 1, 1, 2)
    layout = sa.select_blocks(query, key, pattern, key_bounds=bounds)
    assert (layout.counts == 1).all() and (layout.indices[..., 0] == 1).all()
    if selector == "sketch":  # takes no more queries
        return
    query, key, _ = Shape(1, 2, 1, 100, 1, 16).make(device)
    pattern = pattern_of(selector, 64, 0.9, row_step=1, group=group, sink_blocks=0, local_blocks=0)
    layout = sa.select_blocks(query, key, pattern, is_causal=True, query_offset=0)
    assert (layout.counts == 1).all()


def test_a_nan_in_a_key_keeps_what_it_reaches(device):
    query, key, _ = Shape(1, 1, 1, 32, 160, 32).make(device)
    key[:, :, [40, 3 * BLOCK]] = torch.nan  # inside a block, and the first of one
    for selector in ("mixed", "mean", "antidiagonal", "vertical_slash"):
        pattern = pattern_of(selector, mass=0.01, sink_blocks=0)
        kept = sa.select_blocks(query, key, pattern).to_mask()
        assert kept[..., 40 // BLOCK].all() and kept.all() == (selector != "mean")
    clean = sa.select_blocks(query, key.nan_to_num(0), pattern_of("minmax", mass=0.01))
    assert sa.select_blocks(query, key, pattern_of("minmax", mass=0.01)) == clean


def test_bounds_of_queries_that_are_no_numbers_change_no_other_block(device):
    """By minmax, whose signs choose among the keys' extremes; zeros have both."""
    query, key, _ = Shape(1, 1, 1, 64, 160, 64).make(device, torch.float16)
    query[..., 40, :], query[..., 41, :] = 0.0, -0.0
    pattern = pattern_of("minmax", mass=0.3)
    clean = sa.select_blocks(query, key, pattern).to_mask()
    query[..., 3, 5], query[..., 20, :] = torch.nan, torch.inf
    dirty = sa.select_blocks(query, key, pattern).to_mask()
    assert dirty[..., 1, :].all() and not clean.all(-1).any()  # infinities keep every block
    assert torch.equal(dirty[..., 2:, :], clean[..., 2:, :])


@pytest.mark.parametrize("selector", SELECTORS)
def test_ties_go_to_the_lower_block(device, selector):
    query = torch.ones(1, 1, 16, 16, device=device)
    key = torch.ones(1, 1, 160, 16, device=device)
    pattern = by_budget(selector=selector, budget_blocks=4, sink_blocks=0, row_step=8)
    if selector != "vertical_slash":  # whose diagonals fall off
        assert sa.select_blocks(query, key, pattern).indices[0, 0, 0, :4].tolist() == [0, 1, 2, 9]
    halves = dataclasses.replace(pattern, mass=0.45, budget_blocks=None)
    counts = sa.select_blocks(query, key, halves).counts
    assert counts.item() == 5 or selector == "vertical_slash"


@pytest.mark.parametrize("selector", SELECTORS)
def test_one_block_and_no_rows(device, selector):
    query, key, _ = Shape(1, 2, 1, 5, 9, 16).make(device)
    pattern = pattern_of(selector)
    layout = sa.select_blocks(query, key, pattern, is_causal=True)
    assert layout.counts.flatten().tolist() == [1, 1]
    for Sq, Skv in ((0, 9), (5, 0)):
        layout = sa.select_blocks(query[:, :, :Sq], key[:, :, :Skv], pattern)
        assert not layout.counts.any()


def needles(device, length=1024, head_dim=64):
    """Flat attention but for one key of block 3, which every query sees far above the others."""
    query, key, value = Shape(1, 1, 1, length, length, head_dim).make(device)
    query, key = 0.1 * query, 0.1 * key
    query[..., 0] = 8
    key[:, :, 3 * 64 + 17, 0] = 16
    return query, key, value


@pytest.mark.parametrize("selector", ["mixed", "antidiagonal", "minmax", "vertical_slash"])
def test_a_planted_needle_is_found(device, selector):
    query, key, _ = needles(device)
    pattern = pattern_of(selector, 64, mass=0.3, sink_blocks=0)
    layout = sa.select_blocks(query, key, pattern, is_causal=True)
    assert layout.to_mask()[0, 0, 4:, 3].all()
    assert layout.counts.double().mean() < 4  # of 8.5


def test_few_queries_see_a_needle_by_sampling_every_row(device):
    """Fewer than `row_step` have no sampled row: means alone, in which one key of eight drowns."""
    query, key, _ = Shape(1, 32, 32, 8, 1024, 64).make(device)
    key[:, :, 3 * 64 + 17] = 2.5 * query[:, :, 7]
    found = []
    for row_step in (1, 8, 16):
        pattern = by_budget(64, "mixed", budget_blocks=3, row_step=row_step)
        found.append(sa.select_blocks(query, key, pattern).to_mask()[..., 3].double().mean().item())
    assert found[:2] == [1.0, 1.0] and found[2] < 0.6


@pytest.mark.parametrize("selector", ["mixed", "antidiagonal", "vertical_slash"])
def test_a_planted_diagonal_is_found(device, selector):
    """Each row sees the key 300 before it: rotations by a position's angle."""
    position = torch.arange(1024, device=device)[:, None].double()
    rate = torch.arange(1, 33, device=device) * 0.37
    key = torch.cat([torch.cos(position * rate), torch.sin(position * rate)], -1)[None, None]
    query = 4 * key.roll(300, 2)
    pattern = pattern_of(selector, 64, mass=0.6, sink_blocks=0)
    layout = sa.select_blocks(query.float(), key.float(), pattern, is_causal=True)
    mask = layout.to_mask()[0, 0]
    reached = [(i, (64 * i + 32 - 300) // 64) for i in range(6, 16)]
    assert all(mask[i, j] for i, j in reached)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("block", [32, (64, 32), (16, 48)], ids=str)
def test_attention_is_block_sparse_over_the_selection(attend, device, block, group, is_causal):
    shape = attend.fit(Shape(2, 4, 2, 130, 190, 64))
    query, key, value = shape.make(device, attend.dtype)
    rows, keys = block if isinstance(block, tuple) else (block, block)
    pattern = pattern_of(block=(max(shape.block, rows), keys), group=group)
    result = attend(pattern, query, key, value, is_causal=is_causal, return_lse=True)
    assert_close_to_reference(result, query, key, value, pattern, is_causal=is_causal)
    layout = sa.select_blocks(query, key, pattern, is_causal=is_causal)
    listed = attend(sa.BlockSparse(layout), query, key, value, is_causal=is_causal)
    assert torch.equal(result[0], listed)


def test_one_query_attends_to_lists_of_key_heads(attend, device):
    shape = attend.fit(Shape(2, 8, 2, 1, 900, 64))
    query, key, value = shape.make(device, attend.dtype)
    pattern = pattern_of("minmax", shape.block, group="kv", mass=0.5)
    result = attend(pattern, query, key, value, return_lse=True)
    assert_close_to_reference(result, query, key, value, pattern)


@pytest.mark.parametrize("budget", [{"mass": 0.5}, {"mass": None, "budget_share": 0.5}], ids=str)
def test_lists_do_not_depend_on_the_batch(device, budget):
    """Two heads have the same scores in other places, so that rounding decides between blocks."""
    entries, rows, blocks = 9, 160, 1100  # few lists alone, many together
    query = torch.zeros(entries, 2, 16 * rows, 16, device=device)
    key = torch.zeros(entries, 1, 16 * blocks, 16, device=device)
    scores = torch.randn(entries, 1, rows, blocks, device=device)
    scores = torch.cat([scores, scores[..., torch.randperm(blocks, device=device)]], 1)

    def lists(some):
        pattern = sa.BlockTopK(16, selector=scores[some], group="kv", **budget)
        return sa.select_blocks(query[some], key[some], pattern)

    together = lists(slice(None))
    for b in range(entries):
        alone = lists(slice(b, b + 1))
        assert torch.equal(together.counts[b], alone.counts[0])
        assert torch.equal(together.indices[b], alone.indices[0])


@pytest.mark.parametrize("Sq", [20, 300])
def test_lists_do_not_depend_on_how_many_thread_blocks_share_the_keys(device, Sq):
    entries = 140 if device == "cuda" else 3  # of one, several thread blocks take the keys
    query = 2 * torch.randn(entries, 2, Sq, 64, device=device, dtype=torch.float16)
    key = torch.randn(entries, 1, 4250, 64, device=device, dtype=torch.float16)
    pattern = pattern_of("mixed", (128, 64), mass=0.9)
    together = sa.select_blocks(query, key, pattern, is_causal=True)
    for b in (0, entries - 1):
        alone = sa.select_blocks(query[b : b + 1], key[b : b + 1], pattern, is_causal=True)
        assert torch.equal(together.counts[b], alone.counts[0])
        assert torch.equal(together.indices[b], alone.indices[0])


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_block_far_longer_than_the_keys_is_kept(device, selector):
    """And not walked through key by key, which took half a minute."""
    query, key, _ = Shape(1, 2, 1, 70, 90, 16).make(device)
    pattern = sa.BlockTopK((16, 2**20), selector=selector)
    start = time.monotonic()
    layout = sa.select_blocks(query, key, pattern, is_causal=True)
    assert time.monotonic() - start < 10
    assert (layout.counts == 1).all() and (layout.indices == 0).all()

"""Block selection against a readable float64 selection, and attention over the selected list."""

import math

import pytest
import torch
from reference import Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

BLOCK = 16


def pooled(tensor, exists=None):
    """Means of the blocks of a (length, D) tensor, in float64."""
    tensor = tensor.double()
    exists = torch.ones(len(tensor)).bool() if exists is None else exists
    blocks = range(0, len(tensor), BLOCK)
    return torch.stack(
        [tensor[n : n + BLOCK][exists[n : n + BLOCK]].mean(0).nan_to_num(0) for n in blocks]
    )


def forced_and_visible(pattern, index, Sq, Skv, offset, is_causal, bounds):
    """Forced and visible blocks of query block `index`; `bounds` are the [lo, hi) of its head."""
    rows = range(index * BLOCK, min((index + 1) * BLOCK, Sq))
    seen = set()
    for i in rows:
        low, high = (0, Skv) if bounds is None else bounds[i].tolist()
        seen.update(range(max(low, 0), min(high, i + offset + 1 if is_causal else Skv, Skv)))
    visible = set(range(min(seen) // BLOCK, max(seen) // BLOCK + 1)) if seen else set()
    first, last = (rows[0] + offset) // BLOCK, (rows[-1] + offset) // BLOCK
    forced = set(range(pattern.sink_blocks)) | set(range(first, last + 1))
    forced |= set(range(last - pattern.local_blocks + 1, last + 1))
    if not is_causal:
        forced |= set(range(last + 1, last + 1 + pattern.local_blocks))
    return forced & visible, visible


def check_selection(pattern, query, key, is_causal, query_offset=None, exists=None, **common):
    """Every list holds the forced blocks, the right number, and no worse block than it leaves."""
    if query_offset is not None:
        common["query_offset"] = query_offset
    bounds = common.get("key_bounds")
    layout = sa.select_blocks(query, key, pattern, is_causal=is_causal, **common)
    chosen = layout.to_mask().cpu()
    batch, heads, Sq, D = query.shape
    Skv = key.shape[2]
    assert chosen.shape == (batch, heads, -(-Sq // BLOCK), -(-Skv // BLOCK))
    for b in range(batch):
        offset = Skv - Sq if query_offset is None else query_offset
        offset = int(offset[b]) if isinstance(offset, torch.Tensor) else offset
        for h in range(heads):
            keys = pooled(key[b, h // (heads // key.shape[1])].cpu(), exists)
            scores = pooled(query[b, h].cpu()) @ keys.mT / math.sqrt(D)
            for index, row in enumerate(chosen[b, h]):
                rows = None if bounds is None else bounds[b, h % bounds.shape[1]].cpu()
                forced, visible = forced_and_visible(
                    pattern, index, Sq, Skv, offset, is_causal, rows
                )
                if pattern.budget_blocks is not None:
                    wanted = min(pattern.budget_blocks, len(visible))
                else:
                    wanted = math.ceil(pattern.budget_share * len(visible))
                kept = set(row.nonzero().flatten().tolist())
                assert len(kept) == max(len(forced), wanted) and forced <= kept
                assert kept <= visible
                left = visible - kept
                if left and kept - forced:
                    worst = min(scores[index, block] for block in kept - forced)
                    assert worst >= max(scores[index, block] for block in left) - 1e-6


PATTERNS = {
    "share": sa.BlockTopK(BLOCK, budget_share=0.3),
    "share-tenth": sa.BlockTopK(BLOCK, budget_share=0.1),
    "all": sa.BlockTopK(BLOCK, budget_share=1.0),
    "count": sa.BlockTopK(BLOCK, budget_blocks=4),
    "count-large": sa.BlockTopK(BLOCK, budget_blocks=2**40),
    "forced-beyond-budget": sa.BlockTopK(BLOCK, budget_blocks=1, sink_blocks=2, local_blocks=3),
    "nothing-forced": sa.BlockTopK(BLOCK, budget_blocks=3, sink_blocks=0, local_blocks=0),
}
LENGTHS = [(160, 160), (100, 131), (1, 150), (150, 40)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("Sq, Skv", LENGTHS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_selection(device, pattern, Sq, Skv, is_causal):
    query, key, _ = Shape(2, 4, 2, Sq, Skv, 32).make(device, memory="transposed")
    check_selection(pattern, query, key, is_causal)


def test_selection_with_offsets(device):
    query, key, _ = Shape(2, 2, 1, 40, 200, 32).make(device)
    for is_causal in (False, True):
        check_selection(
            sa.BlockTopK(BLOCK, budget_share=0.4), query, key, is_causal, query_offset=23
        )
        offsets = torch.tensor([-20, 90], dtype=torch.int32, device=device)
        check_selection(
            sa.BlockTopK(BLOCK, budget_share=0.4), query, key, is_causal, query_offset=offsets
        )


def test_padding_takes_no_part_in_the_means(device):
    query, key, _ = Shape(1, 2, 1, 64, 64, 32).make(device)
    key[:, :, :5] = 1e6
    bounds = torch.tensor([5, 64], dtype=torch.int32, device=device).expand(1, 1, 64, 2)
    exists = torch.arange(64) >= 5
    pattern = sa.BlockTopK(BLOCK, budget_blocks=2, sink_blocks=0)
    check_selection(pattern, query, key, False, exists=exists, key_bounds=bounds)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_share_is_of_the_blocks_that_a_row_may_see(device, pattern, heads, is_causal):
    """Left padding of half the keys, and packed texts whose rows see their own keys alone."""
    query, key, _ = Shape(2, 2, 1, 320, 320, 32).make(device)
    padded = torch.tensor([160, 320]).expand(heads, 320, 2)
    text = torch.arange(320) // 130
    packed = torch.stack([text * 130, (text + 1) * 130], -1).expand(heads, 320, 2).clone()
    packed[-1, 200:] = torch.tensor([-7, 400])
    packed[:, 48:64] = 5  # a query block without keys
    bounds = torch.stack([padded, packed]).int().to(device)
    check_selection(pattern, query, key, is_causal, key_bounds=bounds)


def test_ties_go_to_the_lower_block(device):
    query = torch.ones(1, 1, 16, 16, device=device)
    key = torch.ones(1, 1, 160, 16, device=device)
    pattern = sa.BlockTopK(BLOCK, budget_blocks=4, sink_blocks=0, local_blocks=1)
    layout = sa.select_blocks(query, key, pattern)
    assert layout.indices[0, 0, 0, :4].tolist() == [0, 1, 2, 9]


def test_lists_are_ascending(device):
    query, key, _ = Shape(1, 2, 2, 128, 512, 16).make(device)
    layout = sa.select_blocks(query, key, sa.BlockTopK(BLOCK, budget_share=0.3))
    count = int(layout.counts.min())
    assert (layout.indices[..., 1:count] > layout.indices[..., : count - 1]).all()


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_attention_is_block_sparse_over_the_selection(attend, device, is_causal):
    shape = attend.fit(Shape(2, 4, 2, 130, 190, 64))
    query, key, value = shape.make(device, attend.dtype)
    pattern = sa.BlockTopK(max(shape.block, 32), budget_share=0.4)
    result = attend(pattern, query, key, value, is_causal=is_causal, return_lse=True)
    assert_close_to_reference(result, query, key, value, pattern, is_causal=is_causal)
    layout = sa.select_blocks(query, key, pattern, is_causal=is_causal)
    listed = attend(sa.BlockSparse(layout), query, key, value, is_causal=is_causal)
    assert torch.equal(result[0], listed)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"selector": "antidiagonal"}, "selector antidiagonal"),
        ({"selector": "minmax"}, "selector minmax"),
        ({"selector": "vertical_slash"}, "selector vertical_slash"),
        ({"mass": 0.9}, "mass"),
        ({"group": "kv"}, "group=kv"),
    ],
    ids=["antidiagonal", "minmax", "vertical_slash", "mass", "group"],
)
def test_what_is_not_served_says_so(device, change, words):
    query, key, value = Shape(1, 2, 1, 32, 32, 16).make(device)
    sentence = f"^sparse_attn::block_topk: not served: .*{words}"
    with pytest.raises(NotImplementedError, match=sentence):
        sa.block_topk_attention(query, key, value, block_size=16, **change)
    answer = sa.can_use(query, key, value, sa.BlockTopK(16, **change))
    assert not answer and words in answer.reasons[0]

"""BlockLayout: every constructor against its mask, contents checked, no alias, no sync."""

import copy

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import sparse_attn as sa
from sparse_attn import BlockLayout


def lists_of(mask):
    """Ascending block lists of a (..., NQ, NKV) mask, row by row."""
    return [row.nonzero().flatten().tolist() for row in mask.reshape(-1, mask.shape[-1])]


@pytest.mark.parametrize(
    "shape, full",
    [((3, 5), (1, 1)), ((4, 3, 5), (1, 4)), ((2, 4, 3, 5), (2, 4)), ((2, 1, 3, 5), (2, 1))],
    ids=str,
)
def test_from_mask(device, shape, full):
    mask = torch.rand(shape, device=device) < 0.5
    layout = BlockLayout.from_mask(mask, 32, 16)
    assert layout.counts.shape == (*full, 3) and layout.indices.shape == (*full, 3, 5)
    assert layout.counts.dtype == layout.indices.dtype == torch.int32
    assert (layout.block_q, layout.block_kv, layout.num_kv_blocks) == (32, 16, 5)
    rows = zip(layout.counts.flatten().tolist(), layout.indices.reshape(-1, 5), strict=True)
    assert [indices[:count].tolist() for count, indices in rows] == lists_of(mask)
    assert torch.equal(layout.to_mask(), mask.reshape(*full, 3, 5))


def test_from_mask_takes_any_strides(device):
    mask = (torch.rand(5, 6, device=device) < 0.5).mT
    assert torch.equal(BlockLayout.from_mask(mask, 16, 16).to_mask()[0, 0], mask)
    row = torch.tensor([True, False, True], device=device).expand(4, 3)
    assert torch.equal(BlockLayout.from_mask(row, 16, 16).to_mask()[0, 0], row)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_empty_masks(device, shape):
    layout = BlockLayout.from_mask(torch.zeros(shape, device=device).bool(), 16, 16)
    assert layout.to_mask().shape == (1, 1, *shape)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="syncs are seen on CUDA only")
def test_from_mask_never_syncs(device):
    mask = torch.rand(2, 4, 8, 8, device="cuda") < 0.5
    BlockLayout.from_mask(mask, 64, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        BlockLayout.from_mask(mask, 64, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_indices_are_sorted_and_not_shared(device):
    counts = torch.tensor([2, 0, 3], device=device)
    indices = torch.tensor([[3, 1, 99], [-5, 7, 7], [2, 0, 1]], device=device)
    layout = BlockLayout(counts, indices, 16, 16, 4)
    want = [[1, 3, 0], [0, 0, 0], [0, 1, 2]]
    assert layout.indices[0, 0].tolist() == want
    counts.zero_()
    indices.zero_()
    assert layout.counts.tolist() == [[[2, 0, 3]]] and layout.indices[0, 0].tolist() == want


def test_int32_tensors_in_order_are_not_shared_either(device):
    counts = torch.ones(1, 1, 2, dtype=torch.int32, device=device)
    indices = torch.zeros(1, 1, 2, 1, dtype=torch.int32, device=device)
    layout = BlockLayout(counts, indices, 16, 16, 4)
    counts.fill_(0)
    indices.fill_(3)
    assert layout.counts.tolist() == [[[1, 1]]] and layout.indices.flatten().tolist() == [0, 0]


def test_from_csr(device):
    mask = torch.rand(4, 6) < 0.4
    csr = mask.double().to_sparse_csr()
    crow, col = csr.crow_indices().to(device), csr.col_indices().to(device)
    layout = BlockLayout.from_csr(crow, col, (4, 6), 16, 32)
    assert torch.equal(layout.to_mask()[0, 0].cpu(), mask)


def test_from_csr_with_heads_and_unordered_columns(device):
    crow = torch.tensor([[0, 2, 3], [0, 0, 3]], device=device)
    col = torch.tensor([[2, 0, 1], [2, 1, 0]], device=device)
    layout = BlockLayout.from_csr(crow, col, (2, 2, 3), 16, 16)
    want = torch.tensor([[[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [1, 1, 1]]]).bool()
    assert torch.equal(layout.to_mask()[0].cpu(), want)


def test_from_csr_without_entries(device):
    crow, col = torch.zeros(4, device=device).long(), torch.zeros(0, device=device).long()
    assert BlockLayout.from_csr(crow, col, (3, 2), 16, 16).to_mask().sum() == 0


def causal(b, h, q, k):
    return q >= k


def by_blocks(b, h, q, k):
    return (q // 128 + k // 128 + b) % 2 == 0


def test_flex_round_trip():
    mask = torch.rand(2, 3, 4, 5) < 0.5
    layout = BlockLayout.from_mask(mask, 32, 16)
    flex = layout.to_flex()
    assert isinstance(flex, BlockMask) and flex.seq_lengths == (128, 80)
    assert torch.equal(BlockLayout.from_flex(flex).to_mask(), mask)
    longer = BlockLayout(layout.counts, layout.indices[..., :5], 32, 16, 9)
    assert BlockLayout.from_flex(longer.to_flex()).num_kv_blocks == 9


def test_to_flex_gives_the_same_attention():
    query, key, value = torch.randn(3, 2, 2, 70, 16)
    mask = torch.rand(1, 2, 5, 3) < 0.6
    mask[..., 0] = True
    layout = BlockLayout.from_mask(mask, 16, 32)
    want = flex_attention(query, key, value, block_mask=layout.to_flex(70, 70))
    out = sa.block_sparse_attention(query, key, value, layout)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("whole", [False, True], ids=["exact", "whole"])
def test_from_flex_with_partial_blocks(whole):
    flex = create_block_mask(causal, 1, 1, 300, 300, device="cpu")
    layout = BlockLayout.from_flex(flex, whole=whole)
    assert torch.equal(layout.to_mask()[0, 0], torch.ones(3, 3).tril().bool())
    assert (layout.bits is None) == whole
    mask = sa.BlockSparse(layout).mask(300, 300)[0, 0]
    blocks = layout.to_mask()[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    exact = torch.ones(300, 300).tril().bool()
    assert torch.equal(mask, blocks[:300, :300] if whole else exact)


@pytest.mark.parametrize("Sq, Skv", [(300, 200), (256, 130), (130, 256)])
def test_from_flex_takes_blocks_that_hang_over_the_end(Sq, Skv):
    flex = create_block_mask(by_blocks, 2, 1, Sq, Skv, device="cpu")
    mask = BlockLayout.from_flex(flex).to_mask()
    want = by_blocks(*torch.meshgrid(*map(torch.arange, (2, 1, Sq, Skv)), indexing="ij"))
    assert torch.equal(mask, want[:, :, ::128, ::128])


def test_makers():
    local = BlockLayout.local(64, 64, 16, 16, (1, 0)).to_mask()[0, 0]
    assert torch.equal(local, torch.ones(4, 4).tril().triu(-1).bool())
    decode = BlockLayout.local(1, 64, 16, 16, (1, 0)).to_mask()[0, 0]
    assert decode.tolist() == [[False, False, True, True]]
    wide = BlockLayout.local(64, 64, 32, 16, 0).to_mask()[0, 0]
    assert wide.int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    strided = BlockLayout.strided(80, 80, 16, 16, 1, 2).to_mask()[0, 0]
    assert strided[4].int().tolist() == [0, 1, 0, 1, 1]
    bigbird = BlockLayout.bigbird(256, 256, 16, 16, window=1, num_global=2, num_random=3)
    mask = bigbird.to_mask()[0, 0]
    assert mask[:2].all() and mask[:, :2].all() and mask.diagonal().all()
    assert mask.diagonal(1).all() and mask.diagonal(-1).all()
    assert (mask.sum(-1)[4:12] <= 2 + 3 + 3).all() and mask.sum() > mask[4:].sum()
    again = BlockLayout.bigbird(256, 256, 16, 16, window=1, num_global=2, num_random=3)
    assert torch.equal(mask, again.to_mask()[0, 0])


def test_a_given_device_holds_whatever_the_default_is():
    want = BlockLayout.bigbird(256, 256, 16, 16, device="cpu")
    with torch.device("meta"):
        assert BlockLayout.bigbird(256, 256, 16, 16, device="cpu") == want


def test_random_blocks_are_those_of_the_seed_whatever_the_default_dtype_is():
    want = BlockLayout.bigbird(256, 256, 16, 16)
    torch.set_default_dtype(torch.float64)
    try:
        assert BlockLayout.bigbird(256, 256, 16, 16) == want
    finally:
        torch.set_default_dtype(torch.float32)


def test_makers_take_large_numbers():
    size = (80, 80, 16, 16)
    assert BlockLayout.local(*size, 2**70).to_mask().all()
    assert BlockLayout.bigbird(*size, 0, num_global=2**70).to_mask().all()
    assert BlockLayout.bigbird(*size, 0, num_random=2**70).to_mask().all()
    assert BlockLayout.strided(*size, 2**70, 2**70) == BlockLayout.local(*size, (None, 0))


def test_seeds_of_numpy():
    numpy = pytest.importorskip("numpy")
    size = (99, 99, 16, 16)
    assert BlockLayout.bigbird(*size, seed=numpy.int64(3)) == BlockLayout.bigbird(*size, seed=3)


def test_layout_moves_and_copies(device):
    layout = BlockLayout.local(64, 64, 16, 16, 1).to(device)
    assert layout.counts.device.type == device
    twin = copy.deepcopy(layout)
    assert twin == layout and twin is not layout and hash(twin) == hash(layout)
    with pytest.raises(AttributeError):
        layout.block_q = 3


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64],
    ids=str,
)
def test_indices_of_any_integer_dtype(dtype):
    counts, indices = torch.tensor([2, 1]), torch.tensor([[50, 3], [100, 7]])
    want = BlockLayout(counts, indices, 16, 16, 300)
    assert BlockLayout(counts.to(dtype), indices.to(dtype), 16, 16, 300) == want
    crow, col = torch.tensor([0, 2, 3]), torch.tensor([3, 50, 100])
    assert BlockLayout.from_csr(crow.to(dtype), col.to(dtype), (2, 300), 16, 16) == want


def test_indices_past_63_bits_are_refused_as_large():
    one, many = torch.tensor([1]), torch.tensor([2**64 - 1], dtype=torch.uint64)
    with pytest.raises(ValueError, match="indices from 0 to 3, got 9223372036854775807"):
        BlockLayout(one, many[None], 16, 16, 4)
    with pytest.raises(ValueError, match="counts between 0 .*, got 9223372036854775807"):
        BlockLayout(many, one[None], 16, 16, 4)


ONE = torch.ones(1, dtype=torch.int32)
REFUSED = {
    "duplicate": (lambda: BlockLayout(ONE * 2, ONE[None].expand(1, 2), 16, 16, 4), "block 1 twice"),
    "index": (lambda: BlockLayout(ONE, ONE[None] * 4, 16, 16, 4), "indices from 0 to 3, got 4"),
    "negative": (lambda: BlockLayout(ONE, -ONE[None], 16, 16, 4), "indices from 0 to 3, got -1"),
    "count": (lambda: BlockLayout(ONE * 2, ONE[None], 16, 16, 4), "counts between 0 and the 1"),
    "count<0": (lambda: BlockLayout(-ONE, ONE[None], 16, 16, 4), "row, got -1"),
    "block_q": (lambda: BlockLayout(ONE, ONE[None], 8, 16, 4), "block_q that is a positive .* 8"),
    "block_kv": (lambda: BlockLayout(ONE, ONE[None], 16, 40, 4), "block_kv that is a .* got 40"),
    "dtype": (lambda: BlockLayout(ONE.float(), ONE[None], 16, 16, 4), "counts of an integer dtype"),
    "rank": (
        lambda: BlockLayout(ONE[0], ONE[None], 16, 16, 4),
        r"counts of shape .* got shape \(\)",
    ),
    "rows": (
        lambda: BlockLayout(ONE, ONE[None].expand(2, 1), 16, 16, 4),
        r"indices of shape .* max",
    ),
    "contents": (
        lambda: BlockLayout(ONE, ONE[None].to("meta"), 16, 16, 4),
        "indices with contents",
    ),
    "large-block": (lambda: BlockLayout(ONE, ONE[None], 2**40, 16, 4), "block_q of at most"),
    "many-blocks": (lambda: BlockLayout(ONE, ONE[None], 16, 16, 2**40), "num_kv_blocks of at most"),
    "flex-lengths": (
        lambda: BlockLayout.local(32, 32, 16, 16, 1).to_flex(100, 100),
        "a layout of 7x7 blocks for 100 queries and 100 keys, got 2x2",
    ),
    "flex-heads": (
        lambda: BlockLayout.from_mask(torch.ones(2, 2, 2).bool(), 16, 16).to_flex(heads=3),
        "heads as a multiple of the layout's 2, got 3",
    ),
    "mask-rank": (
        lambda: BlockLayout.from_mask(ONE.bool(), 16, 16),
        r"mask of shape \(NQ, NKV\), \(H",
    ),
    "mask-dtype": (
        lambda: BlockLayout.from_mask(ONE[None], 16, 16),
        r"sparse_attn\.BlockLayout: expected mask of dtype bool, got int32",
    ),
    "mask-block": (lambda: BlockLayout.from_mask(ONE[None].bool(), 16, 0), "block_kv .* got 0"),
    "crow": (lambda: BlockLayout.from_csr(ONE, ONE, (2, 3), 16, 16), r"crow of shape \(3,\)"),
    "crow-falls": (
        lambda: BlockLayout.from_csr(torch.tensor([0, 2, 1]), ONE, (2, 3), 16, 16),
        r"crow that rises from 0 to 1, got \[0, 2, 1\]",
    ),
    "long": (lambda: BlockLayout.local(10**30, 64, 16, 16, 1), "Sq of at most 536870911, got 1000"),
    "device": (
        lambda: BlockLayout.local(64, 64, 16, 16, 1, device="gpu"),
        "device to .* got 'gpu'",
    ),
    "to": (lambda: BlockLayout.local(64, 64, 16, 16, 1).to("cuda0"), "device to .* got 'cuda0'"),
    "seed": (lambda: BlockLayout.bigbird(64, 64, 16, 16, seed=2**64), "seed of 64 bits, got 1844"),
    "csr-column": (
        lambda: BlockLayout.from_csr(torch.tensor([0, 1]), ONE * 7, (1, 3), 16, 16),
        "indices from 0 to 2, got 7",
    ),
}


@pytest.mark.parametrize("make, sentence", REFUSED.values(), ids=REFUSED)
def test_wrong_contents_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockLayout([1], ONE[None], 16, 16, 4),
        lambda: BlockLayout(ONE, ONE[None], 16.0, 16, 4),
        lambda: BlockLayout.from_mask([[True]], 16, 16),
        lambda: BlockLayout.from_csr(ONE, ONE, 3, 16, 16),
        lambda: BlockLayout.from_flex("mask"),
        lambda: BlockLayout.local(64, 64, 16, 16, 1).to(torch.float16),
        lambda: BlockLayout.bigbird(64, 64, 16, 16, device=1.0),
        lambda: BlockLayout.bigbird(64, 64, 16, 16, seed="0"),
    ],
    ids=["counts", "block_q", "mask", "shape", "block_mask", "to", "device", "seed"],
)
def test_wrong_kinds_are_refused(make):
    with pytest.raises(TypeError, match=r"sparse_attn\.BlockLayout: expected .* got"):
        make()

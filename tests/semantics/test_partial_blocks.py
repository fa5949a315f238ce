"""Attention by layouts with partial blocks: exactly the pairs of the mask, on every engine."""

import pytest
import torch
from reference import DTYPES, Shape, random_layout, with_bits
from torch.nn.attention.flex_attention import create_block_mask

import sparse_attn as sa
from sparse_attn import BlockLayout, BlockSparse
from sparse_attn.testing import assert_close_to_reference

SIZES = [(16, 16), (32, 64), (48, 48), (64, 16), (64, 80), (128, 32), (128, 128), (192, 256)]
COMMON = {
    "plain": lambda s, d: {},
    "causal": lambda s, d: {"is_causal": True, "query_offset": s.Skv - s.Sq - 7},
    "softcap": lambda s, d: {"softcap": 3.0, "sink_logits": torch.randn(s.Hq, device=d)},
    "bounds": lambda s, d: {
        "key_bounds": torch.randint(0, s.Skv, (s.B, 1, s.Sq, 2), device=d).sort(-1).values.int()
    },
    "mask": lambda s, d: {"attn_mask": torch.rand(s.Sq, s.Skv, device=d) < 0.7},
}


def token_mask(shape, device, batch=1, heads=1):
    """Pairs with blocks of all kinds: whole, empty, dense, sparse, and rows without a key."""
    mask = torch.rand(batch, heads, shape.Sq, shape.Skv) < 0.5
    mask[..., :128] |= torch.rand(batch, heads, shape.Sq, min(128, shape.Skv)) < 0.97
    mask[:, :, 20:40] = False
    mask[..., 130:290] = True
    mask[:, :, :, 300:400] = torch.rand(batch, heads, shape.Sq, 100) < 0.01
    mask[:, :, 3] = mask[:, :, 64:80, :17] = False
    return mask.to(device)


@pytest.mark.parametrize("common", COMMON.values(), ids=COMMON)
@pytest.mark.parametrize("block_q, block_kv", SIZES)
def test_token_masks(attend, device, block_q, block_kv, common):
    shape = attend.fit(Shape(2, 4, 2, 203, 431, 64, block_q))
    tensors = shape.make(device, torch.bfloat16)
    pattern = BlockSparse(
        BlockLayout.from_token_mask(token_mask(shape, device), shape.block, block_kv)
    )
    arguments = common(shape, device)
    result = attend(pattern, *tensors, return_lse=True, **arguments)
    assert_close_to_reference(result, *tensors, pattern, **arguments)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 200, 256])
def test_head_dims(attend, device, dtype, head_dim):
    shape = attend.fit(Shape(1, 2, 1, 150, 431, head_dim, 128))
    for memory in ("contiguous", "transposed", "gaps"):
        tensors = shape.make(device, dtype, memory)
        pattern = BlockSparse(
            BlockLayout.from_token_mask(token_mask(shape, device), shape.block, 64)
        )
        if memory == "gaps" and not attend.serves(pattern, *tensors):
            continue
        result = attend(pattern, *tensors, return_lse=True)
        assert_close_to_reference(result, *tensors, pattern)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_lists_of_heads_and_batch_entries(attend, device, batch, heads):
    shape = attend.fit(Shape(3, 4, 2, 140, 431, 64, 64))
    tensors = shape.make(device, torch.float16)
    mask = token_mask(shape, device, batch, heads)
    pattern = BlockSparse(BlockLayout.from_token_mask(mask, shape.block, 64))
    result = attend(pattern, *tensors, return_lse=True)
    assert_close_to_reference(result, *tensors, pattern)


def test_few_queries(attend, device):
    """As decode has them, over chunks of keys."""
    for Sq in (1, 5, 16):
        shape = Shape(2, 8, 2, Sq, 4100, 64)
        tensors = shape.make(device, torch.bfloat16)
        for heads in (1, 8):
            layout = with_bits(random_layout(Sq, 4100, 128, 64, device, heads=heads))
            result = attend(BlockSparse(layout), *tensors, return_lse=True)
            assert_close_to_reference(result, *tensors, BlockSparse(layout))


def test_grids(attend, device):
    """A neighbourhood on a video's grid: tiles at its rim are partial."""
    layout, _ = BlockLayout.local_nd((5, 16, 20), (2, 3, 3), (2, 8, 8), device=device)
    shape = attend.fit(Shape(1, 2, 2, 1600, 1600, 64, layout.block_q))
    if shape.Sq != 1600:
        pytest.skip(f"takes up to {shape.Sq} queries")
    tensors = shape.make(device, torch.bfloat16)
    result = attend(BlockSparse(layout), *tensors, return_lse=True)
    assert_close_to_reference(result, *tensors, BlockSparse(layout))


def test_masks_of_flex_attention(attend, device):
    def document(b, h, q_idx, kv_idx):
        return (q_idx // 50 == kv_idx // 50) & (q_idx >= kv_idx)

    shape = attend.fit(Shape(1, 2, 1, 300, 300, 64, 128))
    tensors = shape.make(device, torch.bfloat16)
    flex = create_block_mask(document, 1, 1, shape.Sq, 300, device=device, BLOCK_SIZE=(128, 64))
    pattern = BlockSparse(BlockLayout.from_flex(flex))
    assert pattern.layout.bits is not None
    result = attend(pattern, *tensors, return_lse=True)
    assert_close_to_reference(result, *tensors, pattern)


def test_same_bits_run_after_run(attend, device):
    shape = attend.fit(Shape(2, 4, 2, 300, 700, 64, 64))
    tensors = shape.make(device, torch.bfloat16)
    pattern = BlockSparse(with_bits(random_layout(shape.Sq, 700, shape.block, 32, device)))
    first = attend(pattern, *tensors)
    assert all(torch.equal(attend(pattern, *tensors), first) for _ in range(3))


def lists(device, Sq, block_q, block_kv, num_kv, rows=3):
    """A full list with random bits, as tensors of the op."""
    num_q = -(-Sq // block_q)
    counts = torch.full((1, 1, num_q), num_kv, dtype=torch.int32, device=device)
    indices = torch.arange(num_kv, dtype=torch.int32, device=device).repeat(1, 1, num_q, 1)
    size = (rows, block_q, -(-block_kv // 32))
    bits = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device=device)
    partial = torch.randint(-1, rows, indices.shape, dtype=torch.int32, device=device)
    return counts, indices, partial, bits


@pytest.mark.parametrize("wrong", [-2, 3, 4, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("block_kv", [16, 64, 128])
def test_rows_of_bits_out_of_range_mask_nothing(attend, device, block_kv, wrong):
    shape = attend.fit(Shape(1, 2, 1, 200, 8 * block_kv, 64, 128))
    tensors = shape.make(device, torch.bfloat16)
    counts, indices, partial, bits = lists(device, shape.Sq, shape.block, block_kv, 8)
    partial[..., 1::2] = -1
    whole = BlockLayout._trusted(counts, indices, shape.block, block_kv, 8, partial, bits)
    malformed = partial.clone()
    malformed[..., 1::2] = wrong
    layout = BlockLayout._trusted(counts, indices, shape.block, block_kv, 8, malformed, bits)
    want = attend(BlockSparse(whole), *tensors)
    assert torch.equal(attend(BlockSparse(layout), *tensors), want)


def test_bits_of_any_strides(attend, device):
    shape = attend.fit(Shape(1, 2, 1, 200, 256, 64, 128))
    tensors = shape.make(device, torch.bfloat16)
    counts, indices, partial, bits = lists(device, shape.Sq, shape.block, 64, 4)
    sizes = (shape.block, 64, 4)
    want = attend(
        BlockSparse(BlockLayout._trusted(counts, indices, *sizes, partial, bits)), *tensors
    )
    turned = partial.mT.contiguous().mT, bits.mT.contiguous().mT
    layout = BlockLayout._trusted(counts, indices, *sizes, *turned)
    assert torch.equal(attend(BlockSparse(layout), *tensors), want)


def test_layouts_without_a_row_of_bits(attend, device):
    shape = attend.fit(Shape(1, 2, 1, 200, 256, 64, 128))
    tensors = shape.make(device, torch.bfloat16)
    counts, indices, partial, bits = lists(device, shape.Sq, shape.block, 64, 4)
    layout = BlockLayout._trusted(counts, indices, shape.block, 64, 4, partial, bits[:0])
    result = attend(BlockSparse(layout), *tensors, return_lse=True)
    assert_close_to_reference(result, *tensors, sa.Full())


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_packed_sequences(device, is_causal):
    lengths_q, lengths_k = [40, 100, 7], [150, 90, 170]
    layout = with_bits(random_layout(100, 170, 32, 48, device))
    cu_q, cu_k = (
        torch.tensor([0, *lengths], device=device).cumsum(0).int()
        for lengths in (lengths_q, lengths_k)
    )
    query = torch.randn(147, 4, 64, device=device, dtype=torch.float16)
    key, value = torch.randn(2, 410, 2, 64, device=device, dtype=torch.float16)
    pattern = BlockSparse(layout)
    out = sa.varlen_attention(
        query, key, value, cu_q, cu_k, 100, 170, pattern=pattern, is_causal=is_causal
    )
    allowed = pattern.mask(100, 170)[0, 0]
    for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        one = [
            tensor[first : first + size].transpose(0, 1)[None]
            for tensor, first, size in (
                (query, int(cu_q[b]), rows),
                (key, int(cu_k[b]), keys),
                (value, int(cu_k[b]), keys),
            )
        ]
        own = out[int(cu_q[b]) : int(cu_q[b]) + rows].transpose(0, 1)[None]
        common = {"attn_mask": allowed[:rows, :keys], "is_causal": is_causal}
        assert_close_to_reference(own, *one, sa.Full(), **common)


REFUSED = {
    "alone": ({"bits": None}, "bits beside partial, got None"),
    "without-rows": ({"partial": None}, "partial beside bits, got None"),
    "shape": (lambda a: {"partial": a["partial"][..., :1]}, r"partial of shape \(1, 1, 2, 4\)"),
    "dtype": (lambda a: {"partial": a["partial"].long()}, "partial of dtype int32, got int64"),
    "words": (lambda a: {"bits": a["bits"][..., :1]}, r"bits of shape \(rows, 128, 2\)"),
    "rows": (lambda a: {"bits": a["bits"][:, :64]}, r"bits of shape \(rows, 128, 2\)"),
    "rank": (lambda a: {"bits": a["bits"][0]}, r"bits of shape \(rows, 128, 2\), got .*128, 2\)"),
    "bits-dtype": (lambda a: {"bits": a["bits"].float()}, "bits of dtype int32, got float32"),
}


@pytest.mark.parametrize("change, sentence", REFUSED.values(), ids=REFUSED)
def test_refused_tensors(device, change, sentence):
    tensors = Shape(1, 2, 1, 200, 256, 64).make(device)
    names = ("counts", "indices", "partial", "bits")
    given = dict(zip(names, lists(device, 200, 128, 64, 4), strict=True))
    given |= change(given) if callable(change) else change
    with pytest.raises(RuntimeError, match=f"^sparse_attn::block_sparse: expected {sentence}"):
        torch.ops.sparse_attn.block_sparse(
            *tensors, **given, block_q=128, block_kv=64, num_kv_blocks=4
        )

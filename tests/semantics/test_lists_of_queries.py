"""Lists of one query each: few queries, as trained block selectors hand over."""

import pytest
import torch
from reference import DTYPES, Shape, random_layout, with_bits

import sparse_attn as sa
from sparse_attn import BlockLayout, BlockSparse
from sparse_attn.testing import assert_close_to_reference


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 200])
@pytest.mark.parametrize("lists", ["one", "key-heads"])
@pytest.mark.parametrize("Sq", [1, 2, 7, 16])
@pytest.mark.parametrize("block_q", [1])
def test_a_list_for_each_query(attend, device, block_q, Sq, lists, head_dim, dtype):
    keys = 2100 if device == "cuda" else 800  # a CPU cuts them into no chunks
    shape = Shape(2, 8, 2, Sq, keys, head_dim)
    tensors = shape.make(device, dtype)
    heads = 1 if lists == "one" else 2
    layout = random_layout(Sq, keys, block_q, 128, device, shape.B, heads, density=0.3)
    for pattern in (BlockSparse(layout), BlockSparse(with_bits(layout))):
        for common in ({}, {"is_causal": True, "query_offset": keys - 200, "softcap": 4.0}):
            result = attend(pattern, *tensors, return_lse=True, **common)
            assert_close_to_reference(result, *tensors, pattern, **common)


def test_a_row_of_a_batch_is_the_row_alone(attend, device):
    shape = Shape(3, 8, 2, 5, 1500, 64)
    query, key, value = shape.make(device, attend.dtype)
    layout = random_layout(5, 1500, 1, 64, device, batch=3, heads=2)
    out = attend(BlockSparse(layout), query, key, value)
    for b in range(3):
        counts, indices = layout.counts[b : b + 1], layout.indices[b : b + 1]
        own = BlockLayout._trusted(counts, indices, 1, 64, layout.num_kv_blocks)
        parts = (tensor[b : b + 1] for tensor in (query, key, value))
        assert torch.equal(attend(BlockSparse(own), *parts), out[b : b + 1])


@pytest.mark.parametrize("used", [(300, 77, 1), (256, 300, 0)], ids=str)
def test_pages(device, used):
    """Blocks of 64 over pages of 32: each token of three sequences has a list."""
    Sq, batch, table = 3, 3, torch.randperm(30, device=device).int().view(3, 10)
    key, value = torch.randn(2, 30, 32, 2, 64, device=device, dtype=torch.float16)
    query = torch.randn(batch, 4, Sq, 64, device=device, dtype=torch.float16)
    layout = random_layout(Sq, 320, 1, 64, device, batch, 2)
    pattern, lengths = BlockSparse(layout), torch.tensor(used, dtype=torch.int32, device=device)
    out = sa.paged_attention(query, key, value, table, lengths, pattern=pattern, is_causal=True)
    allowed = layout.allows(torch.arange(Sq, device=device), torch.arange(320, device=device))
    for b, length in enumerate(used):
        if length == 0:
            assert (out[b] == 0).all()
            continue
        k, v = (
            cache[table[b].long()].flatten(0, 1)[:length].transpose(0, 1)[None]
            for cache in (key, value)
        )
        mask = allowed[b, :, :, :length].repeat_interleave(2, 0)[None]
        common = {"attn_mask": mask, "is_causal": True}
        assert_close_to_reference(out[b : b + 1], query[b : b + 1], k, v, sa.Full(), **common)


def test_what_has_no_list_for_each_query(device):
    query, key, value = Shape(1, 4, 2, 17, 128, 64).make(device)
    layout = random_layout(17, 128, 1, 16, device)
    with pytest.raises(ValueError, match="expected block_q of 1 for up to 16 queries, got 17"):
        sa.block_sparse_attention(query, key, value, layout)
    layout = random_layout(3, 128, 1, 16, device, heads=4)
    with pytest.raises(ValueError, match="expected a list a query for 1 or 2 heads, got 4"):
        sa.block_sparse_attention(query[:, :, :3], key, value, layout)
    with pytest.raises(ValueError, match="block_q that is a positive multiple of 16, got 8"):
        random_layout(3, 128, 8, 16, device)

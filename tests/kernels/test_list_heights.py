"""Block lists of every height of query blocks, which engines give to tiles of several shapes."""

import pytest
import torch
from reference import DTYPES, Shape, random_layout

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

HEIGHTS = (16, 32, 48, 64, 96, 128)
COMMON = {
    "plain": {},
    "causal": {"is_causal": True},
    "softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("common", COMMON.values(), ids=COMMON)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 144, 192, 256])
@pytest.mark.parametrize("block_q", HEIGHTS)
def test_heights_of_query_blocks(attend, device, block_q, head_dim, common):
    """Lengths off the blocks' edges, query heads that share keys, a list for each head."""
    tensors = Shape(1, 4, 2, 203, 331, head_dim).make(device, torch.bfloat16)
    for block_kv in (16, 64):
        layout = random_layout(203, 331, block_q, block_kv, device, heads=4)
        pattern = sa.BlockSparse(layout)
        result = attend(pattern, *tensors, return_lse=True, **common)
        assert_close_to_reference(result, *tensors, pattern, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("block_q", (16, 32, 64))
def test_low_blocks_under_bounds_masks_and_odd_strides(attend, device, block_q, dtype):
    shape = attend.fit(Shape(1, 2, 1, 150, 270, 128))
    bounds = torch.randint(0, 270, (1, 1, shape.Sq, 2), device=device, dtype=torch.int32).sort(-1)[
        0
    ]
    mask = torch.randn(shape.Sq, 270, device=device, dtype=dtype)
    for memory in ("contiguous", "transposed", "gaps"):
        tensors = shape.make(device, dtype, memory)
        pattern = sa.BlockSparse(random_layout(shape.Sq, 270, block_q, block_q, device))
        for common in ({"key_bounds": bounds}, {"attn_mask": mask}):
            result = attend(pattern, *tensors, return_lse=True, **common)
            assert_close_to_reference(result, *tensors, pattern, **common)

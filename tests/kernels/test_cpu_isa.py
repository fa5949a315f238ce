"""Every instruction set's loops give right results, forced by SPARSE_ATTN_CPU_ISA.

The choice is made once per process, so each set runs in a process of its own. A set that the
processor lacks falls back to a lesser one.
"""

import pytest
import torch
from isa import check_with_isa

import sparse_attn as sa

SCRIPT = """
import torch
import sparse_attn as sa
from reference import DTYPES, PATTERNS, Shape
from sparse_attn.testing import assert_close_to_reference

torch.manual_seed(0)
shapes = ((2, 1, 40), (3, 3, 40), (2, 4, 256), (2, 20, 64), (2, 70, 40), (2, 70, 64))
for heads, rows, head_dim in shapes:
    shape = Shape(1, heads, 1, rows, 70, head_dim)
    for dtype in DTYPES.values():
        query, key, value = shape.make("cpu", dtype)
        for make in PATTERNS.values():
            for softcap in (0.0, 3.0):
                common = {"softcap": softcap, "is_causal": True, "return_lse": True}
                pattern = make(shape, "cpu")
                result = sa.sparse_attention(query, key, value, pattern, **common)
                common.pop("return_lse")
                assert_close_to_reference(result, query, key, value, pattern, **common)
"""


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "amx"])
def test_forced_instruction_set(isa):
    check_with_isa(isa, SCRIPT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 136])
@pytest.mark.parametrize("queries", [2, 3, 4])
def test_rows_that_share_a_step_keep_their_bits(queries, head_dim, dtype):
    torch.manual_seed(0)
    query = torch.randn(1, 6, queries, head_dim, dtype=dtype)
    key, value = torch.randn(2, 1, 2, 535, head_dim, dtype=dtype).unbind(0)
    together = sa.fused_attention(query, key, value, return_lse=True)
    for row in range(queries):
        alone = sa.fused_attention(query[:, :, row : row + 1], key, value, return_lse=True)
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[:, :, row], part[:, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_heads_that_share_a_tile_keep_their_bits(dtype):
    torch.manual_seed(0)
    query = torch.randn(1, 6, 20, 64, dtype=dtype)
    key, value = torch.randn(2, 1, 1, 600, 64, dtype=dtype).unbind(0)
    bounds = torch.tensor([[180 + 37 * head, 600] for head in range(6)], dtype=torch.int32)
    bounds = bounds.view(1, 6, 1, 2).expand(1, 6, 20, 2).contiguous()
    for key_bounds in (None, bounds):
        common = {"window": (400, 0), "return_lse": True}
        together = sa.band_attention(query, key, value, key_bounds=key_bounds, **common)
        for head in range(6):
            own = None if key_bounds is None else key_bounds[:, head : head + 1]
            one = query[:, head : head + 1]
            alone = sa.band_attention(one, key, value, key_bounds=own, **common)
            for whole, part in zip(together, alone, strict=True):
                assert torch.equal(whole[:, head], part[:, 0])

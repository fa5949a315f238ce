"""Every head dim: nothing beside a tensor is read, and nothing is written there."""

import pytest
import torch
from reference import Shape, random_layout

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

HEAD_DIMS = range(8, 257, 8)
VALUE_DIMS = [(192, 128), (64, 128), (128, 64), (72, 40), (24, 200), (256, 8), (96, 64)]
SKV = 331


def beside_nan(shape, device, dtype):
    """A view, aligned to 16 bytes, of a buffer of NaN; and the buffer."""
    batch, heads, length, head_dim = shape
    size = (batch, heads + 1, length + 2, head_dim + 8)
    buffer = torch.full(size, torch.nan, device=device, dtype=dtype)
    return buffer[:, :heads, 1:-1, :head_dim], buffer


def check(attend, device, Sq, head_dim, pattern, value_dim=None, **common):
    dtype = torch.bfloat16 if head_dim % 16 == 0 else torch.float16
    tensors, value_dim = [], value_dim or head_dim
    for heads, length, columns in ((4, Sq, head_dim), (2, SKV, head_dim), (2, SKV, value_dim)):
        view, _ = beside_nan((1, heads, length, columns), device, dtype)
        tensors.append(view.copy_(torch.randn(view.shape, device=device)))
    out, around = beside_nan((1, 4, Sq, value_dim), device, dtype)
    attend(pattern, *tensors, out=out, **common)
    result = out.clone()
    out.fill_(torch.nan)
    assert around.isnan().all(), "the call wrote beside its output"
    assert_close_to_reference(result, *tensors, pattern, **common)


CASES = {
    "full": (sa.Full(), {}),
    "causal": (sa.Full(), {"is_causal": True}),
    "sinks": (sa.Band((60, 0), sinks=5), {"is_causal": True}),
    "dilated": (sa.Dilated((30, 7), 3), {}),
    "softcap": (sa.Full(), {"softcap": 20.0}),
}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("Sq", [203])
@pytest.mark.parametrize("pattern, common", CASES.values(), ids=CASES)
def test_columns_beside_the_head(attend, device, Sq, head_dim, pattern, common):
    check(attend, device, Sq, head_dim, pattern, **common)


@pytest.mark.parametrize("head_dim, value_dim", VALUE_DIMS)
@pytest.mark.parametrize("Sq", [5, 203])
@pytest.mark.parametrize("pattern, common", CASES.values(), ids=CASES)
def test_columns_beside_values(attend, device, Sq, head_dim, value_dim, pattern, common):
    check(attend, device, Sq, head_dim, pattern, value_dim, **common)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("Sq", [203])
@pytest.mark.parametrize("block_q", [64, 128])
def test_columns_beside_the_head_under_lists(attend, device, Sq, head_dim, block_q):
    check(attend, device, Sq, head_dim, sa.BlockSparse(random_layout(Sq, SKV, block_q, 48, device)))


@pytest.mark.parametrize("head_dim, value_dim", VALUE_DIMS)
@pytest.mark.parametrize("Sq", [203])
@pytest.mark.parametrize("block_q", [64, 128])
def test_columns_beside_values_under_lists(attend, device, Sq, head_dim, value_dim, block_q):
    layout = random_layout(Sq, SKV, block_q, 48, device)
    check(attend, device, Sq, head_dim, sa.BlockSparse(layout), value_dim)


MERGED = [(24, 24), (72, 72), (104, 104), (200, 200), (64, 128), (192, 128), (72, 24)]


@pytest.mark.parametrize("head_dim, value_dim", MERGED)
@pytest.mark.parametrize("Sq", [300])
def test_merged_chunks(attend, device, Sq, head_dim, value_dim):
    """Rows of global tokens, whose keys engines may split, and whose partial results are wider."""
    tensors = Shape(1, 2, 1, Sq, 4700, head_dim, Dv=value_dim).make(device, torch.bfloat16)
    pattern = sa.Band(40, global_tokens=3)
    result = attend(pattern, *tensors, query_offset=0, return_lse=True)
    assert_close_to_reference(result, *tensors, pattern, query_offset=0)


MANY_READERS = {
    "full": (sa.Full(), {}),
    "causal": (sa.Full(), {"is_causal": True}),
    "window": (sa.Band((1500, 40), sinks=3), {"query_offset": -700}),
    "dilated": (sa.Dilated((1400, 0), 3), {}),
    "softcap": (sa.Full(), {"softcap": 2.0, "is_causal": True}),
}


@pytest.mark.parametrize("head_dim, value_dim", [(136, 136), (152, 40), (216, 216)])
@pytest.mark.parametrize("Sq", [2100])
@pytest.mark.parametrize("pattern, common", MANY_READERS.values(), ids=MANY_READERS)
def test_rows_that_begin_inside_sectors(attend, device, Sq, head_dim, value_dim, pattern, common):
    """An engine may move keys that many rows read: no bit changes, and nothing beside is read."""
    rows = Sq if device == "cuda" else 133  # on a CPU no number of rows makes one move them
    query = torch.randn(2, 4, rows, head_dim, device=device, dtype=torch.bfloat16)
    moved, whole = [], []
    for columns in (head_dim, value_dim):
        part = torch.randn(2, 2, 1101, columns, device=device, dtype=torch.bfloat16)
        wide = part.new_full((2, 2, 1101, columns + 8), torch.nan)
        whole.append(wide[..., :columns].copy_(part))
        narrow = part.new_full((part.numel() + 16,), torch.nan)
        moved.append(narrow[8:-8].view_as(part).copy_(part))
    result = attend(pattern, query, *moved, return_lse=True, **common)
    again = attend(pattern, query, *whole, return_lse=True, **common)
    assert all(torch.equal(mine, other) for mine, other in zip(result, again, strict=True))
    assert_close_to_reference(result, query, *moved, pattern, **common)

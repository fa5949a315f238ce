"""Global rows see keys by the thousand, which an engine may cut into chunks and merge."""

import pytest
import torch
from reference import DTYPES, Shape, placed

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

WINDOW = (60, 50)
KEYS = 4300
OFFSETS = {
    "first": 0,
    "across-a-tile": -100,
    "of-each-batch": torch.tensor([-170, 3], dtype=torch.int32),
}


@pytest.mark.parametrize("count", [1, 40, 130, 257])
@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
def test_counts_and_places(attend, device, count, offset):
    tensors = Shape(2, 2, 1, 270, KEYS, 128).make(device, torch.bfloat16)
    pattern = sa.Band(WINDOW, global_tokens=count)
    common = dict(query_offset=placed(offset, device), return_lse=True)
    assert_close_to_reference(attend(pattern, *tensors, **common), *tensors, pattern, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_head_dims(attend, device, dtype, head_dim):
    tensors = Shape(1, 2, 1, 100, KEYS, head_dim).make(device, dtype, "transposed")
    pattern = sa.Band(WINDOW, sinks=3, global_tokens=70)
    common = dict(query_offset=-20, sink_logits=torch.randn(2, device=device), return_lse=True)
    assert_close_to_reference(attend(pattern, *tensors, **common), *tensors, pattern, **common)


@pytest.mark.parametrize("global_tokens", [40, 128])
def test_key_bounds(attend, device, global_tokens):
    """Bounds that leave whole chunks out, others that cut inside one, rows without a key."""
    tensors = Shape(2, 2, 2, 160, KEYS, 64).make(device, torch.float16)
    bounds = torch.randint(0, KEYS, (2, 1, 160, 2), dtype=torch.int32).sort(-1).values
    bounds[0, 0, :30, 1] = 100
    bounds[1, 0, 5:9] = 0
    pattern = sa.Band(WINDOW, global_tokens=global_tokens)
    common = dict(query_offset=-10, key_bounds=bounds.to(device), return_lse=True)
    assert_close_to_reference(attend(pattern, *tensors, **common), *tensors, pattern, **common)


def test_bits_of_a_head_alone(attend, device):
    query, key, value = Shape(2, 4, 2, 150, KEYS, 128).make(device, torch.bfloat16)
    pattern = sa.Band(WINDOW, global_tokens=100)
    out, lse = attend(pattern, query, key, value, query_offset=0, return_lse=True)
    own = query[1:, 3:], key[1:, 1:], value[1:, 1:]
    one, one_lse = attend(pattern, *own, query_offset=0, return_lse=True)
    assert torch.equal(one, out[1:, 3:]) and torch.equal(one_lse, lse[1:, 3:])

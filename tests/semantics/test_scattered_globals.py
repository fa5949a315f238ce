"""Scattered global tokens: in any order, repeated, out of range, wherever the queries stand."""

import pytest
import torch
from reference import DTYPES, Shape, placed

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

KEYS = 1300
OFFSETS = {
    "first": 0,
    "last": KEYS - 270,
    "of-each-batch": torch.tensor([-170, 700], dtype=torch.int32),
}


def tokens(count, device):
    """`count` positions of KEYS, some of them twice, and some that name no key."""
    some = torch.randperm(KEYS)[:count]
    return torch.cat([some, some[:3], torch.tensor([-1, KEYS, 2**40])]).to(device)


@pytest.mark.parametrize("is_causal", [False, True], ids=["both-sides", "causal"])
@pytest.mark.parametrize("count", [0, 1, 40, 200, KEYS])
@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
def test_counts_and_places(attend, device, count, offset, is_causal):
    tensors = Shape(2, 2, 1, 270, KEYS, 64).make(device, torch.bfloat16)
    pattern = sa.Band((60, 50), global_tokens=tokens(count, device))
    common = dict(query_offset=placed(offset, device), is_causal=is_causal, return_lse=True)
    assert_close_to_reference(attend(pattern, *tensors, **common), *tensors, pattern, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_head_dims_and_sinks(attend, device, dtype, head_dim):
    tensors = Shape(1, 4, 2, 300, 300, head_dim).make(device, dtype, "transposed")
    where = torch.tensor([299, 0, 7, 150, 133], device=device)
    pattern = sa.Band((20, 10), sinks=9, global_tokens=where)
    common = dict(sink_logits=torch.randn(4, device=device), softcap=20.0, return_lse=True)
    assert_close_to_reference(attend(pattern, *tensors, **common), *tensors, pattern, **common)


def test_tokens_among_neighbours(attend, device):
    """Every key of a window, of a tile and of its edges."""
    tensors = Shape(1, 2, 2, 400, 400, 128).make(device, torch.float16)
    where = torch.cat([torch.arange(120, 270), torch.tensor([0, 399])]).to(device)
    pattern = sa.Band((30, 3), global_tokens=where)
    assert_close_to_reference(attend(pattern, *tensors), *tensors, pattern)


def test_key_bounds(attend, device):
    """Bounds that leave global keys out, of each head; rows without a key."""
    tensors = Shape(2, 2, 2, 260, KEYS, 64).make(device, torch.float16)
    bounds = torch.randint(0, KEYS, (2, 2, 260, 2), dtype=torch.int32).sort(-1).values
    bounds[0, 0, :30, 1] = 100
    bounds[1, 0, 5:9] = 0
    pattern = sa.Band((60, 50), global_tokens=tokens(70, device))
    common = dict(query_offset=500, key_bounds=bounds.to(device), return_lse=True)
    assert_close_to_reference(attend(pattern, *tensors, **common), *tensors, pattern, **common)


def test_keys_past_the_last_query_may_hold_anything(attend, device):
    query, key, value = Shape(2, 2, 2, 140, KEYS, 64).make(device, torch.bfloat16)
    pattern = sa.Band((60, 0), global_tokens=torch.tensor([1, 300, 350, 900], device=device))
    common = dict(query_offset=200, is_causal=True)
    want = attend(pattern, query, key, value, **common)
    key[:, :, 340:], value[:, :, 340:] = float("nan"), float("nan")
    assert torch.equal(attend(pattern, query, key, value, **common), want)


def test_bits_of_a_head_alone(attend, device):
    query, key, value = Shape(2, 4, 2, 300, KEYS, 128).make(device, torch.bfloat16)
    pattern = sa.Band((60, 50), global_tokens=tokens(30, device))
    out, lse = attend(pattern, query, key, value, return_lse=True)
    own = query[1:, 3:], key[1:, 1:], value[1:, 1:]
    one, one_lse = attend(pattern, *own, return_lse=True)
    assert torch.equal(one, out[1:, 3:]) and torch.equal(one_lse, lse[1:, 3:])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_index_tensors_of_any_integer_dtype(device, dtype):
    query, key, value = Shape(1, 2, 1, 40, 40, 16).make(device)
    where = torch.tensor([39, 0, 7], device=device)
    want = sa.band_attention(query, key, value, 3, global_tokens=where)
    got = sa.band_attention(query, key, value, 3, global_tokens=where.to(dtype))
    assert torch.equal(got, want)


def test_indices_past_63_bits_name_no_key(device):
    """Read as signed they would be negative, or any key at all."""
    query, key, value = Shape(1, 2, 1, 40, 40, 16).make(device)
    where = torch.tensor([7, 2**63, 2**63 + 5, 2**64 - 1], dtype=torch.uint64, device=device)
    pattern = sa.Band(3, global_tokens=where)
    assert pattern.global_tokens.tolist() == [7] + 3 * [2**63 - 1]
    want = sa.band_attention(query, key, value, 3, global_tokens=where[:1])
    assert torch.equal(sa.sparse_attention(query, key, value, pattern), want)


def test_more_tokens_than_a_sequence_has_keys_are_refused(device):
    query = torch.randn(1, 1, 4, 16, device=device)
    tokens = torch.zeros(1, dtype=torch.int32, device=device).expand(2**29)  # takes no memory
    with pytest.raises(RuntimeError, match="global_tokens of up to 536870911 positions, got 5368"):
        torch.ops.sparse_attn.band(query, query, query, global_tokens=tokens)

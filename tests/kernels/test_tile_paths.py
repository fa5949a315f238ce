"""Calls that take every way through a key tile: few leading keys, copied masks, small scores."""

import pytest
import torch
from reference import DTYPES, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

HEAD_DIMS = (64, 128)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("sinks", [1, 4, 16, 17, 40])
def test_few_leading_keys(attend, device, sinks, head_dim):
    """A step of sixteen keys takes them where it can; windows lie after, over and before them."""
    tensors = Shape(2, 4, 2, 700, 700, head_dim).make(device, attend.dtype)
    for window in (3, 127, 200):
        pattern = sa.Band((window, 0), sinks=sinks)
        result = attend(pattern, *tensors, is_causal=True, return_lse=True)
        assert_close_to_reference(result, *tensors, pattern, is_causal=True)


@pytest.mark.parametrize("origins", [[130, 5], [126, 250], [699, 0]], ids=str)
def test_few_leading_keys_of_padded_rows(attend, device, origins):
    """Leading keys inside a tile and across the edge of two."""
    tensors = Shape(2, 4, 2, 700, 700, 128).make(device, attend.dtype)
    common = {"is_causal": True, "key_origin": torch.tensor(origins, device=device)}
    pattern = sa.Band((63, 0), sinks=4)
    result = attend(pattern, *tensors, return_lse=True, **common)
    assert_close_to_reference(result, *tensors, pattern, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("keys", [8, 96, 200, 392])
def test_added_masks_in_aligned_rows(attend, device, keys, head_dim, dtype):
    """Masks by head, by row or for all rows, and one that begins off the alignment."""
    queries = min(keys, 150)
    tensors = Shape(2, 4, 2, queries, keys, head_dim).make(device, dtype)
    wide = torch.randn(2, 4, queries, keys + 8, device=device, dtype=dtype)
    wide[..., ::5] = -torch.inf
    wide[:, :, 0] = -torch.inf
    masks = (wide[..., :keys], wide[:1, :1, :, 8:], wide[..., 1:2, :keys], wide[..., 3 : keys + 3])
    for mask in masks:
        for causal in (False, True):
            common = {"attn_mask": mask, "is_causal": causal}
            result = attend(sa.Full(), *tensors, return_lse=True, **common)
            assert_close_to_reference(result, *tensors, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [160, 192, 256])
def test_added_masks_of_wide_heads(attend, device, head_dim, dtype):
    tensors = Shape(2, 4, 2, 150, 392, head_dim).make(device, dtype)
    mask = torch.randn(2, 1, 150, 392, device=device, dtype=dtype)
    mask[..., ::5] = -torch.inf
    padding = torch.ones(2, 1, 1, 392, dtype=torch.bool, device=device)
    padding[1, ..., 200:] = False
    slopes = torch.tensor([0.5, 0.25, -0.125, 0.0], device=device)
    for common in ({"attn_mask": mask}, {"attn_mask": padding}, {"alibi_slopes": slopes}):
        for pattern in (sa.Full(), sa.Band((100, 0), sinks=4)):
            result = attend(pattern, *tensors, is_causal=True, return_lse=True, **common)
            assert_close_to_reference(result, *tensors, pattern, is_causal=True, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_kv", [16, 48, 64, 128])
@pytest.mark.parametrize("block_q", [64, 128])
def test_biases_of_lists(attend, device, block_q, block_kv, head_dim, dtype):
    """Masks and slopes of keys that a tile gathers from several blocks, the last one cut."""
    queries, keys = 200, 406
    tensors = Shape(2, 4, 2, queries, keys, head_dim).make(device, dtype)
    blocks = torch.rand(1, 4, -(-queries // block_q), -(-keys // block_kv), device=device) < 0.5
    blocks[..., 0, :] = False  # rows without keys
    layout = sa.BlockLayout.from_mask(blocks, block_q, block_kv)
    seen = torch.rand(2, 1, queries, keys, device=device)
    biases = (
        {"attn_mask": seen < 0.7},
        {"attn_mask": seen[:1, :, :1] < 0.9},
        {"attn_mask": torch.randn(2, 4, queries, keys, device=device, dtype=dtype)},
        {"attn_mask": torch.randn(keys, device=device)},
        {"alibi_slopes": torch.tensor([0.5, 0.25, -0.125, 0.0], device=device)},
        {"alibi_slopes": torch.rand(2, 4, device=device), "attn_mask": seen < 0.7, "softcap": 5.0},
    )
    for turn, bias in enumerate(biases):
        causal = (turn + block_kv // 16) % 2 == 0  # each bias with two heights of key blocks
        common = {"is_causal": causal, **bias}
        result = attend(sa.BlockSparse(layout), *tensors, return_lse=True, **common)
        assert_close_to_reference(result, *tensors, sa.BlockSparse(layout), **common)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_biases_of_partial_blocks(attend, device, head_dim):
    tensors = Shape(1, 4, 2, 300, 406, head_dim).make(device, attend.dtype)
    tokens = torch.rand(1, 4, 300, 406, device=device) < 0.3
    tokens[..., 128:256] = True  # blocks seen whole
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0], device=device)
    for block_kv in (16, 64):
        layout = sa.BlockLayout.from_token_mask(tokens, 64, block_kv)
        result = attend(sa.BlockSparse(layout), *tensors, alibi_slopes=slopes, return_lse=True)
        assert_close_to_reference(result, *tensors, sa.BlockSparse(layout), alibi_slopes=slopes)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("softcap", [5.0, 50.0, 1e6])
def test_softcap_of_small_and_large_scores(attend, device, softcap, head_dim):
    """Tiles of small scores, of large ones, and rows that meet both."""
    query, key, value = Shape(1, 2, 1, 300, 700, head_dim).make(device, attend.dtype)
    key = key * torch.where(torch.arange(700, device=device) % 300 < 200, 1, 12)[:, None]
    for scale in (0.1, -0.1):
        common = {"softcap": softcap, "scale": scale}
        result = attend(sa.Full(), query, key, value, return_lse=True, **common)
        assert_close_to_reference(result, query, key, value, **common)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_softcap_of_scores_that_rise_below_zero(attend, device, head_dim, dtype):
    """Rows begin with scores far below zero, then meet tiles whose scores all have a sign.

    From a maximum so low they have to move it, or P overflows float16; the lowest of a tile, which
    a look at bits takes for the highest there, would not.
    """
    query, key, value = Shape(1, 2, 1, 300, 5 * 128, head_dim).make(device, dtype)
    query = torch.ones_like(query)
    even = torch.arange(128, device=device) % 2 == 0
    levels = [torch.where(even, high, -14.0) for high in (-14.0, -0.5, -6.0, -0.5, -14.0)]
    key = torch.cat(levels)[:, None] / head_dim + 0.001 * torch.randn_like(key, dtype=torch.float32)
    for softcap in (50.0, 100.0):
        common = {"softcap": softcap, "scale": 1.0}
        result = attend(sa.Full(), query, key.to(dtype), value, return_lse=True, **common)
        assert_close_to_reference(result, query, key.to(dtype), value, **common)

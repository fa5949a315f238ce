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

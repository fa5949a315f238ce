"""Rows whose scores are all below zero, as far apart as a wrong maximum would overflow."""

import pytest
import torch
from reference import Shape
from selection import DTYPE_ERRORS, check_selection, pattern_of

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

#: Where keys make scores above zero.
POSITIVE = {
    "nowhere": (),
    "at the first keys": (slice(0, 3),),
    "at the last keys": (slice(-3, None),),
    "in the middle": (slice(300, 301), slice(390, 400)),
}
PATTERNS = {
    "full": (sa.Full(), {}),
    "causal": (sa.Full(), {"is_causal": True}),
    "band": (sa.Band((400, 0)), {}),
    "sinks": (sa.Band((200, 0), sinks=20), {}),
    "softcap": (sa.Full(), {"softcap": 900.0}),
}


def make(shape, device, dtype, positive):
    """Return tensors of which scores run from -0.3 to -800, at scale 1."""
    query, key, value = shape.make(device, dtype)
    sizes = 10 ** (3 * torch.rand(shape.Skv, 1, device=device) - 2)
    for keys in positive:
        sizes[keys] = -sizes[keys]
    return -query.abs(), (key.abs() * sizes).to(dtype), value


@pytest.mark.parametrize("positive", POSITIVE.values(), ids=POSITIVE)
@pytest.mark.parametrize("pattern, common", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("head_dim", [64, 112, 128])
def test_rows_of_negative_scores(attend, device, head_dim, pattern, common, positive):
    shape = attend.fit(Shape(1, 4, 2, 300, 700, head_dim))
    tensors = make(shape, device, torch.bfloat16, positive)
    common = {"scale": 1.0, "return_lse": True, **common}
    result = attend(pattern, *tensors, **common)
    assert_close_to_reference(result, *tensors, pattern, **common)


@pytest.mark.parametrize("positive", POSITIVE.values(), ids=POSITIVE)
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_of_negative_scores(attend, device, head_dim, block, positive):
    shape = attend.fit(Shape(1, 2, 2, 256, 768, head_dim, block))
    tensors = make(shape, device, torch.bfloat16, positive)
    counts = (-(-shape.Sq // shape.block), -(-shape.Skv // block))
    mask = torch.rand(counts, device=device) < 0.7
    mask[:, 0] = True
    pattern = sa.BlockSparse(sa.BlockLayout.from_mask(mask, shape.block, block))
    result = attend(pattern, *tensors, scale=1.0, return_lse=True)
    assert_close_to_reference(result, *tensors, pattern, scale=1.0, return_lse=True)


@pytest.mark.parametrize("positive", POSITIVE.values(), ids=POSITIVE)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_queries_of_negative_scores(attend, device, head_dim, positive):
    shape = attend.fit(Shape(1, 8, 2, 40, 3000, head_dim))
    tensors = make(shape, device, torch.bfloat16, positive)
    result = attend(sa.Full(), *tensors, scale=1.0, return_lse=True)
    assert_close_to_reference(result, *tensors, sa.Full(), scale=1.0, return_lse=True)


@pytest.mark.parametrize("positive", [(), (slice(400, 440),)], ids=["nowhere", "in the middle"])
def test_antidiagonals_of_negative_scores(device, positive):
    query, key, _ = make(Shape(1, 2, 1, 300, 2500, 64), device, torch.bfloat16, positive)
    pattern = pattern_of("antidiagonal", 64, stride=8)
    error = DTYPE_ERRORS[torch.bfloat16] if device == "cuda" else 1e-5
    check_selection(pattern, query, key, False, error=error, scale=1.0)

"""attn_mask over many key tiles: words of two keys and single keys, padding, holes, empty tiles."""

import pytest
import torch
from reference import DTYPES, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

PATTERNS = {
    "full": lambda: sa.Full(),
    "sinks": lambda: sa.Band((150, 40), sinks=5),
    "globals": lambda: sa.Band(100, global_tokens=9),
    "dilated": lambda: sa.Dilated((90, 9), 3, sinks=2),
}


def check(attend, device, shape, dtype, pattern, **common):
    tensors = shape.make(device, dtype)
    result = attend(pattern, *tensors, return_lse=True, **common)
    assert_close_to_reference(result, *tensors, pattern, **common)


def bias(size, device):
    """Numbers, a stripe of -inf wider than a key tile, and a row that sees nothing."""
    mask = torch.randn(size, device=device)
    mask[..., 20:170] = -torch.inf
    mask[..., 3, :] = -torch.inf
    return mask


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 192])
@pytest.mark.parametrize("kind", ["bool", "fp32", "own"])
@pytest.mark.parametrize("Skv", [400, 397])
def test_kinds(attend, device, dtype, head_dim, kind, Skv):
    mask = bias((1, 2, 210, Skv), device)
    mask = mask > -0.5 if kind == "bool" else mask.to(dtype if kind == "own" else torch.float32)
    shape = Shape(2, 2, 1, 210, Skv, head_dim)
    check(attend, device, shape, dtype, sa.Full(), attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_patterns(attend, device, name, kind):
    mask = bias((2, 1, 210, 400), device)
    mask = mask > -0.5 if kind == "bool" else mask
    arguments = dict(softcap=3.0, sink_logits=torch.randn(2, device=device))
    for common in ({}, {"is_causal": True}, arguments):
        shape = Shape(2, 2, 1, 210, 400, 64)
        check(attend, device, shape, torch.bfloat16, PATTERNS[name](), attn_mask=mask, **common)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
def test_padding(attend, device, name, holes):
    """Left, right and no padding, an entry without keys, and keys left out between others."""
    position = torch.arange(400, device=device)
    ends = [(70, 400), (0, 260), (0, 400), (5, 5)]
    keep = torch.stack([(position >= begin) & (position < end) for begin, end in ends])
    if holes:
        keep &= position % 7 > 0
    shape = Shape(4, 2, 1, 210, 400, 128)
    mask = keep[:, None, None]
    for common in ({}, {"is_causal": True}, {"alibi_slopes": torch.rand(2, device=device)}):
        check(attend, device, shape, torch.bfloat16, PATTERNS[name](), attn_mask=mask, **common)


@pytest.mark.parametrize("lowest", [-1e12, torch.finfo(torch.float32).min], ids=str)
def test_masks_of_large_numbers(attend, device, lowest):
    """Such entries hide a key beside others; their lse is theirs alone."""
    tensors = Shape(1, 2, 1, 140, 300, 64).make(device, torch.bfloat16)
    mask = torch.zeros(140, 300, device=device)
    mask[:, ::3] = lowest
    mask[:, 40:180] = lowest
    out = attend(sa.Full(), *tensors, attn_mask=mask)
    assert_close_to_reference(out, *tensors, sa.Full(), attn_mask=mask)


@pytest.mark.parametrize("Sq", [1, 70])
def test_a_mask_over_no_keys(attend, device, Sq):
    """It has no memory that could be read."""
    tensors = Shape(2, 2, 1, Sq, 0, 64).make(device, torch.bfloat16)
    for mask in (torch.ones(Sq, 0, dtype=torch.bool), torch.ones(2, 1, 1, 0)):
        out, lse = attend(sa.Full(), *tensors, attn_mask=mask.to(device), return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", ["padding", "additive"])
def test_few_queries_on_many_keys(attend, device, kind, dtype):
    shape = Shape(2, 2, 1, 40, 4300, 128)
    keep = torch.arange(4300, device=device) < torch.tensor([[4100], [90]], device=device)
    mask = keep[:, None, None] if kind == "padding" else bias((40, 4300), device)
    check(attend, device, shape, dtype, sa.Full(), attn_mask=mask)

"""Rows whose maximum moves from tile to tile, and rows whose scores are all below zero."""

import pytest
import torch
from engines import leave_out
from reference import Shape
from selection import DTYPE_ERRORS, check_selection, pattern_of

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference


def below_zero(*but):
    """Return a function that makes heights below zero, but of some keys.

    They are so far apart that a wrong maximum would overflow.
    """

    def heights(count):
        sizes = -(10 ** (3 * torch.rand(count) - 2))
        for keys in but:
            sizes[keys] = -sizes[keys]
        return sizes

    return heights


#: How high keys are; scores are about 40 or 80 times that, at scale 1.
HEIGHTS = {
    "below zero": below_zero(),
    "below zero but at the first keys": below_zero(slice(0, 3)),
    "below zero but at the last keys": below_zero(slice(-3, None)),
    "below zero but in the middle": below_zero(slice(300, 301), slice(390, 400)),
    "rising": lambda count: torch.linspace(-1, 1, count),
    "falling": lambda count: torch.linspace(1, -1, count),
    "in steps": lambda count: torch.arange(count) // 100 % 3 * 0.3 - 0.2,
}
PATTERNS = {
    "full": (sa.Full(), {}),
    "causal": (sa.Full(), {"is_causal": True}),
    "band": (sa.Band((400, 0)), {}),
    "sinks": (sa.Band((200, 0), sinks=20), {}),
    "few sinks": (sa.Band((100, 0), sinks=4), {}),
    "strided": (sa.Strided(64, 16), {}),
    "softcap": (sa.Full(), {"softcap": 900.0}),
    "softcap beside which scores are small": (sa.Full(), {"softcap": 10000.0}),
    "scale below zero": (sa.Full(), {"scale": -1.0}),
}


def make(shape, device, dtype, heights):
    """Return tensors whose scores have the sign and the order of `heights(shape.Skv)`."""
    query, key, value = shape.make(device, dtype)
    sizes = heights(shape.Skv)[:, None].to(device)
    return query.abs(), (key.abs() * sizes).to(dtype), value


@pytest.mark.parametrize("heights", HEIGHTS.values(), ids=HEIGHTS)
@pytest.mark.parametrize("pattern, common", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("head_dim", [64, 112, 128, 192])
def test_rows(attend, device, head_dim, pattern, common, heights):
    shape = attend.fit(Shape(1, 4, 2, 300, 700, head_dim))
    tensors = make(shape, device, torch.bfloat16, heights)
    common = {"scale": 1.0, "return_lse": True, **common}
    result = attend(pattern, *tensors, **common)
    assert_close_to_reference(result, *tensors, pattern, **common)


@pytest.mark.parametrize("heights", HEIGHTS.values(), ids=HEIGHTS)
@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists(attend, device, head_dim, block, partial, heights):
    shape = attend.fit(Shape(1, 2, 2, 256, 768, head_dim, block))
    tensors = make(shape, device, torch.bfloat16, heights)
    counts = (-(-shape.Sq // shape.block), -(-shape.Skv // block))
    mask = torch.rand(counts, device=device) < 0.7
    mask[:, 0] = True
    if partial:
        tokens = mask.repeat_interleave(shape.block, 0).repeat_interleave(block, 1)
        tokens = tokens[: shape.Sq, : shape.Skv].clone()
        tokens[::2, 5::7] = False
        tokens[::4, :130] = False  # these rows see no key at first
        layout = sa.BlockLayout.from_token_mask(tokens, shape.block, block)
    else:
        layout = sa.BlockLayout.from_mask(mask, shape.block, block)
    pattern = sa.BlockSparse(layout)
    result = attend(pattern, *tensors, scale=1.0, return_lse=True)
    assert_close_to_reference(result, *tensors, pattern, scale=1.0, return_lse=True)


def test_lists_of_more_tiles_than_a_device_holds(attend, device):
    """Thread blocks of Hopper take several query tiles then, and write one in a step of the next.

    Rows of a head see all its blocks or none but the first.
    """
    shape = attend.fit(Shape(1, 144, 144, 256, 384, 128, 128))
    tensors = make(shape, device, torch.bfloat16, HEIGHTS["in steps"])
    blocks = -(-shape.Sq // shape.block), -(-shape.Skv // 128)
    mask = torch.ones(1, 144, *blocks, dtype=torch.bool, device=device)
    mask[:, ::3, :, 1:] = False
    pattern = sa.BlockSparse(sa.BlockLayout.from_mask(mask, shape.block, 128))
    result = attend(pattern, *tensors, scale=1.0, return_lse=True)
    assert_close_to_reference(result, *tensors, pattern, scale=1.0, return_lse=True)


@pytest.mark.parametrize("heights", HEIGHTS.values(), ids=HEIGHTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_queries(attend, device, head_dim, heights):
    shape = attend.fit(Shape(1, 8, 2, 40, 3000, head_dim))
    tensors = make(shape, device, torch.bfloat16, heights)
    result = attend(sa.Full(), *tensors, scale=1.0, return_lse=True)
    assert_close_to_reference(result, *tensors, sa.Full(), scale=1.0, return_lse=True)


@pytest.mark.parametrize("heights", HEIGHTS.values(), ids=HEIGHTS)
@pytest.mark.parametrize("sinks", [0, 8])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_packed_sequences(attend, device, head_dim, sinks, heights):
    shape = attend.fit(Shape(1, 4, 2, 100, 700, head_dim))
    tensors = make(shape, device, torch.bfloat16, heights)
    pattern = sa.Band((300, 100), sinks=sinks)
    packed = [torch.cat([tensor, tensor], 2)[0].transpose(0, 1) for tensor in tensors]
    starts = [
        torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (shape.Sq, shape.Skv)
    ]
    common = {"scale": 1.0, "return_lse": True}
    call = (*packed, *starts, shape.Sq, shape.Skv)
    try:
        out, lse = sa.varlen_attention(*call, pattern=pattern, engine=attend.engine, **common)
    except NotImplementedError as error:
        leave_out(error)
    for rows in (slice(0, shape.Sq), slice(shape.Sq, None)):
        result = (out[rows].transpose(0, 1)[None], lse[None, :, rows])
        assert_close_to_reference(result, *tensors, pattern, **common)


@pytest.mark.parametrize("heights", HEIGHTS.values(), ids=HEIGHTS)
def test_antidiagonals(device, heights):
    query, key, _ = make(Shape(1, 2, 1, 300, 2500, 64), device, torch.bfloat16, heights)
    pattern = pattern_of("antidiagonal", 64, stride=8)
    error = DTYPE_ERRORS[torch.bfloat16] if device == "cuda" else 1e-5
    check_selection(pattern, query, key, False, error=error, scale=1.0)

"""Every pattern against the float64 reference: shapes off every tile edge, dtypes, strides."""

from dataclasses import replace

import pytest
import torch
from reference import DTYPES, PATTERNS, Shape, random_layout
from torch.nn.attention.bias import causal_lower_right

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference, assert_matches_sdpa

SHAPES = {
    "square": Shape(2, 4, 2, 65, 65, 16),
    "more-keys": Shape(1, 2, 1, 33, 130, 32),
    "more-queries": Shape(1, 2, 2, 130, 63, 64),
    "decode": Shape(2, 4, 1, 1, 129, 64),
    "one-key": Shape(1, 2, 2, 5, 1, 8),
    "wide-head": Shape(1, 1, 1, 31, 127, 256),
    "odd-head": Shape(1, 6, 2, 66, 66, 40),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_equals_reference(attend, device, name, shape, is_causal):
    shape = attend.fit(shape)
    query, key, value = shape.make(device, attend.dtype)
    pattern = PATTERNS[name](shape, device)
    result = attend(pattern, query, key, value, is_causal=is_causal, return_lse=True)
    assert_close_to_reference(result, query, key, value, pattern, is_causal=is_causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_half_precision(attend, device, name, dtype):
    shape = attend.fit(Shape(1, 4, 2, 67, 131, 64))
    query, key, value = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    result = attend(pattern, query, key, value, is_causal=True, return_lse=True)
    assert_close_to_reference(result, query, key, value, pattern, is_causal=True)


@pytest.mark.parametrize("memory", ["transposed", "gaps", "fused"])
@pytest.mark.parametrize("name", PATTERNS)
def test_strided_inputs(attend, device, name, memory):
    shape = attend.fit(Shape(2, 4, 2, 70, 70, 64))
    query, key, value = shape.make(device, attend.dtype, memory=memory)
    shape = replace(shape, Skv=key.shape[2])  # a fused projection has as many keys as queries
    pattern = PATTERNS[name](shape, device)
    out = attend(pattern, query, key, value)
    assert_close_to_reference(out, query, key, value, pattern)
    if memory == "transposed":
        assert out.stride() == query.stride()
    contiguous = attend(pattern, query.contiguous(), key.contiguous(), value.contiguous())
    assert torch.equal(out, contiguous)


def test_rows_of_queries_may_overlap(attend, device):
    """As those of ``unfold`` do: what torch.empty_like makes of them has no rows in one piece."""
    shape = attend.fit(Shape(2, 4, 2, 5, 70, 64))
    _, key, value = shape.make(device, attend.dtype)
    signal = torch.randn(shape.B, shape.Hq, shape.D + shape.Sq - 1, device=device)
    query = signal.to(attend.dtype).unfold(-1, shape.D, 1)
    out = attend(sa.Full(), query, key, value)
    assert out.stride(-1) == 1
    assert_close_to_reference(out, query, key, value, sa.Full())


@pytest.mark.parametrize("size", [127, 129, 255, 257, 300])
@pytest.mark.parametrize(
    "name", ["full", "band-globals", "band-scattered", "dilated-sinks", "blocks"]
)
def test_lengths_off_large_tiles(attend, device, name, size):
    shape = attend.fit(Shape(1, 2, 1, size, size + 3, 64))
    query, key, value = shape.make(device, attend.dtype)
    pattern = PATTERNS[name](shape, device)
    out = attend(pattern, query, key, value, is_causal=True)
    assert_close_to_reference(out, query, key, value, pattern, is_causal=True)


@pytest.mark.parametrize("block_q, block_kv", [(16, 16), (32, 128), (64, 64), (128, 16), (256, 48)])
def test_block_sizes(attend, device, block_q, block_kv):
    shape = attend.fit(Shape(2, 2, 1, 300, 270, 64))
    query, key, value = shape.make(device, attend.dtype)
    block_q = max(block_q, shape.block)
    pattern = sa.BlockSparse(
        random_layout(shape.Sq, 270, block_q, block_kv, device, batch=2, heads=2, density=0.4)
    )
    for is_causal in (False, True):
        result = attend(pattern, query, key, value, is_causal=is_causal, return_lse=True)
        assert_close_to_reference(result, query, key, value, pattern, is_causal=is_causal)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims(attend, device, head_dim):
    shape = attend.fit(Shape(1, 2, 1, 34, 50, head_dim))
    query, key, value = shape.make(device, attend.dtype)
    out = attend(sa.Band((20, 3)), query, key, value)
    assert_close_to_reference(out, query, key, value, sa.Band((20, 3)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_fused_equals_sdpa(device, dtype, is_causal):
    query, key, value = Shape(2, 4, 2, 65, 65, 64).make(device, dtype)
    assert_matches_sdpa(sa.fused_attention, query, key, value, is_causal=is_causal, scale=0.2)
    mask = torch.rand(2, 1, 65, 65, device=device) < 0.7
    assert_matches_sdpa(sa.fused_attention, query, key, value, attn_mask=mask)


def test_causal_is_aligned_to_the_lower_right_corner(device):
    query, key, value = Shape(1, 1, 1, 3, 7, 8).make(device)
    out = sa.fused_attention(query, key, value, is_causal=True)
    bias = causal_lower_right(3, 7)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(out, sdpa(query, key, value, attn_mask=bias))


LAYOUT = sa.BlockLayout.local(65, 65, 16, 32, 1)
FUNCTIONS = {
    "fused": (lambda *t, **c: sa.fused_attention(*t, **c), sa.Full()),
    "band": (lambda *t, **c: sa.band_attention(*t, 9, sinks=2, **c), sa.Band(9, sinks=2)),
    "band-globals": (
        lambda *t, **c: sa.band_attention(*t, (9, 0), global_tokens=3, **c),
        sa.Band((9, 0), global_tokens=3),
    ),
    "dilated": (lambda *t, **c: sa.dilated_attention(*t, 4, 3, sinks=1, **c), sa.Dilated(4, 3, 1)),
    "strided": (lambda *t, **c: sa.strided_attention(*t, 4, 8, **c), sa.Strided(4, 8)),
    "blocks": (
        lambda *t, **c: sa.block_sparse_attention(*t, LAYOUT.to(t[0].device), **c),
        sa.BlockSparse(LAYOUT),
    ),
    "topk": (lambda *t, **c: sa.topk_attention(*t, 5, **c), sa.TopK(5)),
    "block-topk": (
        lambda *t, **c: sa.block_topk_attention(
            *t, block_size=16, budget_blocks=2, local_blocks=1, sink_blocks=0, **c
        ),
        sa.BlockTopK(16, budget_blocks=2, local_blocks=1, sink_blocks=0),
    ),
}


@pytest.mark.parametrize("function, pattern", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_are_their_patterns(device, function, pattern):
    query, key, value = Shape(1, 2, 1, 65, 65, 64).make(device)
    if isinstance(pattern, sa.BlockSparse):
        pattern = sa.BlockSparse(LAYOUT.to(device))
    common = {"is_causal": True, "scale": 0.3}
    out = function(query, key, value, **common)
    assert torch.equal(out, sa.sparse_attention(query, key, value, pattern, **common))
    naive = sa.naive_attention(query, key, value, pattern, return_lse=True, **common)
    assert_close_to_reference(naive, query, key, value, pattern, **common)


def test_naive_without_a_pattern_is_dense(device):
    query, key, value = Shape(1, 2, 1, 9, 17, 16).make(device)
    out = sa.naive_attention(query, key, value)
    assert torch.equal(out, sa.naive_attention(query, key, value, sa.Full()))
    assert_close_to_reference(out, query, key, value)


@pytest.mark.parametrize(
    "wrong", [{"dropout_p": None}, {"dropout_p": "a"}, {"enable_gqa": "no"}], ids=str
)
def test_kinds_of_the_arguments_of_sdpa(device, wrong):
    name = next(iter(wrong))
    with pytest.raises(TypeError, match=f"fused_attention: expected {name} to be a"):
        sa.fused_attention(*torch.zeros(3, 1, 1, 4, 8, device=device), **wrong)

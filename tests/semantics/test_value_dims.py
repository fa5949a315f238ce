"""Values with a head dim of their own, as in multi-head latent attention: 192 / 128 and others."""

import pytest
import torch
from reference import DTYPES, PATTERNS, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference, assert_matches_sdpa

DIMS = [(192, 128), (64, 128), (128, 64), (40, 72), (16, 8), (32, 256)]


@pytest.mark.parametrize("head_dim, value_dim", DIMS)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern(attend, device, name, head_dim, value_dim):
    shape = attend.fit(Shape(2, 4, 2, 66, 131, head_dim, Dv=value_dim))
    tensors = shape.make(device, attend.dtype)
    pattern = PATTERNS[name](shape, device)
    result = attend(pattern, *tensors, is_causal=True, return_lse=True)
    assert result[0].shape == (2, 4, shape.Sq, shape.Dv) and shape.Dv == value_dim
    assert_close_to_reference(result, *tensors, pattern, is_causal=True)


@pytest.mark.parametrize("head_dim, value_dim", DIMS)
@pytest.mark.parametrize("Sq", [1, 4, 16, 203])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_many_keys(attend, device, dtype, Sq, head_dim, value_dim):
    keys = 2500 if device == "cuda" else 1100  # a CPU cuts them into no chunks
    tensors = Shape(1, 8, 2, Sq, keys, head_dim, Dv=value_dim).make(device, dtype)
    common = {"sink_logits": torch.randn(8, device=device), "softcap": 20.0}
    for pattern in (sa.Full(), sa.Band((900, 0), sinks=5)):
        result = attend(pattern, *tensors, is_causal=True, return_lse=True, **common)
        assert_close_to_reference(result, *tensors, pattern, is_causal=True, **common)


@pytest.mark.parametrize("head_dim, value_dim", [(192, 128), (32, 64)])
@pytest.mark.parametrize("memory", ["transposed", "gaps"])
def test_strides(attend, device, memory, head_dim, value_dim):
    tensors = Shape(2, 4, 2, 16, 67, head_dim, Dv=value_dim).make(device, attend.dtype, memory)
    out = attend(sa.Full(), *tensors)
    order = sorted(range(4), key=tensors[0].stride().__getitem__)
    assert order == sorted(range(4), key=out.stride().__getitem__)
    assert_close_to_reference(out, *tensors)
    buffer = torch.full((2, 4, 16, value_dim + 16), torch.nan, device=device, dtype=attend.dtype)
    given = buffer[..., 8 : value_dim + 8]
    assert attend(sa.Full(), *tensors, out=given) is given and torch.equal(given, out)
    assert buffer[..., :8].isnan().all() and buffer[..., value_dim + 8 :].isnan().all()


def test_values_alone_change_the_width(device):
    """A narrower value gives the first columns of the wider one's output, and the same lse."""
    query, key, value = Shape(1, 4, 2, 66, 131, 64, Dv=128).make(device)
    out, lse = sa.band_attention(query, key, value, 30, return_lse=True)
    narrow = sa.band_attention(query, key, value[..., :40], 30, return_lse=True)
    torch.testing.assert_close(narrow[0], out[..., :40], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(narrow[1], lse, rtol=1e-6, atol=1e-6)


def test_what_takes_outputs_takes_them(device):
    query, key, value = tensors = Shape(1, 4, 2, 40, 40, 48, Dv=16).make(device)
    assert_matches_sdpa(sa.fused_attention, *tensors, is_causal=True)
    out, lse = sa.fused_attention(*tensors, return_lse=True)
    halves = [
        sa.fused_attention(query, key[:, :, part], value[:, :, part], return_lse=True)
        for part in (slice(0, 13), slice(13, 40))
    ]
    merged = sa.merge_states(*halves[0], *halves[1])
    torch.testing.assert_close(merged[0], out)
    torch.testing.assert_close(merged[1], lse)
    pattern = sa.ByHead({0: sa.Band(9)}, rest=sa.TopK(7))
    by_head = sa.sparse_attention(*tensors, pattern)
    assert torch.equal(by_head[:, :2], sa.band_attention(*tensors, 9)[:, :2])
    kept = sa.quality.compare(*tensors, pattern)
    assert kept.mass.shape == (1, 4) and bool(((kept.cosine > 0) & (kept.cosine < 1)).all())
    with torch.autocast(device, torch.bfloat16):
        assert sa.fused_attention(*tensors).dtype == torch.bfloat16
    assert sa.can_use(*tensors, sa.BlockTopK(16))


NOTHING = {"no-keys": Shape(1, 2, 1, 5, 0, 16, Dv=8), "no-queries": Shape(1, 2, 1, 0, 5, 16, Dv=8)}


@pytest.mark.parametrize("shape", NOTHING.values(), ids=NOTHING)
def test_sizes_of_zero(device, shape):
    out, lse = sa.fused_attention(*shape.make(device), return_lse=True)
    assert out.shape == (1, 2, shape.Sq, 8) and not out.any() and bool((lse == -torch.inf).all())

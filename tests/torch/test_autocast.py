"""Autocast casts what SDPA casts, to the same dtype, on every way into an op."""

import pytest
import torch
from reference import PATTERNS, Shape

import sparse_attn as sa

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
MIXED = {
    "fp32": [torch.float32] * 3,
    "half": [torch.bfloat16] * 3,
    "other-half": [torch.float16] * 3,
    "mixed": [torch.float32, torch.float16, torch.bfloat16],
}
SHAPE = Shape(1, 4, 2, 34, 67, 64)


def cast(tensors, dtypes):
    return [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]


@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("name", PATTERNS)
def test_inputs_are_cast(device, name, dtype, dtypes):
    tensors = cast(SHAPE.make(device), dtypes)
    pattern = PATTERNS[name](SHAPE, device)
    want = sa.sparse_attention(*cast(tensors, [dtype] * 3), pattern, return_lse=True)
    op = getattr(torch.ops.sparse_attn, pattern._op)
    with torch.autocast(device, dtype):
        got = sa.sparse_attention(*tensors, pattern, return_lse=True)
        straight = op(*tensors, **pattern._arguments(), return_lse=True)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    assert all(map(torch.equal, got, want)) and all(map(torch.equal, straight, want))


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_sdpa_gives_the_same_dtype(device, dtype):
    query, key, value = Shape(1, 2, 2, 34, 34, 64).make(device)
    with torch.autocast(device, dtype):
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key.half(), value)
        ours = sa.fused_attention(query, key.half(), value)
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "mask", [torch.bool, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_masks_of_every_dtype(device, mask):
    tensors = SHAPE.make(device)
    bias = torch.randn(34, 67, device=device).relu().to(mask)
    half = [tensor.bfloat16() for tensor in tensors]
    bias_as_cast = bias.bfloat16() if mask == torch.float16 else bias
    want = sa.fused_attention(*half, bias_as_cast)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(sa.fused_attention(*tensors, bias), want)


def test_selection_sees_what_attention_sees(device):
    query, key, _ = Shape(1, 2, 1, 64, 320, 64).make(device)
    pattern = sa.BlockTopK(16, budget_blocks=3, local_blocks=1)
    want = sa.select_blocks(query.bfloat16(), key.bfloat16(), pattern)
    with torch.autocast(device, torch.bfloat16):
        assert sa.select_blocks(query, key.half(), pattern) == want


def test_out_stands_aside(device):
    tensors = SHAPE.make(device)
    out = torch.empty_like(tensors[0])
    with torch.autocast(device, torch.bfloat16):
        assert sa.fused_attention(*tensors, out=out) is out
        assert sa.can_use(*tensors, out=out)
        with pytest.raises(ValueError, match="out of query's dtype float32, got bfloat16"):
            sa.fused_attention(*tensors, out=out.bfloat16())
    assert torch.equal(out, sa.fused_attention(*tensors))


def test_float64_is_refused_and_disabled_regions_cast_nothing(device):
    query, key, value = SHAPE.make(device)
    with torch.autocast(device, torch.bfloat16):
        with pytest.raises(ValueError, match=r"value of .* got float64"):
            sa.fused_attention(query, key, value.double())
        with torch.autocast(device, enabled=False):
            assert sa.fused_attention(query, key, value).dtype == torch.float32
    assert sa.fused_attention(query, key, value).dtype == torch.float32


def test_can_use_answers_for_the_cast(device):
    query, key, value = SHAPE.make(device)
    half = sa.can_use(*(tensor.bfloat16() for tensor in (query, key, value)))
    assert not sa.can_use(query, key.half(), value)
    with torch.autocast(device, torch.bfloat16):
        assert sa.can_use(query, key.half(), value) == half


def test_a_model_under_autocast(device, monkeypatch):
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, device=device).eval()
    tokens = torch.randn(2, 50, 64, device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        want = layer(tokens)
        got = sa.swap_attention(torch.nn.TransformerEncoder(layer, 1), sa.Full())(tokens)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)


def test_compiled_calls_cast(device):
    torch._dynamo.reset()
    tensors = SHAPE.make(device)

    def call(query, key, value):
        with torch.autocast(device, torch.bfloat16):
            return sa.band_attention(query, key.half(), value, 9)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), call(*tensors))


def test_backward_still_raises(device):
    query, key, value = SHAPE.make(device)
    with torch.autocast(device, torch.bfloat16):
        out = sa.fused_attention(query.requires_grad_(), key, value)
    with pytest.raises(RuntimeError, match="expected inference"):
        out.sum().backward()

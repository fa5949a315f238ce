"""Tensors of a layout, dtype or class that no op takes are refused in one sentence.

Whatever is computed before the op: nested and sparse ones, numbers that torch does not convert.
"""

import pytest
import torch

import sparse_attn as sa

KINDS = ("nested", "jagged", "sparse", "csr")
BY_HEAD = sa.ByHead({0: sa.Band(3)}, sa.Full())
LISTS_BY_HEAD = sa.ByHead({0: sa.BlockTopK(64)}, sa.BlockTopK(64, mass=0.5))
OF_OPS = r"sparse_attn::\w+: not served: tensors of (torch's backend \w+|this class)"
OF_PYTHON = (
    r"sparse_attn\.[\w.]+: expected {} to be a dense \(strided\) tensor, "
    r"got (a nested tensor|one of layout torch\.\w+)"
)


class EvenKeys(sa.Pattern):
    def allows(self, row, position, key):
        return key % 2 == 0


def without_strides(kind, device, dtype=torch.float32):
    """Such a tensor in the place of (B, H, S, D)."""
    if kind in ("sparse", "csr"):
        tensor = torch.ones(2, 2, 64, 16, device=device, dtype=dtype)
        return tensor.to_sparse() if kind == "sparse" else tensor.to_sparse_csr()
    layout = torch.strided if kind == "nested" else torch.jagged
    rows = [torch.ones(length, 2, 16, device=device, dtype=dtype) for length in (64, 30)]
    return torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)


def plain(device):
    return torch.randn(2, 2, 64, 16, device=device)


CALLS = {
    "by-head": lambda x, p: sa.sparse_attention(x, x, x, BY_HEAD),
    "by-head-value": lambda x, p: sa.sparse_attention(p, p, x, BY_HEAD),
    "by-head-mask": lambda x, p: sa.sparse_attention(p, p, p, BY_HEAD, attn_mask=x),
    "by-head-lists": lambda x, p: sa.sparse_attention(x, x, x, LISTS_BY_HEAD),
    "own-pattern": lambda x, p: sa.naive_attention(x, x, x, EvenKeys()),
    "own-pattern-mask": lambda x, p: sa.naive_attention(p, p, p, EvenKeys(), attn_mask=x),
    "out-and-lse": lambda x, p: sa.fused_attention(x, x, x, out=p, return_lse=True),
    "compare": lambda x, p: sa.quality.compare(x, x, x, BY_HEAD),
}
PYTHON_CALLS = {
    "sketch": ("key", lambda x, p: sa.KeySketch(x)),
    "sketch-append": ("key", lambda x, p: sa.KeySketch(p).append(x)),
    "quantize-key": ("key", lambda x, p: sa.quantize_cache(x, x)),
    "quantize-value": ("value", lambda x, p: sa.quantize_cache(p, x)),
    "from-mask": ("mask", lambda x, p: sa.BlockLayout.from_mask(x, 16, 16)),
    "from-token-mask": ("mask", lambda x, p: sa.BlockLayout.from_token_mask(x, 16, 16)),
    "layout": ("counts", lambda x, p: sa.BlockLayout(x, x, 16, 16, 4)),
    "nearest": ("mask", lambda x, p: sa.nearest(x)),
    "globals": ("global_tokens", lambda x, p: sa.Band(3, global_tokens=x)),
    "multihead": ("query", lambda x, p: sa.nn.SparseMultiheadAttention(32, 2)(x, x, x)),
}


NO_WHOLE_NUMBERS = {
    "bool": torch.ones(2).bool(),
    "complex64": torch.ones(2, dtype=torch.complex64),
    "int4": torch.ones(2).byte().view(torch.int4),
    "bits8": torch.ones(2).byte().view(torch.bits8),
}
WHOLE_NUMBERS = {
    "query_offset": lambda x, p: sa.fused_attention(p, p, p, query_offset=x),
    "key_origin": lambda x, p: sa.sparse_attention(p, p, p, BY_HEAD, key_origin=x),
    "global_tokens": lambda x, p: sa.band_attention(p, p, p, 3, global_tokens=x),
    "counts": lambda x, p: sa.BlockLayout(x, torch.zeros(2, 1).int(), 16, 16, 4),
    "slot_mapping": lambda x, p: sa.append_to_cache(p[0], p[0], p, p, x),
}


@pytest.mark.parametrize("kind", NO_WHOLE_NUMBERS)
@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_numbers_that_are_not_whole_are_refused(name, kind):
    sentence = rf"^sparse_attn\.\w+: expected {name} of an integer dtype, got {kind}$"
    with pytest.raises(ValueError, match=sentence):
        WHOLE_NUMBERS[name](NO_WHOLE_NUMBERS[kind], plain("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_op_refuses_them(call, kind, device):
    with pytest.raises(NotImplementedError, match=rf"^{OF_OPS}$"):
        call(without_strides(kind, device), plain(device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "call"), PYTHON_CALLS.values(), ids=PYTHON_CALLS)
def test_python_refuses_what_it_computes_with(name, call, kind, device):
    with pytest.raises(TypeError, match=rf"^{OF_PYTHON.format(name)}$"):
        call(without_strides(kind, device), plain(device))


class TakesNothing(torch.Tensor):
    """As classes are that have no rule for an op of others, such as MaskedTensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def test_a_class_without_a_rule_is_refused(device):
    tensor = plain(device)
    own = torch.Tensor._make_subclass(TakesNothing, tensor)
    refused = "not served: tensors of this class"
    for name, call in {
        "fused": lambda: sa.fused_attention(own, tensor, tensor),
        "band_out": lambda: sa.band_attention(tensor, tensor, own, 3, out=tensor.clone()),
        "select_blocks": lambda: sa.select_blocks(tensor, own, sa.BlockTopK(64)),
    }.items():
        with pytest.raises(NotImplementedError, match=f"^sparse_attn::{name}: {refused}$"):
            call()
    reasons = sa.can_use(own, tensor, tensor).reasons
    assert reasons == (f"sparse_attn::fused: {refused}",)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_not_converted_before_the_op(kind, device):
    offsets = without_strides(kind, device, torch.int64)
    with pytest.raises(NotImplementedError, match=rf"^{OF_OPS}$"):
        sa.fused_attention(*[plain(device)] * 3, query_offset=offsets)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "pattern", [BY_HEAD, sa.TopK(3, inside=sa.BlockTopK())], ids=["by-head", "topk-in-blocks"]
)
def test_can_use_gives_the_sentence(pattern, kind, device):
    x = without_strides(kind, device)
    answer = sa.can_use(x, x, x, pattern)
    assert not answer and "not served: tensors of" in answer.reasons[0]

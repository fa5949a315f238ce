"""merge_states: partial results over disjoint keys give the result over all keys."""

import pytest
import torch
from reference import DTYPES, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("cut", [0, 1, 40, 97])
def test_two_parts_are_the_whole(device, dtype, cut):
    query, key, value = Shape(2, 4, 2, 33, 97, 64).make(device, dtype)
    parts = [
        sa.fused_attention(query, key[:, :, keys], value[:, :, keys], return_lse=True)
        for keys in (slice(0, cut), slice(cut, 97))
    ]
    out, lse = sa.merge_states(*parts[0], *parts[1])
    assert out.dtype == dtype and lse.dtype == torch.float32
    if dtype == torch.float32:
        assert_close_to_reference((out, lse), query, key, value)
    want, want_lse = sa.fused_attention(query, key, value, return_lse=True)
    torch.testing.assert_close(lse, want_lse)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, want, atol=4 * eps, rtol=4 * eps)


def test_parts_without_keys(device):
    query, key, value = Shape(1, 2, 1, 5, 9, 64).make(device)
    some = sa.fused_attention(query, key, value, return_lse=True)
    none = (torch.zeros_like(some[0]), torch.full_like(some[1], -torch.inf))
    for merged in (sa.merge_states(*some, *none), sa.merge_states(*none, *some)):
        assert torch.equal(merged[0], some[0]) and torch.equal(merged[1], some[1])
    out, lse = sa.merge_states(*none, *none)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_lse_far_apart(device):
    out = torch.ones(1, 1, 2, 8, device=device)
    low, high = (
        torch.full((1, 1, 2), -3e4, device=device),
        torch.full((1, 1, 2), 3e4, device=device),
    )
    merged, lse = sa.merge_states(out, low, 2 * out, high)
    assert torch.equal(merged, 2 * out) and torch.equal(lse, high)


@pytest.mark.parametrize("head_dim", [0, 1, 255, 256, 257, 700])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_any_head_dim(device, dtype, head_dim):
    outs = torch.randn(2, 1, 2, 5, head_dim, device=device).to(dtype)
    lses = torch.randn(2, 1, 2, 5, device=device)
    out, lse = sa.merge_states(outs[0], lses[0], outs[1], lses[1])
    want = (torch.softmax(lses.double(), 0)[..., None] * outs.double()).sum(0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, atol=4 * eps, rtol=4 * eps)
    torch.testing.assert_close(lse, lses.logsumexp(0))


@pytest.mark.parametrize("memory", ["transposed", "gaps"])
def test_strides(device, memory):
    a, _, b = Shape(2, 2, 2, 9, 9, 16).make(device, memory=memory)
    lse_a, lse_b = torch.randn(2, 2, 9, 2, device=device).unbind(-1)
    merged = sa.merge_states(a, lse_a, b, lse_b)
    dense = sa.merge_states(*(tensor.contiguous() for tensor in (a, lse_a, b, lse_b)))
    assert torch.equal(merged[0], dense[0]) and torch.equal(merged[1], dense[1])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_packed_states(device, dtype):
    query, key, value = Shape(1, 4, 2, 9, 33, 64).make(device, dtype)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    starts = [[0, 2, 9], [0, 12, 33]], [[0, 2, 9], [0, 20, 33]]
    parts = []
    for rows, keys in starts:
        bounds = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in (rows, keys)]
        parts.append(sa.varlen_attention(query, key, value, *bounds, 9, 33, return_lse=True))
    out, lse = sa.merge_states(*parts[0], *parts[1])
    assert out.is_contiguous() and lse.is_contiguous()
    batch = [(part.transpose(0, 1)[None], part_lse[None]) for part, part_lse in parts]
    want, want_lse = sa.merge_states(*batch[0], *batch[1])
    assert torch.equal(out, want[0].transpose(0, 1)) and torch.equal(lse, want_lse[0])


def test_packed_states_that_do_not_fit(device):
    out, lse = torch.zeros(5, 2, 16, device=device), torch.zeros(2, 5, device=device)
    sentence = r"sparse_attn.merge_states: expected {} beside a packed out_a, got shape {}$"
    for wrong, shapes in (
        ((out, lse.mT, out, lse), (r"lse_a of shape \(2, 5\)", r"\(5, 2\)")),
        ((out, lse, out[:4], lse), (r"out_b of shape \(5, 2, 16\)", r"\(4, 2, 16\)")),
        ((out, lse, out[None], lse), (r"out_b of shape \(5, 2, 16\)", r"\(1, 5, 2, 16\)")),
    ):
        with pytest.raises(ValueError, match=sentence.format(*shapes)):
            sa.merge_states(*wrong)


def test_merge_out(device):
    a, _, b = Shape(2, 2, 2, 9, 9, 16).make(device)
    lse_a, lse_b = torch.randn(2, 2, 2, 9, device=device)
    out, lse = torch.empty(2, 9, 2, 16, device=device).transpose(1, 2), torch.empty_like(lse_a)
    torch.ops.sparse_attn.merge_states_out(a, lse_a, b, lse_b, out=out, lse=lse)
    want, want_lse = sa.merge_states(a, lse_a, b, lse_b)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


WRONG_OUT = {
    "shape": (lambda s: s | {"out": s["out"][:, :1]}, r"out of shape \(2, 2, 9, 16\)"),
    "dtype": (
        lambda s: s | {"out": s["out"].half()},
        "out of out_a's dtype float32, got float16",
    ),
    "lse-dtype": (lambda s: s | {"lse": s["lse"].double()}, "lse of dtype float32, got float64"),
    "itself": (
        lambda s: s | {"out": s["out"][:, :, :1].expand(2, 2, 9, 16)},
        "out without overlapping elements, got overlapping strides",
    ),
    "out-is-input": (lambda s: s | {"out": s["out_b"]}, "out that does not overlap out_b"),
    "lse-is-input": (lambda s: s | {"lse": s["lse_a"]}, "lse that does not overlap lse_a"),
    "lse-in-out": (lambda s: s | {"lse": s["out"][..., 0]}, "out that does not overlap lse"),
}


@pytest.mark.parametrize("change, sentence", WRONG_OUT.values(), ids=WRONG_OUT)
def test_wrong_merge_out(device, change, sentence):
    tensors = [torch.zeros(2, 2, 9, 16, device=device) for _ in range(3)]
    lses = [torch.zeros(2, 2, 9, device=device) for _ in range(3)]
    names = ("out_a", "out_b", "out"), ("lse_a", "lse_b", "lse")
    states = dict(zip(names[0] + names[1], tensors + lses, strict=True))
    with pytest.raises(RuntimeError, match=f"^sparse_attn::merge_states: expected {sentence}"):
        torch.ops.sparse_attn.merge_states_out(**change(states))

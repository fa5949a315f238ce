"""Token top-k lists its keys: those that the output is made of, ascending, -1 past the last."""

import pytest
import torch
from reference import DTYPES, Shape

import sparse_attn as sa
from sparse_attn.testing import allowed_keys, assert_close_to_reference

SHAPE = Shape(2, 4, 2, 20, 150, 64)
CALLS = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 3},
    "negative-scale": {"scale": -0.1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sink_logits": torch.full((4,), 60.0)},
    "alibi": {"alibi_slopes": torch.full((4,), 9.0)},
    "additive": {
        "attn_mask": torch.linspace(-9e3, 9e3, 150).where(torch.arange(150) > 4, -torch.inf)
    },
}


def as_mask(indices, length):
    """Which keys are listed, each once and in order."""
    listed = indices >= 0
    assert ((indices[..., 1:] > indices[..., :-1]) | ~listed[..., 1:]).all()
    mask = torch.zeros(*indices.shape[:-1], length + 1, dtype=torch.bool, device=indices.device)
    mask.scatter_(-1, indices.where(listed, length), True)
    assert torch.equal(mask[..., :length].sum(-1), listed.sum(-1))
    return mask[..., :length]


def best(query, key, allowed, k, scale):
    """The k best keys by a stable sort: of equal scores the first."""
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT * scale
    ranked = scores.masked_fill(~allowed, -torch.inf).sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(allowed).scatter(-1, ranked.indices[..., :k], True) & allowed


@pytest.mark.parametrize("by", ["auto", "naive"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("k", [1, 9, 200])
def test_the_best_keys_are_listed(device, k, call, by):
    """Scores with ties, and rows of which one key has all the weight."""
    common = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in CALLS[call].items()
    }
    query = 30.0 * torch.randint(-2, 3, (2, 4, 20, 64), device=device)
    key = torch.randint(-2, 3, (2, 2, 150, 64), device=device).float()
    out, indices = sa.topk_attention(
        query, key, torch.randn_like(key), k, return_indices=True, engine=by, **common
    )
    assert out.shape == query.shape and indices.dtype == torch.int64
    assert indices.shape == (2, 4, 20, min(k, 150))
    placing = {name: common[name] for name in common if name in ("is_causal", "query_offset")}
    mask = common.get("attn_mask")
    allowed = allowed_keys(query, key, attn_mask=mask, **placing)
    want = best(query, key, allowed, k, common.get("scale", 0.125))
    assert torch.equal(as_mask(indices, 150), want)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("value_dim", [None, 16])
def test_the_output_is_made_of_the_listed_keys(device, dtype, value_dim):
    query, key, value = Shape(2, 4, 2, 20, 150, 64, Dv=value_dim).make(device, dtype)
    out, lse, indices = sa.topk_attention(
        query, key, value, 9, return_lse=True, return_indices=True
    )
    again, lse_again = sa.topk_attention(query, key, value, 9, return_lse=True)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    mask = as_mask(indices, 150)
    assert_close_to_reference((out, lse), query, key, value, attn_mask=mask)


def test_keys_inside_blocks(device):
    query, key, value = SHAPE.make(device)
    blocks = sa.BlockTopK(16, mass=None, budget_blocks=2, local_blocks=1)
    _, indices = sa.topk_attention(query, key, value, 5, inside=blocks, return_indices=True)
    layout = sa.select_blocks(query, key, blocks)
    assert not (as_mask(indices, 150) & ~sa.BlockSparse(layout).mask(20, 150)).any()
    _, of_list = sa.topk_attention(query, key, value, 5, inside=layout, return_indices=True)
    assert torch.equal(indices, of_list) and (indices >= 0).all()


def test_keys_of_float8(device):
    query, key, value = SHAPE.make(device, torch.float16)
    key, value = key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn)
    tiny = torch.tensor(1e-9, device=device)
    _, indices = sa.topk_attention(query, key, value, 5, value_scale=tiny, return_indices=True)
    _, want = sa.topk_attention(query, key.half(), value.half(), 5, return_indices=True)
    assert torch.equal(indices, want)


@pytest.mark.parametrize("lengths", [(0, 9), (9, 0)], ids=str)
def test_empty_calls(device, lengths):
    query, key, value = Shape(1, 2, 1, *lengths, 16).make(device)
    out, indices = sa.topk_attention(query, key, value, 4, return_indices=True)
    assert out.shape == query.shape and indices.shape == (1, 2, lengths[0], min(4, lengths[1]))


def test_an_output_of_the_caller_s_and_a_compiled_call(device):
    query, key, value = SHAPE.make(device)
    given = torch.empty_like(query)
    out, indices = sa.topk_attention(query, key, value, 5, out=given, return_indices=True)
    assert out is given

    def call(*tensors):
        return sa.topk_attention(*tensors, 5, return_indices=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(query, key, value)
    assert torch.equal(compiled[0], out) and torch.equal(compiled[1], indices)


@pytest.mark.parametrize(
    "size, scale", [(2.0**20, None), (1, 2.0**100), (1, -(2.0**33)), (2.0**-10, 2.0**-100)]
)
def test_scores_of_any_size(device, size, scale):
    """Weights vanish where scores lie far apart; their keys are chosen all the same."""
    query, key, value = SHAPE.make(device)
    query, key = size * query, size * key
    _, indices = sa.topk_attention(query, key, value, 5, scale=scale, return_indices=True)
    sign = -1.0 if scale is not None and scale < 0 else None
    _, want = sa.topk_attention(query / size, key / size, value, 5, scale=sign, return_indices=True)
    assert torch.equal(indices, want)


def test_vmap(device):
    tensors = [torch.stack([tensor, 2 * tensor.flip(2)]) for tensor in SHAPE.make(device)]

    def call(*tensors):
        return sa.topk_attention(*tensors, 5, return_indices=True)[1]

    indices = torch.vmap(call)(*tensors)
    for mine, *own in zip(indices, *tensors, strict=True):
        assert torch.equal(mine, call(*own))


def test_a_wrong_kind():
    query, key, value = SHAPE.make("cpu")
    sentence = "^sparse_attn.topk_attention: expected return_indices to be a bool, got int$"
    with pytest.raises(TypeError, match=sentence):
        sa.topk_attention(query, key, value, 5, return_indices=1)

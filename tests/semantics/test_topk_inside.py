"""Token top-k inside blocks: the k best keys of blocks that a list names or the data chooses."""

import pytest
import torch
from reference import DTYPES, Shape, random_layout

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

BLOCKS = [(16, 16), (32, 48), (64, 64), (128, 32), (192, 128)]
CHOICES = {
    "count": sa.BlockTopK(32, mass=None, budget_blocks=3, local_blocks=1),
    "mass": sa.BlockTopK((64, 16), mass=0.7),
    "group": sa.BlockTopK(16, mass=None, budget_share=0.4, group="kv", selector="mean"),
}


def brute_force(query, key, value, mask, k):
    """Attention to the k best keys of each row's mask, ties to the lower key, a row at a time."""
    group = query.shape[1] // key.shape[1]
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        scores = key[b, h // group].double() @ query[b, h, i].double() * query.shape[3] ** -0.5
        keys = mask[b, h, i].nonzero().flatten().tolist()
        best = sorted(keys, key=lambda j, s=scores: (-s[j].item(), j))[:k]
        if best:
            weights = torch.softmax(scores[best], 0)
            out[b, h, i] = weights @ value[b, h // group, best].double()
    return out


@pytest.mark.parametrize("k", [1, 5, 40, 1000])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_brute_force_with_many_ties(attend, device, is_causal, k):
    shape = attend.fit(Shape(1, 4, 2, 70, 133, 16))
    query, key, value = (
        torch.randint(-1, 2, tensor.shape, device=device).to(attend.dtype)
        for tensor in shape.make(device)
    )
    layout = random_layout(shape.Sq, 133, max(shape.block, 32), 16, device, 1, 4, 0.4)
    out = attend(sa.TopK(k, inside=layout), query, key, value, is_causal=is_causal)
    mask = sa.BlockSparse(layout).mask(shape.Sq, 133, is_causal).cpu()
    want = brute_force(query.cpu(), key.cpu(), value.cpu(), mask, k)
    assert (out.double().cpu() - want).abs().max() < {torch.float32: 1e-5}.get(out.dtype, 2e-2)


@pytest.mark.parametrize("block_q, block_kv", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (40, 40), (128, 72)])
def test_lists(attend, device, dtype, block_q, block_kv, head_dim, value_dim):
    tensors = Shape(2, 4, 2, 203, 331, head_dim, Dv=value_dim).make(device, dtype)
    layout = random_layout(203, 331, block_q, block_kv, device, 2, 4)
    for k in (3, 100):
        result = attend(sa.TopK(k, layout), *tensors, is_causal=True, return_lse=True)
        pattern = sa.TopK(k, inside=sa.BlockSparse(layout))
        assert_close_to_reference(result, *tensors, pattern, is_causal=True)


@pytest.mark.parametrize("k", [1, 9, 63])
def test_a_list_that_names_a_block_many_times(attend, device, k):
    """Lists are not checked: more keys than there are stay inside the room for candidates."""
    shape = attend.fit(Shape(1, 2, 1, 64, 64, 32))
    query, key, value = shape.make(device, attend.dtype)
    value[:, :, :16] = 1
    indices = torch.zeros(1, 1, -(-shape.Sq // 64), 400, dtype=torch.int32, device=device)
    counts = torch.full_like(indices[..., 0], 400)
    layout = sa.BlockLayout._trusted(counts, indices, 64, 16, 4)
    out = attend(sa.TopK(k, inside=layout), query, key, value)
    assert (out - 1).abs().max() < 1e-2


COMMON = {
    "bounds": lambda n, d: {"key_bounds": torch.tensor([30, 150]).int().expand(2, 1, n, 2).to(d)},
    "mask": lambda n, d: {"attn_mask": torch.rand(n, 201, device=d) < 0.6},
    "bias": lambda n, d: {"attn_mask": torch.randn(2, 4, n, 201, device=d)},
    "softcap": lambda n, d: {"softcap": 2.0, "sink_logits": torch.randn(4, device=d)},
    "offsets": lambda n, d: {"query_offset": torch.tensor([100, 20], device=d).int()},
    "alibi": lambda n, d: {"alibi_slopes": torch.rand(4, device=d)},
    "scale": lambda n, d: {"scale": -0.1},
}


@pytest.mark.parametrize("name", COMMON)
def test_common_arguments(attend, device, name):
    shape = attend.fit(Shape(2, 4, 2, 70, 201, 64))
    tensors, common = shape.make(device, attend.dtype), COMMON[name](shape.Sq, device)
    layout = random_layout(shape.Sq, 201, max(shape.block, 32), 16, device, 1, 2)
    pattern = sa.TopK(9, inside=layout)
    result = attend(pattern, *tensors, is_causal=True, return_lse=True, **common)
    assert_close_to_reference(result, *tensors, pattern, is_causal=True, **common)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("common", [{}, {"softcap": 2.0, "scale": 0.3}], ids=["plain", "softcap"])
def test_blocks_that_the_data_chooses(attend, device, name, common):
    tensors = attend.fit(Shape(2, 4, 2, 203, 203, 64)).make(device, attend.dtype)
    blocks = CHOICES[name]
    given = {"is_causal": True, "return_lse": True, **common}
    result = attend(sa.TopK(9, inside=blocks), *tensors, **given)
    layout = sa.select_blocks(*tensors[:2], blocks, is_causal=True, **common)
    listed = attend(sa.TopK(9, inside=layout), *tensors, **given)
    assert all(map(torch.equal, result, listed))
    assert_close_to_reference(result, *tensors, sa.TopK(9, inside=blocks), is_causal=True, **common)


def test_partial_blocks(attend, device):
    shape = attend.fit(Shape(1, 4, 2, 70, 133, 64))
    tensors = shape.make(device, attend.dtype)
    mask = torch.rand(1, 4, shape.Sq, 133, device=device) < 0.3
    layout = sa.BlockLayout.from_token_mask(mask, max(shape.block, 32), 48)
    pattern = sa.TopK(6, inside=layout)
    result = attend(pattern, *tensors, return_lse=True)
    assert_close_to_reference(result, *tensors, pattern)


def test_all_of_the_blocks_and_all_of_the_keys(attend, device):
    """As many keys as there are: the blocks alone. All blocks: top-k alone."""
    shape = attend.fit(Shape(1, 4, 2, 70, 133, 64))
    tensors = shape.make(device, torch.float32 if attend.dtype == torch.float32 else attend.dtype)
    layout = random_layout(shape.Sq, 133, max(shape.block, 32), 16, device)
    every = random_layout(shape.Sq, 133, max(shape.block, 32), 16, device, density=2.0)
    pairs = [(sa.TopK(133, layout), sa.BlockSparse(layout)), (sa.TopK(7, every), sa.TopK(7))]
    for ours, other in pairs:
        out = attend(ours, *tensors)
        tolerance = 1e-5 if out.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out, attend(other, *tensors), rtol=tolerance, atol=tolerance)


def test_functions_agree(device):
    tensors = Shape(2, 4, 2, 70, 70, 64).make(device)
    blocks = CHOICES["count"]
    want = sa.sparse_attention(*tensors, sa.TopK(5, inside=blocks), is_causal=True)
    assert torch.equal(sa.topk_attention(*tensors, 5, inside=blocks, is_causal=True), want)
    naive = sa.naive_attention(*tensors, sa.TopK(5, inside=blocks), is_causal=True)
    assert_close_to_reference(naive, *tensors, sa.TopK(5, inside=blocks), is_causal=True)
    by_head = sa.sparse_attention(
        *tensors, sa.ByHead({1: sa.TopK(5, inside=blocks)}), is_causal=True
    )
    assert torch.equal(by_head[:, 2:], want[:, 2:])
    kept = sa.quality.compare(*tensors, sa.TopK(5, inside=blocks), is_causal=True)
    assert 0 < kept.pairs < 5 * 70 / (70 * 71 / 2) + 1e-6 and bool((kept.mass < 1).all())


def test_one_graph(device):
    torch._dynamo.reset()

    def call(query, key, value):
        return sa.topk_attention(query, key, value, 5, inside=CHOICES["count"], is_causal=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (70, 90):
        tensors = Shape(1, 4, 2, length, length, 64).make(device)
        assert torch.equal(compiled(*tensors), call(*tensors))


def test_who_serves_it(device):
    tensors = Shape(1, 4, 2, 16, 128, 64).make(device, torch.bfloat16)
    for inside in (CHOICES["count"], random_layout(16, 128, 64, 64, device)):
        answer = sa.can_use(*tensors, sa.TopK(5, inside=inside))
        assert answer.engine == ("tiled" if device == "cpu" else "portable")
        for reason in answer.reasons:
            assert "token top-k" in reason or reason == "small takes no block lists"
    assert not sa.can_use(tensors[0][0], *tensors[1:], sa.TopK(5, inside=CHOICES["count"]))


def test_what_it_says_of_itself(tmp_path):
    layout = sa.BlockLayout.local(64, 64, 16, 16, (0, 0))
    pattern = sa.TopK(3, inside=layout)
    assert pattern == sa.TopK(3, inside=sa.BlockSparse(layout)) != sa.TopK(3)
    assert repr(sa.TopK(3)) == "TopK(k=3)" and "inside=BlockSparse" in repr(pattern)
    assert pattern.density(64, 64) == 3 / 64
    assert pattern.density(64, 64, is_causal=True) == (1 + 2 + 14 * 3) * 4 / (64 * 64)
    with pytest.raises(NotImplementedError, match="no density without data"):
        sa.TopK(3, inside=sa.BlockTopK()).density(64, 64)
    with pytest.raises(ValueError, match="expected a layout"):
        pattern.density(64, 128)
    policy = sa.Policy(sa.TopK(64, inside=sa.BlockTopK(mass=0.8)))
    policy.save(tmp_path / "policy.json")
    assert sa.Policy.load(tmp_path / "policy.json").pattern == policy.pattern


def test_errors(device):
    tensors = Shape(1, 4, 2, 64, 64, 64).make(device)
    what = "expected inside to be a BlockTopK, a BlockSparse, a BlockLayout or None, got Band"
    with pytest.raises(TypeError, match=what):
        sa.TopK(3, inside=sa.Band(3))
    layout = random_layout(64, 128, 16, 16, device)
    with pytest.raises(ValueError, match="sparse_attn::topk: expected a layout of 4 key blocks"):
        sa.topk_attention(*tensors, 3, inside=layout)
    with pytest.raises(RuntimeError, match="naive: expected the arguments of one pattern"):
        torch.ops.sparse_attn.naive(*tensors, left=3, k=3)

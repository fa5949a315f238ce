"""Selectors ``minmax`` and ``mean`` by a key sketch, which they read in place of the keys."""

import re
from dataclasses import replace

import pytest
import torch
from reference import DTYPES, Shape
from selection import DTYPE_ERRORS, check_selection, pattern_of

import sparse_attn as sa


def pooled(selector, sketch=None, block=64, **changes):
    """Block top-k by the extremes or the means of key blocks, with little that is forced."""
    return pattern_of(selector, block, sketch=sketch, **changes)


def lists_of(query, key, pattern, **call):
    layout = sa.select_blocks(query, key, pattern, **call)
    return layout.counts, layout.indices


def assert_same_lists(left, right):
    for mine, other in zip(left, right, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("Sq, Skv", [(1, 700), (40, 333), (300, 513), (90, 40)])
@pytest.mark.parametrize("held", [1.0, 0.6], ids=["all-held", "some-held"])
def test_lists_follow_from_the_sketch(device, selector, held, Sq, Skv, group, is_causal):
    query, key, _ = Shape(2, 6, 2, Sq, Skv, 40).make(device)
    sketch = sa.KeySketch(key[:, :, : int(held * Skv)])
    sketch.lengths[1] -= 23  # ends inside a group, whose range is of more keys
    check_selection(pooled(selector, sketch, group=group), 2 * query, key, is_causal)


SETTINGS = {
    "wide-queries": {"block": (128, 64)},
    "wide-keys": {"block": (16, 192)},
    "blocks-of-128": {"block": 128, "group": "kv"},
    "budget": {"mass": None, "budget_blocks": 3, "sink_blocks": 0, "local_blocks": 0},
    "share": {"mass": None, "budget_share": 0.4},
    "mass-and-tokens": {"mass": 0.9, "budget_tokens": 256},
}


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(device, selector, settings, bits):
    query, key, _ = Shape(1, 4, 2, 230, 700, 32).make(device)
    pattern = pooled(selector, sa.KeySketch(key[:, :, :520], bits), **settings)
    check_selection(pattern, 2 * query, key, True)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("block", [16, (32, 48), (16, 80), 96], ids=str)
def test_means_of_any_blocks(device, block, bits):
    """Blocks need not be multiples of the groups, whose codes are by token."""
    query, key, _ = Shape(2, 4, 2, 90, 500, 40).make(device)
    sketch = sa.KeySketch(key[:, :, :420], bits)
    sketch.lengths[1] = 201
    for group in ("q", "kv"):
        check_selection(pooled("mean", sketch, block, group=group), 2 * query, key, True)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize("dtype", DTYPE_ERRORS, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
def test_types_and_head_dims(device, selector, head_dim, dtype):
    query, key, _ = Shape(1, 2, 1, 200, 330, head_dim).make(device, dtype)
    error = DTYPE_ERRORS[dtype] if device == "cuda" else 1e-5
    check_selection(pooled(selector, sa.KeySketch(key)), query, key, True, error=error)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize(
    "call",
    [
        {"scale": 0.5},
        {"scale": -0.2},
        {"softcap": 1.5},
        {"query_offset": 23},
        {"query_offset": torch.tensor([-20, 190])},
        {"key_origin": torch.tensor([70, 3])},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPE_ERRORS, ids=str)
def test_scores_and_places_are_those_of_the_call(device, selector, dtype, call):
    query, key, _ = Shape(2, 2, 1, 100, 290, 32).make(device, dtype)
    error = DTYPE_ERRORS[dtype] if device == "cuda" else 1e-5
    tensors = {k: v.int().to(device) for k, v in call.items() if isinstance(v, torch.Tensor)}
    pattern = pooled(selector, sa.KeySketch(key[:, :, :260]), local_blocks=0)
    check_selection(pattern, query, key, True, error=error, **{**call, **tensors})


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("dtype", DTYPE_ERRORS, ids=str)
def test_bounds(device, selector, dtype, group, heads):
    """Groups whose keys no row sees have no part, others count whole; a hole in what rows see."""
    query, key, _ = Shape(2, 4, 2, 96, 500, 16).make(device, dtype)
    bounds = torch.tensor([[200, 500], [70, 130]]).view(2, 1, 1, 2).repeat(1, heads, 96, 1)
    bounds[1, -1, 40:] = torch.tensor([300, 470])
    bounds[:, :, 10:12] = 9  # rows without keys
    sketch = sa.KeySketch(key[:, :, :350])
    sketch.ranges[0, :, 2] = sketch.ranges[1, :, 0] = 50  # nothing sees these parts of blocks
    error = DTYPE_ERRORS[dtype] if device == "cuda" else 1e-5
    bounds = bounds.int().to(device)
    pattern = pooled(selector, sketch, (32, 128), group=group, local_blocks=0)
    check_selection(pattern, query, key, key_bounds=bounds, error=error)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("block", [64, (128, 192)], ids=str)
def test_bounds_are_those_of_the_keys_themselves(device, dtype, block):
    """Bit for bit, where groups are seen whole: ranges round nothing."""
    query, key, _ = Shape(2, 4, 2, 300, 1000, 64).make(device, dtype)
    for group in ("q", "kv"):
        pattern = pooled("minmax", sa.KeySketch(key), block, group=group)
        own = lists_of(query, key, pattern, is_causal=True)
        assert_same_lists(own, lists_of(query, key, replace(pattern, sketch=None), is_causal=True))


@pytest.mark.parametrize("selector", ["minmax", "mean"])
def test_keys_are_not_read(device, selector):
    query, key, _ = Shape(2, 4, 2, 200, 640, 32).make(device)
    pattern = pooled(selector, sa.KeySketch(key))
    want = lists_of(query, key, pattern, is_causal=True)
    assert_same_lists(lists_of(query, key.fill_(torch.nan), pattern, is_causal=True), want)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
def test_a_sketch_that_grew(device, selector):
    """Appended, cropped, with room for more."""
    query, key, _ = Shape(1, 2, 1, 70, 423, 40).make(device)
    sketch = sa.KeySketch(key[:, :, :5], capacity=1000)
    for begin, end in ((5, 6), (6, 130), (130, 131), (131, 423)):
        sketch.append(key[:, :, begin:end])
    sketch.append(key[:, :, :90])
    sketch.crop(key)
    own = lists_of(query, key, pooled(selector, sketch), is_causal=True)
    at_once = pooled(selector, sa.KeySketch(key))
    assert_same_lists(own, lists_of(query, key, at_once, is_causal=True))


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize("Sq", [1, 200])
def test_blocks_past_the_sketch_are_kept(device, selector, Sq):
    query, key, _ = Shape(2, 2, 1, Sq, 800, 32).make(device, torch.bfloat16)
    sketch = sa.KeySketch(key[:, :, :666])
    sketch.lengths[1] = 0
    for group in ("q", "kv"):
        pattern = pooled(selector, sketch, mass=None, budget_blocks=11, group=group)
        kept = sa.select_blocks(query, key, pattern).to_mask()
        assert kept[:, ..., 10:].all()  # from key 640 on
        assert (kept[0].sum(-1) == 11).all() and kept[1].all()


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.sanitizer
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("junk", [torch.nan, -torch.inf, 3e38], ids=str)
def test_a_malformed_sketch_still_gives_lists(device, selector, junk, group):
    """Any ranges and lengths: blocks that exist, in order, and nothing read outside."""
    query, key, value = Shape(3, 4, 2, 130, 400, 72).make(device, torch.bfloat16)
    sketch = sa.KeySketch(key, capacity=448)
    sketch.ranges[:, :, ::2] = junk
    sketch.lengths.copy_(torch.tensor([-(2**31), 449, 2**31 - 1]))
    pattern = pooled(selector, sketch, group=group)
    layout = sa.select_blocks(query, key, pattern)
    counts, indices = layout.counts[..., None], layout.indices
    assert (counts > 0).all() and (counts <= 7).all()
    assert ((indices >= 0) & (indices < 7)).all()
    inside = torch.arange(1, indices.shape[-1], device=device) < counts
    assert (indices.diff(dim=-1) > 0)[inside].all()
    assert (counts[0] == 7).all()  # of which the sketch holds nothing
    out = torch.full_like(query, torch.nan)
    sa.sparse_attention(query, key, value, pattern, out=out)
    assert out.cpu().isfinite().all()  # a sanitizer sees no store of the copy engine


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_attention_reads_the_chosen_blocks(attend, device, selector, dtype):
    shape = attend.fit(Shape(2, 4, 2, 260, 700, 64, block=128))
    query, key, value = shape.make(device, dtype)
    pattern = pooled(selector, sa.KeySketch(key), (shape.block, 64), mass=0.4)
    listed = sa.BlockSparse(sa.select_blocks(query, key, pattern, is_causal=True))
    out = attend(pattern, query, key, value, is_causal=True)
    assert torch.equal(out, attend(listed, query, key, value, is_causal=True))
    by_name = sa.block_topk_attention(
        query, key, value, block_size=pattern.block_size, mass=0.4, selector=selector,
        local_blocks=1, sketch=pattern.sketch, is_causal=True, engine=attend.engine,
    )  # fmt: skip
    assert torch.equal(out, by_name)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
def test_sketches_by_head(device, selector):
    query, key, value = Shape(1, 4, 2, 100, 400, 32).make(device)
    heads = [
        pooled(selector, sa.KeySketch(key[:, h : h + 1]), mass=m) for h, m in enumerate((0.3, 0.8))
    ]
    out = sa.sparse_attention(query, key, value, sa.ByHead(dict(enumerate(heads))))
    for h, pattern in enumerate(heads):
        rows, part = slice(2 * h, 2 * h + 2), slice(h, h + 1)
        own = sa.sparse_attention(query[:, rows], key[:, part], value[:, part], pattern)
        assert torch.equal(out[:, rows], own)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
def test_traced_calls(device, selector):
    query, key, value = Shape(2, 4, 2, 70, 330, 16).make(device)
    given = pooled(selector, sa.KeySketch(key, capacity=400))._arguments()
    torch.library.opcheck(torch.ops.sparse_attn.select_blocks.default, (query, key), given)
    torch.library.opcheck(torch.ops.sparse_attn.block_topk.default, (query, key, value), given)


def test_wrong_calls(device):
    query, key, _ = Shape(1, 2, 1, 20, 100, 16).make(device)
    sketch = sa.KeySketch(key)
    pattern = pooled("minmax", sketch)
    multiple = "a block_size of keys that is a multiple of 64, the tokens of a group of the sketch"
    wrong = {
        f"{multiple}, got 96": (query, key, pooled("minmax", sketch, (64, 96))),
        f"{multiple}, got 16": (query, key, pooled("minmax", sketch, 16)),
        "a sketch of key's shape (its codes 1, 2, tokens": (
            query, key.expand(1, 2, 100, 16), pattern,
        ),
        "sketch's ranges of shape (1, 1, 2, 2, 8), got": (query[..., :8], key[..., :8], pattern),
        "a sketch of key's dtype float16": (query.half(), key.half(), pattern),
    }  # fmt: skip
    for sentence, (q, k, own) in wrong.items():
        for op, call in (("select_blocks", sa.select_blocks), ("block_topk", attention)):
            with pytest.raises(
                ValueError, match=re.escape(f"sparse_attn::{op}: expected {sentence}")
            ):
                call(q, k, own)
    ends = torch.tensor([0, 20], dtype=torch.int32, device=device)
    packed = {"cu_seq_q": ends, "cu_seq_k": 5 * ends, "max_q": 20, "max_k": 100}
    with pytest.raises(NotImplementedError, match="a kept sketch with packed keys"):
        sa.select_blocks(query[0].transpose(0, 1), key[0].transpose(0, 1), pattern, **packed)
    for other in ("mixed", "antidiagonal"):
        with pytest.raises(
            RuntimeError, match=f"selector sketch, minmax or mean with a sketch, got {other}"
        ):
            torch.ops.sparse_attn.select_blocks(
                query, key, selector=other, mass=0.9, **sketch._arguments()
            )


def attention(query, key, pattern):
    return sa.sparse_attention(query, key, key, pattern)

"""Selection by the key sketch: which blocks it finds, and the patterns and calls it refuses."""

import copy
import io
import re

import pytest
import torch
from reference import DTYPES, Shape
from selection import check_selection, decoding

import sparse_attn as sa

#: Of estimates, by rounding of products with codes on the GPU.
ERRORS = {"cpu": 1e-5, "cuda": 4e-3}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("Sq, Skv", [(1, 700), (1, 40), (3, 333), (16, 513)])
@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_selection(device, given, Sq, Skv, group, is_causal):
    query, key, _ = Shape(2, 6, 2, Sq, Skv, 40).make(device)
    query = 2 * query
    sketch = sa.KeySketch(key, 4) if given else None
    pattern = decoding(sketch, group=group)
    check_selection(pattern, query, key, is_causal, error=ERRORS[device])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 192, 256])
def test_types_and_head_dims(device, head_dim, bits, dtype):
    query, key, _ = Shape(1, 4, 1, 1, 600, head_dim).make(device, dtype)
    pattern = decoding(sa.KeySketch(key, bits), mass=0.7, tokens=200)
    check_selection(pattern, query, key, error=ERRORS[device])


BLOCKS = {
    "mass": {"mass": 0.6, "tokens": None, "budget_blocks": 30},
    "share": {"mass": None, "tokens": None, "budget_share": 0.2},
    "blocks-of-64": {"block": 64},
    "blocks-of-48": {"block": (16, 48), "group": "kv"},
    "nothing-forced": {"sink_blocks": 0, "local_blocks": 0},
    "default-local": {"local_blocks": None},
}


@pytest.mark.parametrize("Sq", [1, 5])
@pytest.mark.parametrize("changes", BLOCKS.values(), ids=BLOCKS)
def test_blocks_and_budgets(device, changes, Sq):
    query, key, _ = Shape(1, 4, 2, Sq, 500, 32).make(device)
    check_selection(decoding(**changes), 2 * query, key, True, error=ERRORS[device])


@pytest.mark.parametrize("scoring", [{"scale": 0.5}, {"scale": -0.2}, {"softcap": 1.5}], ids=str)
def test_scores_are_those_of_the_call(device, scoring):
    query, key, _ = Shape(1, 2, 1, 2, 300, 32).make(device)
    check_selection(decoding(), query, key, True, error=ERRORS[device], **scoring)


def test_bounds_and_offsets(device):
    """Left padding, caches with free room, and texts of rows that share no key."""
    query, key, _ = Shape(2, 4, 2, 3, 400, 32).make(device)
    bounds = torch.tensor([[70, 390], [5, 111]]).view(2, 1, 1, 2).repeat(1, 4, 3, 1)
    bounds[1, 2, 1] = torch.tensor([100, 350])
    bounds[0, 1, 0] = 7
    bounds = bounds.int().to(device)
    error = ERRORS[device]
    for group in ("q", "kv"):
        pattern = decoding(group=group)
        check_selection(pattern, query, key, key_bounds=bounds, error=error)
        offsets = torch.tensor([90, 333], dtype=torch.int32, device=device)
        check_selection(pattern, query, key, True, query_offset=offsets, error=error)


@pytest.mark.parametrize("junk", [torch.nan, 3e38], ids=str)
def test_keys_that_do_not_exist_never_count(device, junk):
    query, key, _ = Shape(1, 2, 1, 1, 300, 32).make(device)
    bounds = torch.tensor([[[[21, 200]]]], dtype=torch.int32, device=device)
    clean = sa.select_blocks(query, key, decoding(), key_bounds=bounds)
    key[:, :, :21] = key[:, :, 200:] = junk
    after = sa.select_blocks(query, key, decoding(), key_bounds=bounds)
    assert torch.equal(clean.indices, after.indices)
    offset = {"is_causal": True, "query_offset": 199}
    key[:, :, :21] = 0
    clean = sa.select_blocks(query, key[:, :, :200], decoding(), is_causal=True)
    after = sa.select_blocks(query, key, decoding(), **offset)
    assert torch.equal(clean.to_mask(), after.to_mask()[..., : clean.num_kv_blocks])


def test_blocks_past_the_sketch_are_kept(device):
    query, key, _ = Shape(2, 2, 1, 1, 400, 32).make(device)
    sketch = sa.KeySketch(key[:, :, :330])
    sketch.lengths[1] = 0
    for group in ("q", "kv"):
        kept = sa.select_blocks(query, key, decoding(sketch, group=group)).to_mask()
        assert kept[:, :, :, 20:].all()  # from key 320 on
        assert kept[0, :, :, :20].any() and not kept[0, :, :, :20].all()
        assert kept[1].all()


@pytest.mark.parametrize("others", [(0, 330), (390, 350)], ids=str)
def test_each_row_keeps_its_blocks_past_the_sketch(device, others):
    """Whatever keys the rows after it see."""
    query, key, _ = Shape(1, 2, 1, 3, 400, 32).make(device)
    bounds = torch.tensor([(0, 400), others, others], dtype=torch.int32, device=device)
    pattern = decoding(sa.KeySketch(key[:, :, :320]))
    kept = sa.select_blocks(query, key, pattern, key_bounds=bounds[None, None]).to_mask()
    assert kept[..., 20:].all()


@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("junk", [torch.nan, -torch.inf, 3e38], ids=str)
def test_a_malformed_sketch_still_gives_lists(device, junk, group):
    """Any codes, ranges and lengths: blocks that exist, in order, and nothing read outside."""
    query, key, value = Shape(3, 4, 2, 2, 400, 72).make(device)
    sketch = sa.KeySketch(key, capacity=448)
    sketch.codes.random_(-(2**31), 2**31 - 1)
    sketch.ranges[:, :, ::2] = junk
    sketch.lengths.copy_(torch.tensor([-(2**31), 449, 2**31 - 1]))
    pattern = decoding(sketch, group=group)
    layout = sa.select_blocks(query, key, pattern)
    counts, indices = layout.counts[..., None], layout.indices
    assert (counts > 0).all() and (counts <= 25).all()
    assert ((indices >= 0) & (indices < 25)).all()
    inside = torch.arange(1, indices.shape[-1], device=device) < counts
    assert (indices.diff(dim=-1) > 0)[inside].all()
    assert (counts[0] == 25).all()  # of which the sketch holds nothing
    assert sa.sparse_attention(query, key, value, pattern).isfinite().all()
    sketch.append(key[:, :, :40])  # two have no room, and leave them out
    assert sketch.lengths.tolist() == [40, 448, 448]


def test_needles_are_found(device):
    """Keys that resemble the query stand anywhere; all are kept at a fiftieth of the tokens."""
    query, key, _ = Shape(1, 4, 2, 1, 8192, 64).make(device)
    needles = [4097, 77, 5000, 8191, 63, 64]
    key[:, :, needles] = 2 * query.view(1, 2, 2, 1, 64)[:, :, 0]
    for bits in (2, 4):
        pattern = decoding(sa.KeySketch(key, bits), tokens=160)
        kept = sa.select_blocks(query, key, pattern).to_mask()
        assert kept[:, ::2, :, [needle // 16 for needle in needles]].all()


def structured(device, length=4096):
    """Keys with outlier channels and neighbours that resemble each other, as models have them."""
    query, key, value = Shape(1, 8, 2, 1, length, 64).make(device)
    key = key + torch.nn.functional.avg_pool1d(
        torch.randn(2 * 64, length + 8, device=device), 9, 1
    ).view(1, 2, 64, length).mT * 4  # fmt: skip
    key[..., ::16] += 12 * torch.randn(4, device=device)
    return query, key, value


@pytest.mark.parametrize("bits, share", [(2, 0.94), (4, 0.99)])
def test_quality_is_near_an_oracle(device, bits, share):
    """Of the mass that the truly best blocks hold, the sketch's blocks hold nearly all."""
    query, key, _ = structured(device)
    query = 3 * query
    scores = (query.double() @ key.double().repeat_interleave(4, 1).mT) / 8
    mass = scores.softmax(-1).unflatten(-1, (-1, 16)).sum(-1)
    free = {"sink_blocks": 0, "local_blocks": 0}

    def found(pattern):
        kept = sa.select_blocks(query, key, pattern).to_mask()
        assert (kept.sum(-1) == 32).all()
        return ((mass * kept).sum(-1) / mass.topk(32).values.sum(-1)).mean()

    own = found(decoding(sa.KeySketch(key, bits), tokens=512, **free))
    assert own > share
    for selector in ("mean", "minmax"):
        assert found(sa.BlockTopK(16, None, selector, budget_blocks=32, **free)) < own - 0.02


def test_patterns_say_what_they_do():
    pattern = sa.BlockTopK(16, selector="sketch", budget_tokens=2048)
    assert "budget_tokens=2048" in repr(pattern) and "local_blocks=4" in repr(pattern)
    assert pattern.mass is None and pattern._budget_count == 128
    assert sa.BlockTopK(16, 0.95, "sketch", budget_tokens=100).mass == 0.95
    assert sa.BlockTopK(48, selector="mean", budget_tokens=100)._budget_count == 3
    key = torch.randn(1, 1, 64, 8)
    first, second = sa.KeySketch(key), sa.KeySketch(key)
    assert decoding(first) == decoding(first) != decoding(second)


WRONG_PATTERNS = {
    "tokens-zero": ({"budget_tokens": 0}, "budget_tokens of at least 1, got 0"),
    "two-budgets": (
        {"budget_tokens": 9, "budget_share": 0.5},
        "budget_tokens, budget_blocks or budget_share, got both",
    ),
    "no-budget": ({"mass": None}, "budget_blocks or budget_share, got none of them"),
    "other-selector": (
        {"selector": "mixed", "sketch": "one"},
        "selector 'sketch', 'minmax' or 'mean' with a sketch",
    ),
}


@pytest.mark.parametrize("changes, sentence", WRONG_PATTERNS.values(), ids=WRONG_PATTERNS)
def test_wrong_patterns(changes, sentence):
    if "sketch" in changes:
        changes = changes | {"sketch": sa.KeySketch(torch.randn(1, 1, 9, 8))}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        sa.BlockTopK(**{"selector": "sketch", **changes})


def test_keys_of_whole_numbers_are_refused(device):
    key = torch.ones(2, 16, 2, 16, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="expected key of dtype float32, float16 or bfloat16"):
        sa.KeySketch(key)


def test_wrong_calls(device):
    query, key, value = Shape(1, 2, 1, 1, 100, 16).make(device)
    pattern = decoding(sa.KeySketch(key))
    wrong = {
        "up to 16 queries with selector sketch, got 17": (query.expand(1, 2, 17, 16), key),
        "a sketch of key's shape": (query.expand(1, 2, 1, 16), key.expand(1, 2, 100, 16)),
        "a sketch of key's dtype float16": (query.half(), key.half()),
    }
    for sentence, (q, k) in wrong.items():
        with pytest.raises(ValueError, match=f"sparse_attn::select_blocks: expected {sentence}"):
            sa.select_blocks(q, k, pattern)
        with pytest.raises(ValueError, match=f"sparse_attn::block_topk: expected {sentence}"):
            sa.sparse_attention(q, k, k, pattern)
    with pytest.raises(
        RuntimeError, match="expected a sketch that is not paged, got a paged sketch"
    ):
        torch.ops.sparse_attn.select_blocks(
            query, key, selector="sketch", budget_count=1,
            sketch_codes=pattern.sketch.codes, sketch_ranges=pattern.sketch.ranges,
            sketch_lengths=pattern.sketch.lengths[:, None],
        )  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_other_device():
    key = torch.randn(1, 1, 100, 16)
    pattern = decoding(sa.KeySketch(key.cuda()))
    with pytest.raises(ValueError, match="expected sketch on key's device cpu"):
        sa.select_blocks(key[:, :, :1], key, pattern)


def test_torch_load_reads_a_sketch_back_as_weights(device):
    """Beside the cache that it is of; it grows on as the one that was saved."""
    query, key, value = Shape(1, 2, 1, 1, 200, 16).make(device)
    file = io.BytesIO()
    torch.save(decoding(sa.KeySketch(key[:, :, :150])), file)
    file.seek(0)
    pattern = torch.load(file, weights_only=True)
    pattern.sketch.append(key[:, :, 150:])
    want = sa.sparse_attention(query, key, value, decoding(sa.KeySketch(key)))
    assert torch.equal(sa.sparse_attention(query, key, value, pattern), want)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_a_copy_grows_on_its_own(device, duplicate):
    """As beams and drafts go on from one prefix: each has the codes of its own tokens."""
    key = torch.randn(1, 2, 140, 16, device=device)
    sketch = sa.KeySketch(key[:, :, :100])
    fork = duplicate(sketch)
    fork.append(key[:, :, 100:120])
    sketch.append(key[:, :, 120:])
    for held, tail in ((fork, key[:, :, 100:120]), (sketch, key[:, :, 120:])):
        want = sa.KeySketch(torch.cat([key[:, :, :100], tail], 2))
        assert torch.equal(held.lengths, want.lengths)
        assert torch.equal(held.codes[:, :, :120], want.codes[:, :, :120])
        assert torch.equal(held.ranges[:, :, :2], want.ranges[:, :, :2])

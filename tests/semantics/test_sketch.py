"""The key sketch: its codes, its growth, what it selects for decode, and what it refuses."""

import re

import pytest
import torch
from reference import DTYPES, Shape
from selection import check_selection, sketched

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

#: Of estimates, by rounding of products with codes on the GPU.
ERRORS = {"cpu": 1e-5, "cuda": 4e-3}


def unpacked(sketch, length):
    """The codes of the first tokens, a number a channel."""
    per_word = 32 // sketch.bits
    channel = torch.arange(sketch.ranges.shape[-1])
    place = channel % per_word
    shift = place // 2 * sketch.bits + place % 2 * 16
    words = sketch.codes[:, :, :length].cpu()[..., channel // per_word]
    return words >> shift & (2**sketch.bits - 1)


def keys_of(sketch, length):
    """The keys that a sketch stands for, in float64."""
    least, greatest = sketch.ranges.cpu().double().unbind(-2)
    group = sketch.capacity // sketch.ranges.shape[2]
    step = (greatest - least) / (2**sketch.bits - 1)
    least, step = (t.repeat_interleave(group, 2)[:, :, :length] for t in (least, step))
    return least + unpacked(sketch, length) * step


def decoding(sketch=None, block=16, tokens=96, **changes):
    return sa.BlockTopK(
        block, selector="sketch", budget_tokens=tokens, sketch=sketch,
        **{"local_blocks": 1, **changes},
    )  # fmt: skip


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("length, head_dim", [(1, 8), (63, 40), (64, 64), (200, 136), (129, 256)])
def test_codes_and_ranges(device, length, head_dim, dtype, bits):
    _, key, _ = Shape(2, 3, 3, 1, length, head_dim).make(device, dtype, memory="transposed")
    sketch = sa.KeySketch(key, bits)
    want = torch.stack([torch.stack([sketched(k, bits) for k in entry]) for entry in key.cpu()])
    # A code that lies in the middle between two may be rounded either way.
    far = (keys_of(sketch, length) - want).abs() > 1e-6 * want.abs().amax()
    assert far.double().mean() < 1e-4
    for at, part in enumerate(key.split(64, 2)):
        assert torch.equal(sketch.ranges[:, :, at, 0], part.amin(2))
        assert torch.equal(sketch.ranges[:, :, at, 1], part.amax(2))
    assert sketch.lengths.tolist() == [length] * 2


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_appending_is_sketching_anew(device, dtype, bits):
    _, key, _ = Shape(2, 2, 2, 1, 423, 40).make(device, dtype)
    sketch = sa.KeySketch(key[:, :, :5], bits)
    at = 5
    for tokens in (1, 1, 0, 57, 1, 130, 2, 64, 100, 61, 1):
        sketch.append(key[:, :, at : at + tokens])
        at += tokens
        anew = sa.KeySketch(key[:, :, :at], bits)
        groups = anew.ranges.shape[2]
        assert torch.equal(sketch.codes[:, :, :at], anew.codes[:, :, :at])
        assert torch.equal(sketch.ranges[:, :, :groups], anew.ranges)
    assert at == 423 and sketch.lengths.tolist() == [423, 423]


def test_entries_may_differ_in_length(device):
    """A length on the device says where an entry's next token goes."""
    _, key, _ = Shape(2, 1, 1, 1, 100, 16).make(device)
    sketch = sa.KeySketch(key[:, :, :70], capacity=128)
    sketch.lengths[1] = 64
    sketch.append(key[:, :, 70:])
    own = torch.cat([key[1:, :, :64], key[1:, :, 70:]], 2)
    for entry, want in enumerate([sa.KeySketch(key[:1]), sa.KeySketch(own)]):
        length = want.lengths.item()
        assert torch.equal(sketch.codes[entry, :, :length], want.codes[0, :, :length])
    assert sketch.lengths.tolist() == [100, 94]


def test_room(device):
    """A sketch grows unless its room is fixed; what its lengths leave no room for is left out."""
    _, key, _ = Shape(1, 1, 1, 1, 300, 16).make(device)
    sketch = sa.KeySketch(key[:, :, :10])
    assert sketch.capacity == 64
    sketch.append(key[:, :, 10:])
    assert torch.equal(sketch.codes[:, :, :300], sa.KeySketch(key).codes[:, :, :300])
    fixed = sa.KeySketch(key[:, :, :100], capacity=120)
    assert fixed.capacity == 128
    with pytest.raises(ValueError, match=r"KeySketch.append: expected up to 128 tokens .*got 130"):
        fixed.append(key[:, :, 100:130])
    state = fixed.codes, fixed.ranges, fixed._open, fixed.lengths
    for before, tokens, after in [(100, 40, 128), (2**31 - 1, 5, 128), (-5, 5, 5)]:
        fixed.lengths.fill_(before)
        torch.ops.sparse_attn.append_to_sketch(key[:, :, 100 : 100 + tokens], *state)
        assert fixed.lengths.tolist() == [after]
        if before == 100:
            assert torch.equal(fixed.codes, sa.KeySketch(key[:, :, :128]).codes)


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


@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_attention_reads_the_chosen_blocks(device, dtype, group):
    query, key, value = Shape(2, 4, 2, 1, 1300, 64).make(device, dtype)
    pattern = decoding(sa.KeySketch(key), group=group, tokens=256)
    layout = sa.select_blocks(query, key, pattern)
    assert (layout.counts == 16).all()
    out = sa.sparse_attention(query, key, value, pattern)
    torch.testing.assert_close(out, sa.block_sparse_attention(query, key, value, layout))
    assert_close_to_reference(out, query, key, value, sa.BlockSparse(layout))
    by_name = sa.block_topk_attention(
        query, key, value, block_size=16, selector="sketch", sketch=pattern.sketch,
        budget_tokens=256, group=group, local_blocks=1,
    )  # fmt: skip
    assert torch.equal(out, by_name)
    naive = sa.naive_attention(query, key, value, pattern)
    assert_close_to_reference(naive, query, key, value, sa.BlockSparse(layout))


def test_a_selection_serves_several_steps(device):
    """Lists of one step are a layout like any other."""
    query, key, value = Shape(1, 2, 1, 2, 1040, 32).make(device)
    sketch = sa.KeySketch(key)
    layout = sa.select_blocks(query[:, :, :1], key, decoding(sketch, tokens=256))
    for step in range(2):
        out = sa.block_sparse_attention(query[:, :, step : step + 1], key, value, layout)
        assert out.isfinite().all()


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
    "other-selector": ({"selector": "mean", "sketch": "one"}, "selector 'sketch' with a sketch"),
}


@pytest.mark.parametrize("changes, sentence", WRONG_PATTERNS.values(), ids=WRONG_PATTERNS)
def test_wrong_patterns(changes, sentence):
    if "sketch" in changes:
        changes = changes | {"sketch": sa.KeySketch(torch.randn(1, 1, 9, 8))}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        sa.BlockTopK(**{"selector": "sketch", **changes})


def test_wrong_kinds(device):
    key = torch.randn(1, 1, 9, 8, device=device)
    with pytest.raises(TypeError, match="BlockTopK: expected sketch to be a KeySketch, got Tensor"):
        sa.BlockTopK(selector="sketch", sketch=key)
    for arguments, words in {
        (None,): "key to be a tensor",
        (key, "2"): "bits to be an int",
        (key, True): "bits to be an int",
    }.items():
        with pytest.raises(TypeError, match=f"KeySketch: expected {words}"):
            sa.KeySketch(*arguments)
    with pytest.raises(ValueError, match="KeySketch: expected bits of 2 or 4, got 3"):
        sa.KeySketch(key, 3)
    with pytest.raises(ValueError, match="KeySketch: expected key of shape"):
        sa.KeySketch(key[0])
    with pytest.raises(ValueError, match="KeySketch: expected capacity of at least 1"):
        sa.KeySketch(key, capacity=0)


def test_wrong_keys(device):
    for wrong, words in {
        torch.randn(1, 1, 9, 12, device=device): "key with a head_dim that is a multiple of 8",
        torch.randn(1, 1, 9, 16, device=device).double(): "key of dtype float32",
        torch.randn(1, 1, 16, 9, device=device).mT: "key with a contiguous last dimension",
    }.items():
        with pytest.raises(ValueError, match=f"append_to_sketch: expected {words}"):
            sa.KeySketch(wrong)
    sketch = sa.KeySketch(torch.randn(2, 1, 9, 16, device=device))
    for wrong, words in {
        torch.randn(2, 2, 1, 16, device=device): "a sketch of key's shape",
        torch.randn(2, 1, 1, 16, device=device).half(): "a sketch of key's dtype float16",
        torch.randn(2, 1, 16, device=device): "key of shape",
    }.items():
        with pytest.raises(ValueError, match=f"append_to_sketch: expected {words}"):
            sketch.append(wrong)
    assert sketch.lengths.tolist() == [9, 9]


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
        )  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_other_device():
    key = torch.randn(1, 1, 100, 16)
    pattern = decoding(sa.KeySketch(key.cuda()))
    with pytest.raises(ValueError, match="expected sketch on key's device cpu"):
        sa.select_blocks(key[:, :, :1], key, pattern)


def test_opcheck(device):
    key = torch.randn(2, 2, 70, 16, device=device)
    sketch = sa.KeySketch(key, capacity=200)
    op = torch.ops.sparse_attn.append_to_sketch.default
    call = (key, sketch.codes, sketch.ranges, sketch._open, sketch.lengths)
    torch.library.opcheck(op, call)
    query = torch.randn(2, 4, 1, 16, device=device)
    given = decoding(sketch)._arguments()
    torch.library.opcheck(torch.ops.sparse_attn.select_blocks.default, (query, key), given)
    torch.library.opcheck(torch.ops.sparse_attn.block_topk.default, (query, key, key), given)


def step_of(sketch, query, key, value, new):
    sketch.append(new)
    return sa.sparse_attention(query, key, value, decoding(sketch))


def test_compiles(device):
    query, key, value = Shape(1, 2, 1, 1, 330, 16).make(device)
    compiled = torch.compile(step_of, fullgraph=True, backend="aot_eager")
    outs = []
    for step in (compiled, step_of):
        sketch = sa.KeySketch(key[:, :, :320], capacity=384)
        for at in range(320, 324):
            keys, values = key[:, :, : at + 1], value[:, :, : at + 1]
            out = step(sketch, query, keys, values, key[:, :, at : at + 1])
        outs.append((out, sketch.codes, sketch.lengths))
    for left, right in zip(*outs, strict=True):
        assert torch.equal(left, right)


def test_graph_replay(device):
    """Steps of a static cache replay: the lengths live on the device."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    query, key, value = Shape(2, 8, 2, 1, 512, 128).make(device, torch.bfloat16)
    cache, values = torch.zeros_like(key), torch.zeros_like(value)
    cache[:, :, :300], values[:, :, :300] = key[:, :, :300], value[:, :, :300]
    sketch = sa.KeySketch(cache[:, :, :300], capacity=512)
    new = torch.empty_like(key[:, :, :1])
    at = torch.full((2,), 300, dtype=torch.int32, device=device)
    pattern = decoding(sketch, group="kv")

    def step():
        sketch.append(new)
        return sa.sparse_attention(query, cache, values, pattern, is_causal=True, query_offset=at)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    sketch.lengths.fill_(300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    sketch.lengths.fill_(300)
    for token in range(300, 420):
        cache[:, :, token], values[:, :, token] = key[:, :, token], value[:, :, token]
        new.copy_(key[:, :, token : token + 1])
        at.fill_(token)
        graph.replay()
    anew = sa.KeySketch(key[:, :, :420])
    assert sketch.lengths.tolist() == [420, 420]
    assert torch.equal(sketch.codes[:, :, :420], anew.codes[:, :, :420])
    keys = (query, key[:, :, :420], value[:, :, :420])
    want = sa.sparse_attention(*keys, decoding(anew, group="kv"), is_causal=True)
    torch.testing.assert_close(out, want)

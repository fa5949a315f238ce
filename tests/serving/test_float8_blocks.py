"""Block top-k and key sketches beside keys of float8_e4m3fn: as what the codes stand for."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from ragged import Ragged, Serving, watched
from reference import Shape
from test_chosen_blocks import PAGE_SIZES, SELECTIONS, Batch
from test_float8 import HALF, assert_close

import sparse_attn as sa

FLOAT8 = torch.float8_e4m3fn
SHAPE = Shape(2, 4, 2, 90, 300, 64)
SCALES = {"none": None, "tensor": (), "head": (SHAPE.Hkv,), "entry": (SHAPE.B, SHAPE.Hkv)}


def scale_of(by, device):
    return None if by is None else torch.rand(by, device=device) + 0.3


def dequantized(codes, scale, dtype):
    number = codes.float()
    return (number if scale is None else number * scale[..., None, None]).to(dtype)


@pytest.fixture
def attend(device, engine):
    return Serving(device, engine)


@pytest.mark.parametrize("by", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_outputs_by_the_lists_of_what_codes_stand_for(attend, engine, device, dtype, name, by):
    pattern, rows = SELECTIONS[name], {"decode": 9, "hopper": 200}.get(engine, SHAPE.Sq)
    if engine == "hopper":  # takes no other query blocks beside such keys
        pattern = replace(pattern, block_size=(128, pattern._blocks[1]))
    query, key, value = Shape(2, 4, 2, rows, SHAPE.Skv, 64).make(device, dtype)
    key, value = key.to(FLOAT8), value.to(FLOAT8)
    scales = {"key_scale": scale_of(by, device), "value_scale": scale_of(by, device)}
    layout = sa.select_blocks(
        query, dequantized(key, scales["key_scale"], dtype), pattern, is_causal=True
    )
    call = {"is_causal": True, "return_lse": True, **scales}
    out = attend(sa.sparse_attention, query, key, value, pattern, **call)
    listed = sa.BlockSparse(layout)
    again = attend(sa.sparse_attention, query, key, value, listed, **call)
    assert all(torch.equal(*pair) for pair in zip(out, again, strict=True))
    assert_close(out, query, key, value, tuple(scales.values()), listed, is_causal=True)


@pytest.mark.parametrize("by", [(2,), (6, 2)], ids=["head", "entry"])
@pytest.mark.parametrize("page_size", watched(PAGE_SIZES, 16))
@pytest.mark.parametrize("name", SELECTIONS)
def test_lists_of_ragged_sequences(device, name, page_size, by):
    ragged, pattern = Ragged((3, 0, 170, 1, 33, 70), (5, 9, 350, 64, 0, 216)), SELECTIONS[name]
    codes = [(q, k.to(FLOAT8), v) for q, k, v in ragged.sequences(device, torch.bfloat16)]
    scale = scale_of(by, device)
    own = scale.expand(6, 2)
    numbers = [(q, dequantized(k, own[b], q.dtype), v) for b, (q, k, v) in enumerate(codes)]
    lists = Batch(ragged, codes, page_size).lists(pattern, is_causal=True, key_scale=scale)
    want = Batch(ragged, numbers, page_size).lists(pattern, is_causal=True)
    assert torch.equal(lists.counts, want.counts) and torch.equal(lists.indices, want.indices)


def test_scores_of_the_caller_and_parts_of_heads(device):
    query, key, value = SHAPE.make(device, torch.float16)
    key, value = key.to(FLOAT8), value.to(FLOAT8)
    scale = torch.tensor([0.5, 2.0], device=device)
    scores = torch.randn(1, 4, -(-SHAPE.Sq // 32), -(-SHAPE.Skv // 32), device=device)
    own = sa.BlockTopK(32, selector=scores, mass=0.5, local_blocks=1)
    lists = sa.select_blocks(query, key, own, key_scale=scale)
    want = sa.select_blocks(query, dequantized(key, scale, query.dtype), own)
    assert torch.equal(lists.indices, want.indices)
    first, second = SELECTIONS["mixed"], SELECTIONS["mean"]
    call = {"is_causal": True, "key_scale": scale}
    out = sa.sparse_attention(query, key, value, sa.ByHead({0: first, 1: second}), **call)
    for head, pattern in enumerate((first, second)):
        rows, part = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        call["key_scale"] = scale[part]
        alone = sa.sparse_attention(query[:, rows], key[:, part], value[:, part], pattern, **call)
        assert torch.equal(out[:, rows], alone)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_token_top_k_inside_chosen_blocks(device, dtype):
    query, key, value = SHAPE.make(device, dtype)
    key, value = key.to(FLOAT8), value.to(FLOAT8)
    inside = sa.BlockTopK(32, mass=0.5, local_blocks=1)
    listed = sa.BlockSparse(sa.select_blocks(query, key.to(dtype), inside))
    out = sa.sparse_attention(query, key, value, sa.TopK(9, inside=inside))
    again = sa.sparse_attention(query, key, value, sa.TopK(9, inside=listed))
    assert torch.equal(out, again)


@pytest.mark.parametrize("by", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_sketches_of_tensors(device, dtype, bits, by):
    query, key, value = SHAPE.make(device, dtype)
    query, codes, scale = query[:, :, :3], key.to(FLOAT8), scale_of(by, device)
    numbers = dequantized(codes, scale, dtype)
    sketch = sa.KeySketch(codes[:, :, :131], bits, capacity=300, key_scale=scale, dtype=dtype)
    sketch.append(codes[:, :, 131:], key_scale=scale)
    want = sa.KeySketch(numbers, bits, capacity=300)
    sketch.crop(codes[:, :, :201], key_scale=scale)
    sketch.append(codes[:, :, 201:], key_scale=scale)
    assert torch.equal(sketch.codes, want.codes) and torch.equal(sketch.ranges, want.ranges)
    chosen = []
    for own, keys in ((sketch, codes), (want, numbers), (None, codes), (None, numbers)):
        pattern = sa.BlockTopK(16, selector="sketch", budget_tokens=96, local_blocks=1, sketch=own)
        scales = {"key_scale": scale} if keys is codes else {}
        chosen.append(sa.select_blocks(query, keys, pattern, is_causal=True, **scales))
    for layouts in (chosen[:2], chosen[2:]):
        assert torch.equal(layouts[0].indices, layouts[1].indices)
        assert torch.equal(layouts[0].counts, layouts[1].counts)
    pattern = sa.BlockTopK(16, selector="sketch", budget_tokens=96, local_blocks=1, sketch=sketch)
    out = sa.sparse_attention(query, codes, codes, pattern, is_causal=True, key_scale=scale)
    listed = sa.BlockSparse(chosen[0])
    again = sa.sparse_attention(query, codes, codes, listed, is_causal=True, key_scale=scale)
    assert torch.equal(out, again)


@pytest.mark.parametrize("selector", ["minmax", "mean"])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_blocks_by_sketches_of_tensors(device, dtype, selector):
    """Each entry by its own ranges, which are those of what its codes stand for."""
    query, key, value = SHAPE.make(device, dtype)
    codes, scale = key.to(FLOAT8), scale_of((SHAPE.B, SHAPE.Hkv), device)
    numbers = dequantized(codes, scale, dtype)
    sketch = sa.KeySketch(codes, key_scale=scale, dtype=dtype)
    pattern = sa.BlockTopK(64, 0.5, selector, local_blocks=1, sketch=sketch)
    plain = replace(pattern, sketch=None if selector == "minmax" else sa.KeySketch(numbers))
    lists = sa.select_blocks(query, codes, pattern, is_causal=True, key_scale=scale)
    want = sa.select_blocks(query, numbers, plain, is_causal=True)
    assert torch.equal(lists.counts, want.counts) and torch.equal(lists.indices, want.indices)
    call = {"is_causal": True, "key_scale": scale}
    out = sa.sparse_attention(query, codes, codes, pattern, **call)
    again = sa.sparse_attention(query, codes, codes, sa.BlockSparse(lists), **call)
    assert torch.equal(out, again)


@pytest.mark.parametrize("by", [None, (), (2,)], ids=["none", "tensor", "head"])
@pytest.mark.parametrize("page_size", watched([16, 48, 64], 48))
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_sketches_of_pages_come_with_the_cache(device, dtype, page_size, by):
    """The sketch is of what the cache holds, and so are the lists that it makes."""
    lengths, heads, head_dim = [150, 7, 64], 2, 40
    pages = sum(-(-n // page_size) for n in lengths)
    order = torch.randperm(pages, device=device).int()
    table = torch.zeros(3, -(-150 // page_size), dtype=torch.int32, device=device)
    slots, first = [], 0
    for b, n in enumerate(lengths):
        own = order[first : first + -(-n // page_size)]
        first += len(own)
        table[b, : len(own)] = own
        at = torch.arange(n, device=device)
        slots.append(own[at // page_size].long() * page_size + at % page_size)
    key, value = torch.randn(2, sum(lengths), heads, head_dim, device=device).to(dtype)
    caches = torch.zeros(2, pages, page_size, heads, head_dim, device=device).to(FLOAT8)
    scale = scale_of(by, device)
    sketch = sa.KeySketch(caches[0], paged=True, dtype=dtype)
    sa.append_to_cache(
        key, value, *caches, torch.cat(slots), key_scale=scale, value_scale=scale, sketch=sketch
    )
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    place = {"block_table": table, "seqused_k": used}
    number = caches[0].float() if scale is None else caches[0].float() * scale[..., None]
    want = sa.KeySketch(number.to(dtype), paged=True, **place)
    assert torch.equal(sketch.codes, want.codes) and torch.equal(sketch.ranges, want.ranges)
    made = sa.KeySketch(caches[0], paged=True, key_scale=scale, dtype=dtype, **place)
    assert torch.equal(made.codes, want.codes) and torch.equal(made.ranges, want.ranges)

    query = torch.randn(3, 4, 2, head_dim, device=device).to(dtype)
    for own in (sketch, None):
        pattern = sa.BlockTopK(16, selector="sketch", budget_tokens=64, local_blocks=1, sketch=own)
        plain = sa.BlockTopK(
            16, selector="sketch", budget_tokens=64, local_blocks=1, sketch=own and want
        )
        lists = sa.select_blocks(query, caches[0], pattern, key_scale=scale, **place)
        others = sa.select_blocks(query, number.to(dtype), plain, **place)
        assert torch.equal(lists.counts, others.counts)
        assert torch.equal(lists.indices, others.indices)
        call = (query, *caches, table, used)
        scales = {"key_scale": scale, "value_scale": scale}
        out = sa.paged_attention(*call, pattern=pattern, **scales)
        again = sa.paged_attention(*call, pattern=sa.BlockSparse(lists), **scales)
        assert torch.equal(out, again)


def test_a_sketch_keeps_its_dtype_when_it_grows_and_is_copied(device):
    codes = torch.randn(1, 2, 100, 16, device=device).to(FLOAT8)
    sketch = copy.deepcopy(sa.KeySketch(codes, dtype=torch.float16))
    sketch.append(codes)
    want = sa.KeySketch(torch.cat([codes, codes], 2).half())
    held = want.codes.shape[2]
    assert sketch.ranges.dtype == torch.float16
    assert torch.equal(sketch.codes[:, :, :held], want.codes)


def test_a_scale_that_requires_grad_counts_as_a_number(device):
    codes = torch.randn(1, 2, 48, 16, device=device).to(FLOAT8)
    pages, slots = codes.transpose(1, 2), torch.tensor([47], device=device)
    scale = torch.rand(2, device=device) + 0.3
    for given in (scale, scale.clone().requires_grad_()):
        sketch = sa.KeySketch(codes, key_scale=given)
        paged = sa.KeySketch(pages, paged=True)
        paged.append(pages, slots, given)
        assert not sketch.ranges.requires_grad and not paged.ranges.requires_grad
        numbers = dequantized(codes, scale, torch.bfloat16)
        assert torch.equal(sketch.ranges, sa.KeySketch(numbers).ranges)


WRONG = {
    "dtype": (
        lambda codes: sa.KeySketch(codes, dtype=torch.float32),
        "dtype float16 or bfloat16 beside keys of float8_e4m3fn, got float32",
    ),
    "other-dtype": (
        lambda codes: sa.KeySketch(codes.half(), dtype=torch.bfloat16),
        "key's dtype float16, got bfloat16",
    ),
    "scale": (
        lambda codes: sa.KeySketch(codes.half(), key_scale=torch.ones(2)),
        "key_scale beside keys of dtype float8_e4m3fn, got float16",
    ),
    "scale-of-pages": (
        lambda codes: sa.KeySketch(codes, paged=True, key_scale=torch.ones(3)),
        "key_scale of shape () or (2), got shape (3)",
    ),
    "shape": (
        lambda codes: sa.KeySketch(codes.transpose(1, 2), key_scale=torch.ones(3)),
        "key_scale of dtype float32 and shape (), (2) or (2, 2), got float32 (3,)",
    ),
    "device": (
        lambda codes: sa.KeySketch(codes, key_scale=torch.ones(16, device="meta")),
        "KeySketch.append: expected key_scale on key's device cpu, got meta",
    ),
    "rank": (
        lambda codes: sa.KeySketch(codes).append(codes[0, 0, 0], key_scale=torch.ones(())),
        "expected key of shape (batch, heads, length, head_dim), got shape (16)",
    ),
    "query": (
        lambda codes: sa.select_blocks(
            torch.randn(2, 2, 1, 16).half(),
            codes.transpose(1, 2),
            sa.BlockTopK(16, selector="sketch", sketch=sa.KeySketch(codes.transpose(1, 2))),
        ),
        "a sketch of query's dtype float16, got bfloat16",
    ),
    "float32": (
        lambda codes: sa.select_blocks(
            torch.randn(2, 2, 1, 16), codes.transpose(1, 2), sa.BlockTopK(16)
        ),
        "query of dtype float16 or bfloat16 beside keys of float8_e4m3fn, got float32",
    ),
}


@pytest.mark.parametrize("call, sentence", WRONG.values(), ids=WRONG)
def test_wrong_calls(call, sentence):
    codes = torch.randn(2, 16, 2, 16).to(FLOAT8)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call(codes)


def test_traced_calls(device):
    query, key, value = SHAPE.make(device, torch.bfloat16)
    key, value = key.to(FLOAT8), value.to(FLOAT8)
    scale = torch.tensor([0.5, 2.0], device=device)
    given = SELECTIONS["mixed"]._arguments() | {"is_causal": True, "key_scale": scale}
    # test_schema multiplies inputs by a number, which torch has not for float8.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    op = torch.ops.sparse_attn.select_blocks.default
    torch.library.opcheck(op, (query, key), given, test_utils=utils)

    def step(query, key, value, scale):
        return sa.sparse_attention(query, key, value, SELECTIONS["mixed"], key_scale=scale)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    tensors = (query, key, value, scale)
    assert torch.equal(compiled(*tensors), step(*tensors))

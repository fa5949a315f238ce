"""The key sketch itself: its codes and ranges, its growth and room, and the keys it refuses."""

import math

import pytest
import torch
from reference import DTYPES, Shape
from sketches import sketched

import sparse_attn as sa


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
        at_once = sa.KeySketch(key[:, :, :at], bits)
        groups = at_once.ranges.shape[2]
        assert torch.equal(sketch.codes[:, :, :at], at_once.codes[:, :, :at])
        assert torch.equal(sketch.ranges[:, :, :groups], at_once.ranges)
    assert at == 423 and sketch.lengths.tolist() == [423, 423]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_cropped_sketch_is_that_of_the_keys_that_stay(device, dtype):
    """Speculation: tokens are appended, some are rejected, others come in their places."""
    query, key, value = Shape(2, 4, 2, 3, 700, 40).make(device, dtype)
    sketch, at, held = sa.KeySketch(key[:, :, :100]), 100, key[:, :, :100]
    for tokens, rejected in [
        (8, 3),
        (16, 16),
        (90, 89),
        (5, 0),
        (70, 64),
        (16, 15),
        (1, 1),
        (64, 40),
    ]:
        held = torch.cat([held, key[:, :, at : at + tokens]], 2)
        sketch.append(key[:, :, at : at + tokens])
        at += tokens
        held = held[:, :, : held.shape[2] - rejected]
        sketch.crop(held)
        anew = sa.KeySketch(held)
        length, groups = held.shape[2], anew.ranges.shape[2]
        assert sketch.lengths.tolist() == [length] * 2
        assert torch.equal(sketch.codes[:, :, :length], anew.codes[:, :, :length])
        assert torch.equal(sketch.ranges[:, :, :groups], anew.ranges)
        chosen = [
            sa.BlockTopK(16, selector="sketch", budget_tokens=96, sketch=one)
            for one in (sketch, anew)
        ]
        out, want = (
            sa.sparse_attention(query, held, value[:, :, :length], one, is_causal=True)
            for one in chosen
        )
        assert torch.equal(out, want)


@pytest.mark.parametrize("made", [True, False], ids=["made-in-inference", "made-in-grad-mode"])
@pytest.mark.parametrize("cropped", [True, False], ids=["inference", "grad-mode"])
def test_crops_in_every_mode(device, made, cropped):
    key = torch.randn(1, 1, 80, 16, device=device)
    with torch.inference_mode(made):
        sketch = sa.KeySketch(key)
    with torch.inference_mode(cropped):
        sketch.crop(key[:, :, :70])
    assert sketch.lengths.tolist() == [70]


def test_compiled_crops(device):
    key = torch.randn(1, 1, 80, 16, device=device)
    sketch = sa.KeySketch(key)
    torch.compile(sketch.crop, backend="aot_eager", fullgraph=True)(key[:, :, :70])
    assert sketch.lengths.tolist() == [70]
    assert torch.equal(sketch.codes[:, :, :70], sa.KeySketch(key[:, :, :70]).codes[:, :, :70])


def test_wrong_crops(device):
    key = torch.randn(2, 1, 80, 16, device=device)
    sketch = sa.KeySketch(key, capacity=128)
    for wrong, words in {
        torch.randn(
            2, 1, 81, 16, device=device
        ): r"KeySketch.crop: expected .* up to 80, got \(2, 1, 81",
        key[0]: "KeySketch.crop: expected key of shape",
        key[:, :, :70].half(): "a sketch of key's dtype float16",
        key[:1, :, :70]: "a sketch of key's shape",
    }.items():
        with pytest.raises(ValueError, match=words):
            sketch.crop(wrong)
    with pytest.raises(TypeError, match="KeySketch.crop: expected key to be a tensor, got int"):
        sketch.crop(70)
    assert sketch.lengths.tolist() == [80, 80] and sketch._tokens == 80
    paged = sa.KeySketch(torch.randn(4, 16, 1, 16, device=device), paged=True)
    with pytest.raises(
        ValueError, match="KeySketch.crop: expected a sketch that is not paged, got"
    ):
        paged.crop(key)


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
    with pytest.raises(ValueError, match="KeySketch: expected capacity of at most 536870911"):
        sa.KeySketch(key, capacity=2**40)


def test_wrong_keys(device):
    for wrong, words in {
        torch.randn(1, 1, 9, 12, device=device): "key with a head_dim that is a multiple of 8",
        torch.randn(1, 1, 9, 16, device=device).double(): "key of dtype float32",
        torch.randn(1, 1, 16, 9, device=device).mT: "key with a contiguous last dimension",
    }.items():
        with pytest.raises(ValueError, match=f"append_to_sketch: expected {words}"):
            sa.KeySketch(wrong)
    sketch = sa.KeySketch(torch.randn(2, 1, 9, 16, device=device))
    turned = sketch.ranges.mT.contiguous().mT
    with pytest.raises(
        RuntimeError, match=r"sketch's ranges to be contiguous, got strides \(32, 32, 32, 1, 2\)"
    ):
        torch.ops.sparse_attn.append_to_sketch(
            torch.randn(2, 1, 1, 16, device=device),
            *(sketch.codes, turned, sketch._open, sketch.lengths),
        )
    for wrong, words in {
        torch.randn(2, 2, 1, 16, device=device): "a sketch of key's shape",
        torch.randn(2, 1, 1, 16, device=device).half(): "a sketch of key's dtype float16",
        torch.randn(2, 1, 16, device=device): "key of shape",
    }.items():
        with pytest.raises(ValueError, match=f"append_to_sketch: expected {words}"):
            sketch.append(wrong)
    assert sketch.lengths.tolist() == [9, 9]


@pytest.mark.parametrize(
    "table, used, sentence",
    [
        ([[0, 1, 5]], [40], r"block_table to name some of the 4 pages of key, got 5"),
        ([[0, -1, 5]], [20], r"block_table to name some of the 4 pages of key, got -1"),
        ([[0, 1, 2]], [49], r"seqused_k from 0 to 48, the tokens that .* has room for, got 49"),
        ([[0, 1, 2]], [-1], r"seqused_k from 0 to 48, .*, got -1"),
    ],
)
def test_pages_that_a_cache_lacks(table, used, sentence):
    key = torch.randn(4, 16, 2, 16)
    table, used = torch.tensor(table), torch.tensor(used)
    with pytest.raises(ValueError, match=sentence):
        sa.KeySketch(key, paged=True, block_table=table, seqused_k=used)
    # Entries past what is used may name anything.
    whole = sa.KeySketch(key, paged=True, block_table=table[:, :1], seqused_k=used.clamp(16, 16))
    same = sa.KeySketch(key, paged=True, block_table=table, seqused_k=used.clamp(16, 16))
    assert torch.equal(same.codes, whole.codes)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scales_are_above_zero_and_finite(scale):
    key = torch.randn(1, 2, 32, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"key_scale above 0 and finite, got (0|-1|inf|nan)"):
        sa.KeySketch(key, key_scale=torch.tensor([1.0, scale]))

"""append_to_cache puts rows into their slots and touches nothing else; quantize_cache rounds."""

import pytest
import torch
from ragged import watched
from reference import DTYPES

import sparse_attn as sa

FLOAT8 = torch.float8_e4m3fn
PAGES, PAGE, HEADS, DIM = 5, 16, 3, 24
SLOTS = [17, 0, -1, 79, 80, 33, 2**40, -(2**62), 18, 2**62]


def separate(dtype, device, value_dim=DIM):
    """Key and value caches of their own."""
    shape = (PAGES, PAGE, HEADS)
    return tuple(torch.zeros(*shape, d, device=device).to(dtype) for d in (DIM, value_dim))


def interleaved(dtype, device, value_dim=DIM):
    """Views of one tensor (pages, heads, page_size, D + Dv), as servers keep them."""
    both = torch.zeros(PAGES, HEADS, PAGE, DIM + value_dim, device=device).to(dtype)
    return both.transpose(1, 2).split([DIM, value_dim], -1)


def padded(dtype, device, value_dim=DIM):
    """Strides and an offset that are no multiples of a vector."""
    shape = (PAGES + 1, PAGE + 1, HEADS + 1, max(DIM, value_dim) + 3)
    caches = torch.zeros(2, *shape, device=device).to(dtype)[:, 1:, 1:, 1:]
    return caches[0, ..., 1 : DIM + 1], caches[1, ..., 1 : value_dim + 1]


LAYOUTS = {"separate": separate, "interleaved": interleaved, "padded": padded}


def rows(dtype, device, value_dim=DIM):
    shape = (len(SLOTS), HEADS)
    return tuple(torch.randn(*shape, d, device=device).to(dtype) for d in (DIM, value_dim))


def rounded(tensor, scale):
    """What a float8 cache holds, in plain torch."""
    scale = scale.reshape(-1, 1)
    return (tensor.float() / scale).clamp(-448, 448).to(FLOAT8)


def expected(cache, new, slots):
    """The cache after the write, slot by slot."""
    after = cache.clone()
    for token, slot in enumerate(slots):
        if 0 <= slot < PAGES * PAGE:
            after[slot // PAGE, slot % PAGE] = new[token]
    return after


def bits(tensor):
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(kinds[tensor.element_size()])


@pytest.mark.parametrize("value_dim", [DIM, 7], ids=["equal", "narrow"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rows_land_in_their_slots(device, dtype, layout, value_dim):
    caches = layout(dtype, device, value_dim)
    news = rows(dtype, device, value_dim)
    wants = [expected(cache, new, SLOTS) for cache, new in zip(caches, news, strict=True)]
    assert sa.append_to_cache(*news, *caches, torch.tensor(SLOTS, device=device)) is None
    for cache, want in zip(caches, wants, strict=True):
        assert torch.equal(cache, want) and int((want != 0).any(-1).sum()) == 5 * HEADS


@pytest.mark.parametrize("scales", watched(["none", "tensor", "head"], "head"))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_float8_caches(device, dtype, layout, scales):
    caches = layout(FLOAT8, device)
    news = rows(dtype, device)
    shape = {"none": (), "tensor": (), "head": (HEADS,)}[scales]
    given = [torch.rand(shape, device=device) / 40 + 2**-8 for _ in range(2)]
    if scales == "none":
        given = [torch.ones((), device=device)] * 2
    slots = torch.tensor(SLOTS, device=device)
    codes = [rounded(new, scale) for new, scale in zip(news, given, strict=True)]
    pairs = zip(caches, codes, strict=True)
    wants = [expected(bits(cache), bits(code), SLOTS) for cache, code in pairs]
    sa.append_to_cache(*news, *caches, slots, *([] if scales == "none" else given))
    for cache, want in zip(caches, wants, strict=True):
        assert torch.equal(bits(cache), want)


def test_every_float16_rounds_to_float8_as_in_torch(device):
    every = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.float16)
    key = every.reshape(-1, 1, 256)
    cache = torch.zeros(key.shape[0] // 16, 16, 1, 256, device=device).to(FLOAT8)
    slots = torch.arange(key.shape[0], device=device)
    sa.append_to_cache(key, key, cache, torch.zeros_like(cache), slots)
    got, want = cache.reshape(key.shape), key.float().clamp(-448, 448).to(FLOAT8)
    nan = torch.isnan(key)
    assert torch.equal(torch.isnan(got.float()), nan)
    assert torch.equal(bits(got)[~nan], bits(want)[~nan])


def test_strided_rows_scales_and_slots(device):
    key, value = torch.randn(2, HEADS, 9, DIM + 5, device=device).transpose(1, 2)[..., 3 : DIM + 3]
    slots = torch.randperm(PAGES * PAGE, device=device)[:18].reshape(9, 2)[:, 0]
    scales = (torch.rand(HEADS, 2, device=device) + 0.1)[:, 0]
    caches = separate(FLOAT8, device)
    again = separate(FLOAT8, device)
    sa.append_to_cache(key, value, *caches, slots, scales, scales)
    dense = [tensor.contiguous() for tensor in (key, value)]
    sa.append_to_cache(*dense, *again, slots.contiguous(), *[scales.contiguous()] * 2)
    for cache, want in zip(caches, again, strict=True):
        assert torch.equal(bits(cache), bits(want)) and (bits(cache) != 0).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_slots_of_other_whole_numbers_are_converted(device, dtype):
    key, value = rows(torch.float32, device)
    slots = [17, 0, 79, 80, 33, 18, 90, 91, 92, 93]
    key_cache, value_cache = separate(torch.float32, device)
    key_sketch = sa.KeySketch(key_cache, paged=True)
    again = sa.KeySketch(key_cache, paged=True)
    given = torch.tensor(slots, device=device).to(dtype)
    sa.append_to_cache(key, value, key_cache, value_cache, given, sketch=key_sketch)
    again.append(key_cache, torch.tensor(slots, device=device))
    assert torch.equal(key_cache, expected(torch.zeros_like(key_cache), key, slots))
    assert torch.equal(key_sketch.codes, again.codes) and key_sketch.codes.any()


@pytest.mark.parametrize("empty", ["tokens", "heads", "pages", "page", "dim"])
def test_sizes_of_zero_write_nothing(device, empty):
    sizes = {"tokens": 2, "pages": 2, "page": 16, "heads": 2, "dim": 8} | {empty: 0}
    tokens, pages, page, heads, dim = sizes.values()
    new = torch.ones(tokens, heads, dim, device=device)
    caches = torch.zeros(2, pages, page, heads, dim, device=device)
    sa.append_to_cache(new, new, *caches, torch.zeros(tokens, device=device).long())
    assert not caches.any()


WRONG = {
    "key-shape": ({"key": lambda t: t[0]}, r"key of shape \(tokens, heads, head_dim\)"),
    "key-dtype": ({"key": lambda t: t.double()}, "key of dtype float32, float16 or bfloat16"),
    "value-dtype": ({"value": lambda t: t.half()}, "value of key's dtype float32, got float16"),
    "value-tokens": ({"value": lambda t: t[1:]}, r"value of shape \(10, 3, 24\)"),
    "cache-heads": (
        {"key_cache": lambda t: t[:, :, :2]},
        r"key_cache of shape \(pages, page_size, 3, 24\) as key has heads and head_dim",
    ),
    "cache-dtype": (
        {"key_cache": lambda t: t.half()},
        "key_cache of key's dtype float32 or float8_e4m3fn, got float16",
    ),
    "codes": (
        {"key_cache": lambda t: t.to(torch.uint8)},
        r"key_cache of .* got uint8; a cache of 8 bits .* cache\.view\(torch\.float8_e4m3fn\)$",
    ),
    "value-codes": ({"value_cache": lambda t: t.to(torch.uint8)}, r"value_cache .* cache\.view"),
    "e5m2": ({"value_cache": lambda t: t.to(torch.float8_e5m2)}, "value_cache of value's dtype"),
    "caches-differ": ({"value_cache": lambda t: t.to(FLOAT8)}, "value_cache of key_cache's dtype"),
    "pages": ({"value_cache": lambda t: t[1:]}, r"value_cache of shape \(5, 16, 3, 24\)"),
    "strides": (
        {"key_cache": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3)},
        "key_cache with a contiguous last dimension",
    ),
    "head-dim": (
        {"key": lambda t: t[..., :1].expand(-1, -1, 2**32 + 24)},  # takes no memory
        r"key of heads and head_dim up to 536870911, got shape \(10, 3, 4294967320\)",
    ),
    "slots-dtype": (
        {"slot_mapping": lambda t: t.float()},
        "slot_mapping of an integer dtype, got float32",
    ),
    "slots-shape": ({"slot_mapping": lambda t: t[1:]}, r"slot_mapping of shape \(10\)"),
    "scale": (
        {"key_scale": lambda t: torch.ones(())},
        "key_scale with caches of float8_e4m3fn alone, got float32",
    ),
}


@pytest.mark.parametrize("change, sentence", WRONG.values(), ids=WRONG)
def test_wrong_calls(device, change, sentence):
    key, value = rows(torch.float32, device)
    key_cache, value_cache = separate(torch.float32, device)
    slots = torch.tensor(SLOTS, device=device)
    call = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slots,
        "key_scale": None,
    }
    ((name, make),) = change.items()
    call[name] = make(call[name])
    with pytest.raises(ValueError, match=rf"^sparse_attn[.:]+append_to_cache: expected {sentence}"):
        sa.append_to_cache(**call)
    assert not key_cache.any() and not value_cache.any()


@pytest.mark.parametrize(
    "scale, sentence",
    [
        (torch.ones(2), r"value_scale of shape \(\) or \(3\)"),
        (torch.ones(HEADS).half(), "value_scale of dtype float32"),
        (torch.ones(HEADS, device="meta"), "value_scale on key's device"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_wrong_scales(device, scale, sentence):
    scale = scale if scale.is_meta else scale.to(device)
    slots = torch.tensor(SLOTS, device=device)
    with pytest.raises(ValueError, match=f"append_to_cache: expected {sentence}"):
        sa.append_to_cache(
            *rows(torch.float16, device), *separate(FLOAT8, device), slots, value_scale=scale
        )


def test_caches_that_overlap_are_refused(device):
    key, value = rows(torch.float32, device)
    slots = torch.tensor(SLOTS, device=device)
    cache, _ = separate(torch.float32, device)
    with pytest.raises(ValueError, match="key_cache that does not overlap value_cache"):
        sa.append_to_cache(key, value, cache, cache, slots)
    with pytest.raises(ValueError, match="value_cache without overlapping elements"):
        sa.append_to_cache(key, value, cache, cache[:1].expand(cache.shape), slots)
    with pytest.raises(ValueError, match="key_cache that does not overlap key"):
        sa.append_to_cache(cache[0, :10], value, cache, cache.clone(), slots)


@pytest.mark.parametrize("name", ["key", "slot_mapping", "value_scale"])
def test_wrong_kinds(name):
    call = {name: torch.zeros(1) for name in ("key", "value", "key_cache", "value_cache")}
    call |= {"slot_mapping": torch.zeros(1), name: [1.0]}
    with pytest.raises(TypeError, match=f"append_to_cache: expected {name} to be a tensor"):
        sa.append_to_cache(**call)


def test_opcheck(device):
    key, value = rows(torch.float16, device)
    slots = torch.tensor(SLOTS, device=device)
    op = torch.ops.sparse_attn.append_to_cache.default
    torch.library.opcheck(op, (key, value, *separate(torch.float16, device), slots))
    scale = torch.ones(HEADS, device=device)
    # test_schema multiplies outputs by a number, which torch has not for float8.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    call = (key, value, *separate(FLOAT8, device), slots, scale, scale)
    torch.library.opcheck(op, call, test_utils=utils)


def test_compiled_calls_write_too(device):
    key, value = rows(torch.float32, device)
    slots = torch.tensor(SLOTS, device=device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(key, value, key_cache, value_cache, slots):
        sa.append_to_cache(key * 2, value, key_cache, value_cache, slots)
        return key_cache.sum() + value_cache.sum()

    caches, again = interleaved(torch.float32, device), interleaved(torch.float32, device)
    step(key, value, *caches, slots)
    sa.append_to_cache(key * 2, value, *again, slots)
    for cache, want in zip(caches, again, strict=True):
        assert torch.equal(cache, want)


def test_tensors_that_require_grad_are_refused(device):
    key, value = rows(torch.float32, device)
    caches = separate(torch.float32, device)
    slots = torch.tensor(SLOTS, device=device)
    key.requires_grad_()
    sentence = "append_to_cache: expected a call under torch.no_grad.., got key that requires grad"
    with pytest.raises(ValueError, match=sentence):
        sa.append_to_cache(key, value, *caches, slots)
    with torch.no_grad():
        sa.append_to_cache(key, value, *caches, slots)
    assert caches[0].any()
    saved = torch.ones_like(caches[0], requires_grad=True) * caches[0]
    with torch.no_grad():
        sa.append_to_cache(key, value, *caches, slots)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("per", ["head", "tensor"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_quantized_caches_use_the_whole_range(device, dtype, paged, per):
    shape, axis = ((4, 16, HEADS, DIM), 2) if paged else ((2, HEADS, 30, DIM), 1)
    key, value = (torch.randn(2, *shape, device=device) * 3).to(dtype)
    *codes, key_scale, value_scale = sa.quantize_cache(key, value, per=per, paged=paged)
    for tensor, code, scale in zip((key, value), codes, (key_scale, value_scale), strict=True):
        assert code.dtype == FLOAT8 and scale.dtype == torch.float32
        assert scale.shape == ((HEADS,) if per == "head" else ())
        largest = code.float().abs().amax([d for d in range(4) if d != axis])
        assert (largest == 448).all() if per == "head" else largest.amax() == 448
        spread = scale.reshape([-1 if d == axis else 1 for d in range(4)])
        error = (code.double() * spread - tensor.double()).abs()
        # Half of a step: 2^-4 of a normal number, 2^-10 of a scale below.
        assert (error <= 1.0001 * (tensor.double().abs() / 16 + spread / 1024)).all()


def test_append_quantizes_as_quantize_cache(device):
    key, value = torch.randn(2, 1, HEADS, 32, DIM, device=device).half()
    key8, value8, *scales = sa.quantize_cache(key, value)
    caches = [torch.zeros(2, 16, HEADS, DIM, device=device).to(FLOAT8) for _ in range(2)]
    slots = torch.arange(32, device=device)
    sa.append_to_cache(*(t[0].transpose(0, 1) for t in (key, value)), *caches, slots, *scales)
    for cache, want in zip(caches, (key8, value8), strict=True):
        assert torch.equal(bits(cache.reshape(32, HEADS, DIM)), bits(want[0].transpose(0, 1)))


def test_scales_of_almost_nothing_are_above_zero(device):
    """Their quotient by 448 is below every float; attention takes no scale of 0."""
    key = torch.full((1, 1, 3, 16), 1e-44, device=device)
    key8, value8, *scales = sa.quantize_cache(key, key)
    assert [scale.tolist() for scale in scales] == [[1.0], [1.0]]
    assert key8.float().abs().max() == 0 and value8.float().abs().max() == 0


def test_quantize_cache_of_special_values(device):
    key = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 7.0, 1e-9, 3.0], device=device)
    key8, value8, key_scale, value_scale = sa.quantize_cache(
        key.reshape(1, 1, 1, 8), torch.zeros(1, 1, 0, 8, device=device), per="tensor"
    )
    assert key_scale == 7 / 448 and value_scale == 1 and value8.shape == (1, 1, 0, 8)
    want = torch.tensor([0.0, 0.0, 448, -448, torch.nan, 448, 0.0, 192], device=device)
    torch.testing.assert_close(key8.float().flatten(), want, equal_nan=True, rtol=0, atol=0)


def test_wrong_quantization():
    key = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="quantize_cache: expected key of four dimensions"):
        sa.quantize_cache(key[0], key)
    with pytest.raises(ValueError, match="quantize_cache: expected value of four .* int32"):
        sa.quantize_cache(key, key.int())
    with pytest.raises(ValueError, match="quantize_cache: expected per to be one of head, tensor"):
        sa.quantize_cache(key, key, per="page")
    with pytest.raises(TypeError, match="quantize_cache: expected paged to be a bool"):
        sa.quantize_cache(key, key, paged=1)

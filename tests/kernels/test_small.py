"""The small engine: short sequences, whose keys a thread block holds whole."""

import pytest
import torch
from engines import cuda_engine
from ragged import Ragged, packed, split, split_lse
from reference import DTYPES, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

HALF = {name: dtype for name, dtype in DTYPES.items() if name != "fp32"}

#: Sizes on both sides of those that a tile, a kernel and a thread block hold.
LENGTHS = [(1, 1), (9, 32), (16, 33), (17, 16), (49, 49), (64, 65), (77, 77), (100, 128), (300, 1)]


@pytest.fixture
def small(device):
    return cuda_engine(device, "small", filled=True, return_lse=True)


def check(small, tensors, pattern, **common):
    result = small(*tensors, pattern, **common)
    assert_close_to_reference(result, *tensors, pattern, engine="small", **common)
    return result


def random_bounds(shape, device):
    """Bounds of every row; some rows have no key."""
    size = (shape.B, shape.Hq, shape.Sq, 2)
    return torch.randint(0, shape.Skv + 1, size, device=device).sort(-1).values.int()


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 80, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_size(small, device, lengths, head_dim, dtype):
    for batch, heads, heads_kv in ((5, 3, 3), (1, 10, 2), (2, 9, 1)):
        tensors = Shape(batch, heads, heads_kv, *lengths, head_dim).make(device, dtype)
        check(small, tensors, sa.Full())
        check(small, tensors, sa.Band((20, 3), sinks=2), is_causal=True)


@pytest.mark.parametrize("value_dim", [8, 64, 128])
def test_value_head_dims(small, device, value_dim):
    tensors = Shape(2, 4, 2, 50, 60, 40, Dv=value_dim).make(device, torch.bfloat16)
    check(small, tensors, sa.Full(), is_causal=True)


@pytest.mark.parametrize("strides", ["rows", "padding", "transposed"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(49, 49), (128, 120)], ids=str)
def test_masks(small, device, lengths, kind, strides):
    shape = Shape(3, 4, 2, *lengths, 64)
    tensors = shape.make(device, torch.float16 if kind == torch.float16 else torch.bfloat16)
    size = (3, 1, 1, shape.Skv) if strides == "padding" else (3, 4, shape.Sq, shape.Skv)
    if strides == "transposed":
        size = (*size[:2], size[3], size[2])
    keep = torch.rand(size, device=device) < 0.7
    mask = keep if kind == torch.bool else torch.randn(size, device=device).to(kind)
    if kind != torch.bool:
        mask.masked_fill_(~keep, -torch.inf)
    mask = mask.mT if strides == "transposed" else mask
    for pattern in (sa.Full(), sa.Dilated((9, 9), 2)):
        check(small, tensors, pattern, attn_mask=mask, softcap=3.0)


def test_masks_of_the_lowest_number_keep_their_rows(small, device):
    """As models make them: a row of nothing else sees all keys alike."""
    tensors = Shape(2, 2, 2, 60, 70, 64).make(device, torch.float16)
    mask = torch.zeros(2, 1, 60, 70, device=device)
    mask[0, :, ::3] = torch.finfo(torch.float32).min
    mask[1, :, :, 50:] = torch.finfo(torch.float32).min
    out, _ = small(*tensors, sa.Full(), attn_mask=mask)
    assert_close_to_reference(out, *tensors, sa.Full(), attn_mask=mask, engine="small")


@pytest.mark.parametrize(
    "common",
    [{"scale": 0.0}, {"scale": -0.4}, {"scale": 3e4}, {"softcap": 0.5}, {"softcap": 30.0}],
    ids=str,
)
def test_scores(small, device, common):
    tensors = Shape(2, 4, 2, 70, 90, 64).make(device, torch.bfloat16)
    slopes, sinks = torch.rand(4, device=device), torch.randn(4, device=device)
    check(small, tensors, sa.Full(), sink_logits=sinks, **common)
    check(small, tensors, sa.Band((30, 0)), alibi_slopes=slopes, is_causal=True, **common)


@pytest.mark.sanitizer
@pytest.mark.parametrize("lengths", [(17, 20), (100, 120), (150, 60)], ids=str)
def test_bounds_and_positions(small, device, lengths):
    shape = Shape(3, 4, 2, *lengths, 64)
    tensors = [tensor.to(device) for tensor in shape.make("cpu", torch.float16)]
    offsets = torch.tensor([-9, 0, 40], dtype=torch.int32, device=device)
    bounds = random_bounds(shape, "cpu").to(device)
    out, _ = small(*tensors, sa.Full(), is_causal=True, key_bounds=bounds, query_offset=offsets)
    query, key, value = (tensor.cpu() for tensor in tensors)
    assert_close_to_reference(
        out.cpu(), query, key, value, sa.Full(), is_causal=True,
        key_bounds=bounds.cpu(), query_offset=offsets.cpu(), engine="small",
    )  # fmt: skip


@pytest.mark.parametrize("heads", [(6, 6), (8, 2)], ids=str)
def test_keys_that_no_row_sees_may_hold_anything(small, device, heads):
    shape = Shape(2, *heads, 40, 100, 64)
    query, key, value = shape.make(device, torch.bfloat16)
    bounds = torch.tensor([10, 30], dtype=torch.int32, device=device).expand(2, 1, 40, 2).clone()
    bounds[:, :, ::4] = 0
    want = small(query, key, value, sa.Full(), key_bounds=bounds)
    for tensor in (key, value):
        tensor[:, :, :10] = torch.nan
        tensor[:, :, 30:] = torch.nan
    got = small(query, key, value, sa.Full(), key_bounds=bounds)
    assert all(map(torch.equal, got, want))
    ahead = Shape(1, 2, 2, 20, 90, 32).make(device, torch.bfloat16)
    for tensor in ahead[1:]:
        tensor[:, :, 25:] = torch.nan  # past the last query
    out, _ = small(*ahead, sa.Full(), is_causal=True, query_offset=5)
    assert out.isfinite().all()


@pytest.mark.parametrize("lengths", [(20, 30), (60, 60), (100, 128), (700, 70)], ids=str)
def test_a_head_alone_has_its_bits(small, device, lengths):
    query, key, value = Shape(3, 12, 3, *lengths, 64).make(device, torch.float16)
    out, lse = small(query, key, value, sa.Band((40, 9)))
    for b, h in ((0, 0), (1, 5), (2, 11)):
        own = query[b : b + 1, h : h + 1], *(x[b : b + 1, [h // 4]] for x in (key, value))
        one, one_lse = small(*own, sa.Band((40, 9)))
        assert torch.equal(one[0, 0], out[b, h]) and torch.equal(one_lse[0, 0], lse[b, h])


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_packed_sequences_have_the_bits_of_own_calls(small, device, head_dim, used):
    """Under bounds that choose another kernel than a sequence alone has."""
    ragged = Ragged((16, 0, 49, 1, 33, 90), (20, 9, 49, 128, 0, 90), 6, 2, head_dim)
    sequences = ragged.sequences(device, torch.bfloat16)
    query, key, value = (packed(list(parts), 5) for parts in zip(*sequences, strict=True))
    starts = [ragged.starts(device, lengths) for lengths in (ragged.rows, ragged.keys)]
    lengths = torch.tensor(ragged.keys, device=device).int() - 3 if used else None
    common = {"is_causal": True, "return_lse": True, "engine": "small"}
    out, lse = sa.varlen_attention(
        query, key, value, *starts, 128, 128, seqused_k=lengths, **common
    )
    parts = zip(split(out, ragged.rows), split_lse(lse, ragged.rows), strict=True)
    for part, (q, k, v) in zip(parts, sequences, strict=True):
        keys = max(k.shape[2] - 3, 0) if used else k.shape[2]
        want = small(q, k[:, :, :keys], v[:, :, :keys], sa.Full(), is_causal=True)
        assert all(map(torch.equal, part, want))


AS_HOPPER = {
    "full": (sa.Full(), {}),
    "causal": (sa.Full(), {"is_causal": True}),
    "band": (sa.Band((17, 5)), {}),
    "sinks": (sa.Band((9, 0), sinks=3), {"is_causal": True}),
    "globals": (sa.Band(4, sinks=1, global_tokens=3), {}),
    "offset": (sa.Band((30, 0)), {"is_causal": True, "query_offset": 11}),
}


@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 72, 80, 96, 112, 128])
@pytest.mark.parametrize("name", AS_HOPPER)
def test_what_auto_takes_has_the_bits_of_hopper(small, device, name, head_dim):
    """A sequence has the same bits alone and packed beside longer ones."""
    pattern, common = AS_HOPPER[name]
    met = 0
    for lengths in ((9, 20), (49, 49), (64, 64), (77, 77), (80, 128), (128, 128), (300, 60)):
        tensors = Shape(2, 4, 2, *lengths, head_dim).make(device, torch.bfloat16)
        answer = sa.can_use(*tensors, pattern, **common)
        if answer.engine != "small":
            continue
        sinks = torch.randn(4, device=device)
        got = small(*tensors, pattern, sink_logits=sinks, **common)
        want = small(*tensors, pattern, sink_logits=sinks, **{**common, "engine": "hopper"})
        assert all(map(torch.equal, got, want)), lengths
        met += 1
    if sa.can_use(*tensors, pattern, engine="hopper"):
        assert met >= 4
    else:
        assert met == 0, "bits that no device has two of"

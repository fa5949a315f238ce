"""Few queries on keys by the thousand, which an engine may cut into chunks and merge."""

import pytest
import torch
from reference import Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

KEYS = 4300
PATTERNS = {
    "full": lambda: sa.Full(),
    "band": lambda: sa.Band((2900, 130)),
    "sinks": lambda: sa.Band((2500, 0), sinks=200),
    "globals": lambda: sa.Band((2100, 70), global_tokens=150),
    "dilated": lambda: sa.Dilated((1500, 9), 2, sinks=3),
    "strided": lambda: sa.Strided(2100, 5),
}
COMMON = {
    "plain": lambda rows, device: {},
    "causal": lambda rows, device: {"is_causal": True},
    "softcap-and-sinks": lambda rows, device: {
        "softcap": 5.0,
        "sink_logits": torch.randn(2, device=device),
    },
    "offsets": lambda rows, device: {
        "is_causal": True,
        "query_offset": torch.tensor([-20, 2500], dtype=torch.int32, device=device),
    },
    "bounds": lambda rows, device: {"key_bounds": bounds(rows).to(device)},
}


def bounds(rows):
    """Bounds that leave whole chunks out, others that cut inside one, rows without a key."""
    intervals = torch.randint(0, KEYS, (2, 1, rows, 2), dtype=torch.int32).sort(-1).values
    intervals[0, 0, ::2, 1] = 100
    intervals[1, 0, 5:9] = 0
    return intervals


@pytest.mark.parametrize("Sq", [17, 129, 260])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("arguments", COMMON)
def test_patterns(attend, device, name, arguments, Sq):
    tensors = Shape(2, 2, 1, Sq, KEYS, 64).make(device, torch.bfloat16)
    pattern, common = PATTERNS[name](), COMMON[arguments](Sq, device)
    result = attend(pattern, *tensors, return_lse=True, **common)
    assert_close_to_reference(result, *tensors, pattern, **common)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("Sq", [100])
def test_head_dims(attend, device, head_dim, Sq):
    tensors = Shape(1, 3, 1, Sq, KEYS, head_dim).make(device, torch.float16, "transposed")
    result = attend(sa.Full(), *tensors, is_causal=True, return_lse=True)
    assert_close_to_reference(result, *tensors, sa.Full(), is_causal=True)


@pytest.mark.parametrize("Sq", [60, 128])
def test_bits_of_a_head_alone(attend, device, Sq):
    """Of so many heads that an engine may take them one after the other."""
    query, key, value = Shape(2, 48, 2, Sq, KEYS, 256).make(device, torch.bfloat16)
    out, lse = attend(sa.Full(), query, key, value, return_lse=True)
    for b, h in ((0, 0), (0, 47), (1, 17), (1, 47)):
        kv = slice(h // 24, h // 24 + 1)
        own = query[b : b + 1, h : h + 1], key[b : b + 1, kv], value[b : b + 1, kv]
        one, one_lse = attend(sa.Full(), *own, return_lse=True)
        assert torch.equal(one[0, 0], out[b, h]) and torch.equal(one_lse[0, 0], lse[b, h])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("Sq", "causal"), [(17, False), (60, True), (128, False), (300, True)])
def test_bits_where_tiles_fill_a_device(attend, device, Sq, causal, head_dim):
    """Of so many tiles that a thread block may take all chunks of one."""
    batch = 20 if attend.engine == "hopper" else 1
    sinks = torch.randn(48, device=device)
    query, key, value = Shape(batch, 48, 2, Sq, KEYS, head_dim).make(device, torch.bfloat16)
    common = {"is_causal": causal, "return_lse": True}
    out, lse = attend(sa.Full(), query, key, value, sink_logits=sinks, **common)
    for b, h in ((0, 0), (batch // 2, 17), (batch - 1, 24), (batch - 1, 47)):
        kv = [h // 24]
        own = query[b : b + 1, h : h + 1], key[b : b + 1, kv], value[b : b + 1, kv]
        one = attend(sa.Full(), *own, sink_logits=sinks[h : h + 1], **common)
        assert torch.equal(one[0][0, 0], out[b, h]) and torch.equal(one[1][0, 0], lse[b, h])
        assert_close_to_reference(
            one, *own, sa.Full(), sink_logits=sinks[h : h + 1], is_causal=causal
        )


@pytest.mark.parametrize(
    ("name", "Sq", "group"),
    [("full", 16, 5), ("sinks", 17, 3), ("globals", 33, 2), ("full", 64, 4)],
)
@pytest.mark.parametrize("arguments", ["plain", "causal", "softcap-and-sinks", "bounds"])
def test_bits_of_a_head_in_its_group(attend, device, name, arguments, Sq, group):
    """Of heads that an engine may take in one tile, of which the last is not filled."""
    query, key, value = Shape(2, 2 * group, 2, Sq, KEYS, 64).make(device, torch.bfloat16)
    pattern, common = PATTERNS[name](), COMMON[arguments](Sq, device)
    if "sink_logits" in common:
        common["sink_logits"] = torch.randn(2 * group, device=device)
    out, lse = attend(pattern, query, key, value, return_lse=True, **common)
    assert_close_to_reference((out, lse), query, key, value, pattern, **common)
    for b, h in ((0, 0), (0, group - 1), (1, group), (1, 2 * group - 1)):
        own = query[b : b + 1, h : h + 1], *(x[b : b + 1, [h // group]] for x in (key, value))
        alone = dict(common)
        if "sink_logits" in common:
            alone["sink_logits"] = common["sink_logits"][h : h + 1]
        if "key_bounds" in common:
            alone["key_bounds"] = common["key_bounds"][b : b + 1]
        one, one_lse = attend(pattern, *own, return_lse=True, **alone)
        assert torch.equal(one[0, 0], out[b, h]) and torch.equal(one_lse[0, 0], lse[b, h])


@pytest.mark.parametrize("Sq", [20])
def test_bounds_of_each_head(attend, device, Sq):
    """Heads of one group that see different keys."""
    tensors = Shape(1, 4, 1, Sq, KEYS, 64).make(device, torch.bfloat16)
    of_head = bounds(Sq)[:1].repeat(1, 4, 1, 1)
    of_head[:, 1] = torch.tensor([3000, 3100], dtype=torch.int32)
    of_head[:, 3] = 0
    result = attend(sa.Full(), *tensors, return_lse=True, key_bounds=of_head.to(device))
    assert_close_to_reference(result, *tensors, sa.Full(), key_bounds=of_head.to(device))

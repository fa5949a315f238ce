"""Offsets beyond 2^31 elements: the same bits as from small tensors.

Strides that reach so far lie in one buffer (on the CPU its pages exist where they are touched), so
the tests of strides run everywhere; large contents need a GPU. One test at a time holds them.
"""

import fcntl
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import PATTERNS, Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

BEYOND = 2**31  # elements
CELL = 2**21  # strides are multiples of it, so what lies apart within a cell lies apart everywhere
GIB = 2**30
LOCK = Path(tempfile.gettempdir()) / "sparse_attn_large_tensors.lock"

LARGE_PATTERNS = {
    name: PATTERNS[name]
    for name in ("full", "band-globals", "dilated-sinks", "strided", "blocks-of-heads", "topk")
} | {"block-topk-64": lambda s, device: sa.BlockTopK(64, budget_share=0.3, local_blocks=1)}
SIZES = {"prefill": Shape(2, 4, 2, 300, 300, 64), "few": Shape(2, 4, 2, 5, 1100, 64)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AXES = (0, 1, 2)  # batch, head, row


@pytest.fixture
def alone():
    """The memory of large tensors, for one process at a time."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def need_memory(device, gib):
    """Waits for it: other processes of the suite may hold it for a test of theirs."""
    if device != "cuda":
        return
    torch.cuda.empty_cache()
    last = time.monotonic() + 30
    while torch.cuda.mem_get_info()[0] < gib * GIB:
        if time.monotonic() > last:
            pytest.skip(f"needs {gib} GiB of free device memory")
        time.sleep(0.2)


class FarBuffer:
    """Tensors with one axis that reaches beyond 2^31 elements, side by side in one buffer."""

    def __init__(self, device, dtype):
        size = torch.empty(0, dtype=dtype).element_size()
        try:
            self.bytes = torch.empty(5 * BEYOND // 4 * size, dtype=torch.uint8, device=device)
        except RuntimeError:
            pytest.skip(f"needs a buffer of {5 * BEYOND // 4 * size} bytes")
        if device == "cuda":
            self.bytes.fill_(255)  # NaN in every dtype
        self.used = 0

    def place(self, tensor, axis):
        """A copy of `tensor` whose last index along `axis` lies beyond 2^31 elements."""
        steps = max(tensor.shape[axis] - 1, 1)
        stride = math.ceil(BEYOND / steps / CELL) * CELL
        rest = [size for d, size in enumerate(tensor.shape) if d != axis]
        strides = [math.prod(rest[d + 1 :]) for d in range(len(rest))]
        strides.insert(axis, stride)
        start = self.used // tensor.element_size()
        self.used += math.prod(rest) * tensor.element_size()
        self.used += -self.used % 256
        assert self.used <= CELL
        view = self.bytes.view(tensor.dtype).as_strided(tensor.shape, strides, start)
        return view.copy_(tensor)


@pytest.fixture
def far(alone, device):
    """Makes buffers; they live as long as the test."""
    need_memory(device, 24)
    buffers = []

    def make(dtype):
        buffers.append(FarBuffer(device, dtype))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.bytes = None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", LARGE_PATTERNS)
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_far_strides(attend, device, far, shape, name, dtype):
    shape = attend.fit(shape)
    tensors = shape.make(device, dtype)
    pattern = LARGE_PATTERNS[name](shape, device)
    want = attend(pattern, *tensors, is_causal=True, return_lse=True)
    buffer = far(dtype)
    for axis in AXES:
        buffer.used = 0
        query, key, value = (buffer.place(tensor, axis) for tensor in tensors)
        out = torch.empty_like(want[0])
        got = attend(pattern, query, key, value, is_causal=True, return_lse=True, out=out)
        assert all(map(torch.equal, got, want)), f"axis {axis}"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_far_strides_of_outputs(attend, device, engine, far, shape, dtype):
    shape = attend.fit(shape)
    tensors = shape.make(device, dtype)
    want = attend(sa.Full(), *tensors, return_lse=True)
    buffers = far(dtype), far(torch.float32)
    for axis in AXES:
        for buffer in buffers:
            buffer.used = 0
        out, lse = (b.place(torch.zeros_like(w), axis) for b, w in zip(buffers, want, strict=True))
        torch.ops.sparse_attn.fused_out(*tensors, engine=engine, out=out, lse=lse)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1]), f"axis {axis}"


@pytest.mark.parametrize("kind", ["bool", "float32", "bounds", "indices"])
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_far_strides_of_masks(attend, device, far, shape, kind):
    shape = attend.fit(shape)
    tensors = shape.make(device, torch.bfloat16)
    size = (shape.B, shape.Hq, shape.Sq, shape.Skv)
    blocks = LARGE_PATTERNS["blocks-of-heads"](shape, device).layout
    if kind == "bool":
        small = torch.rand(size, device=device) < 0.7
    elif kind == "float32":
        small = torch.randn(size, device=device)
        small = small.masked_fill(small < -0.5, -torch.inf)
    elif kind == "bounds":
        ends = torch.randint(0, shape.Skv, (*size[:3], 2), device=device)
        small = ends.sort(-1).values.int()
    else:
        small = blocks.indices

    def call(tensor):
        if kind == "indices":
            layout = sa.BlockLayout._trusted(blocks.counts, tensor, 64, 16, blocks.num_kv_blocks)
            return attend(sa.BlockSparse(layout), *tensors)
        name = "key_bounds" if kind == "bounds" else "attn_mask"
        return attend(sa.Full(), *tensors, **{name: tensor})

    want = call(small)
    buffer = far(small.dtype)
    for axis in AXES if kind == "indices" else (*AXES, 3):  # rows of indices are contiguous
        buffer.used = 0
        assert torch.equal(call(buffer.place(small, axis)), want), f"axis {axis}"


@pytest.fixture
def gpu(alone, device):
    if device != "cuda":
        pytest.skip("large contents need a GPU: run with --device cuda")
    need_memory(device, 40)


CONTENTS = {
    "keys": Shape(64, 8, 8, 70, 66000, 64),
    "queries": Shape(64, 8, 8, 66000, 70, 64),
}


@pytest.mark.parametrize("name", LARGE_PATTERNS)
@pytest.mark.parametrize("shape", CONTENTS.values(), ids=CONTENTS)
def test_large_contents(attend, device, gpu, shape, name):
    """The last batch entry of tensors beyond 2^31 elements equals itself alone."""
    tensors = shape.make(device, torch.bfloat16)
    pattern = LARGE_PATTERNS[name](replace(shape, B=1), device)
    common = dict(return_lse=True, query_offset=0)
    result = attend(pattern, *tensors, **common)
    single = attend(pattern, *(tensor[-1:] for tensor in tensors), **common)
    assert result[0][-1].any()
    assert all(torch.equal(got[-1:], want) for got, want in zip(result, single, strict=True))


def test_scores_of_one_head_beyond_two_to_the_31(attend, device, gpu):
    """The last rows of 33000 x 66000 equal the reference."""
    query, key, value = Shape(1, 1, 1, 33000, 66000, 64).make(device, torch.bfloat16)
    result = attend(sa.Full(), query, key, value, return_lse=True)
    last = tuple(tensor[:, :, -70:] for tensor in result)
    assert_close_to_reference(last, query[:, :, -70:], key, value)


def test_layout_of_more_than_two_to_the_31_blocks(device, gpu):
    num_q, num_kv = 2**15 + 8, 2**16
    mask = torch.zeros(num_q, num_kv, dtype=torch.bool, device=device)
    mask[-3:] = torch.rand(3, num_kv, device=device) < 0.5
    layout = sa.BlockLayout.from_mask(mask, 16, 16)
    assert torch.equal(layout.counts[0, 0], mask.sum(-1, dtype=torch.int32))
    for row in (-1, -3):
        want = mask[row].nonzero()[:, 0].int()
        assert torch.equal(layout.indices[0, 0, row, : len(want)], want)


def test_selection_of_more_than_two_to_the_31_block_pairs(device, gpu):
    length = 16 * 46500
    query, key, _ = Shape(1, 1, 1, length, length, 16).make(device, torch.bfloat16)
    pattern = sa.BlockTopK(16, budget_blocks=8, local_blocks=1)
    layout = sa.select_blocks(query, key, pattern)
    last = sa.select_blocks(query[:, :, -160:], key, pattern)
    assert torch.equal(layout.counts[:, :, -10:], last.counts)
    assert torch.equal(layout.indices[:, :, -10:], last.indices)


@pytest.mark.parametrize("selector", ["mean", "minmax", "sketch"])
@pytest.mark.parametrize("packed", [False, True], ids=["one-length", "packed"])
def test_selection_of_keys_that_are_copied_in_turns(device, gpu, packed, selector):
    """Each batch entry of 8-bit keys takes more than half of the memory that copies get."""
    batch, heads, length, dim, rows = 3, 8, 65536, 256, 9
    query = torch.randn(batch, 2 * heads, rows, dim, device=device, dtype=torch.bfloat16)
    key = torch.randn(batch, heads, length, dim, device=device, dtype=torch.bfloat16)
    key = key.to(torch.float8_e4m3fn)
    scale = torch.rand(batch, heads, device=device) + 0.3
    origin = torch.tensor([5, 0, 700], dtype=torch.int32, device=device)
    pattern = sa.BlockTopK(64, selector=selector, mass=0.3)
    if packed:
        ends = [torch.arange(batch + 1, device=device).int() * n for n in (rows, length)]
        tensors = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key)]
        bounds = dict(
            zip(("cu_seq_q", "cu_seq_k", "max_q", "max_k"), (*ends, rows, length), strict=True)
        )
        layout = sa.select_blocks(*tensors, pattern, key_scale=scale, key_origin=origin, **bounds)
    else:
        layout = sa.select_blocks(query, key, pattern, key_scale=scale, key_origin=origin)
    for b in range(batch):
        one = slice(b, b + 1)
        numbers = (key[one].float() * scale[one, :, None, None]).bfloat16()
        want = sa.select_blocks(query[one], numbers, pattern, key_origin=origin[one])
        assert torch.equal(layout.counts[one], want.counts)
        assert torch.equal(layout.indices[one], want.indices)


def test_merge_of_more_than_two_to_the_31_elements(device, gpu):
    rows = 2**25 + 64
    outs = [torch.randn(1, 1, rows, 64, device=device, dtype=torch.bfloat16) for _ in range(2)]
    lses = [torch.randn(1, 1, rows, device=device) for _ in range(2)]
    merged = sa.merge_states(outs[0], lses[0], outs[1], lses[1])
    ends = [tensor[:, :, -64:] for tensor in (outs[0], lses[0], outs[1], lses[1])]
    want = sa.merge_states(*ends)
    assert all(torch.equal(got[:, :, -64:], end) for got, end in zip(merged, want, strict=True))


@pytest.mark.parametrize("cpu_engine", ["naive", "tiled"])
def test_keys_of_a_list_count_in_int32(cpu_engine):
    """A list that names blocks many times ends with its key 2^30."""
    query, key, value = Shape(1, 1, 1, 16, 64, 8).make("cpu")
    for named, seen in ([-1, 0], True), ([-1, -1, 0], False):
        indices = torch.tensor(named, dtype=torch.int32)[None, None, None]
        counts = torch.full((1, 1, 1), len(named), dtype=torch.int32)
        pattern = sa.BlockSparse(sa.BlockLayout._trusted(counts, indices, 16, 2**29, 1))
        out = sa.sparse_attention(query, key, value, pattern, engine=cpu_engine)
        assert out.any() == seen

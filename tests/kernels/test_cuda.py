"""What only a GPU shows: graphs, streams, devices, malformed lists, forced tile shapes, sizes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference import DTYPES, PATTERNS, Shape, random_layout

import sparse_attn as sa
from sparse_attn.testing import (
    LSE_TERM,
    assert_close_to_reference,
    math_attention,
    reference_attention,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPE = Shape(Sq=200, Skv=260)
MORE_AND_LESS = (128, 128), (16, 100)  # queries and keys of a kernel of `small`


@pytest.fixture(autouse=True)
def only_cuda(device):
    if device != "cuda":
        pytest.skip("shows what a GPU does: run with --device cuda")


def captured(function):
    """A CUDA graph of a call, and its result; the call runs once before."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_graph_replays_on_new_inputs(attend, device, name, dtype):
    shape = attend.fit(SHAPE)
    tensors = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    graph, out = captured(lambda: attend(pattern, *tensors, is_causal=True))
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert torch.equal(out, attend(pattern, *tensors, is_causal=True))


@pytest.mark.parametrize("block", [(16, 16), (64, 64), (128, 128)], ids=str)
def test_graph_follows_lists_that_change(attend, device, block):
    shape = attend.fit(SHAPE)
    tensors = shape.make(device, torch.float16)
    layout = random_layout(shape.Sq, shape.Skv, *block, device)
    graph, out = captured(lambda: attend(sa.BlockSparse(layout), *tensors))
    for density in (0.0, 0.3, 1.0):
        other = random_layout(shape.Sq, shape.Skv, *block, device, density=density)
        layout.counts.copy_(other.counts)
        layout.indices.copy_(other.indices)
        graph.replay()
        assert_close_to_reference(out, *tensors, sa.BlockSparse(other))


def test_graph_builds_lists_from_a_mask_that_changes(device):
    tensors = SHAPE.make(device, torch.float16)
    mask = torch.rand(4, 5, device=device) < 0.5

    def call():
        return sa.block_sparse_attention(*tensors, sa.BlockLayout.from_mask(mask, 64, 64))

    graph, out = captured(call)
    mask.logical_not_()
    graph.replay()
    assert torch.equal(out, call())


@pytest.mark.parametrize("name", PATTERNS)
def test_streams_do_not_mix(attend, device, name):
    shape = attend.fit(SHAPE)
    pattern = PATTERNS[name](shape, device)
    inputs = [shape.make(device, torch.float16) for _ in range(4)]
    want = [attend(pattern, *tensors) for tensors in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got = []
    for stream, tensors in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            got.append(attend(pattern, *tensors))
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("name", PATTERNS)
def test_first_call_of_a_thread(attend, device, name):
    """A new thread has no CUDA context until something makes it."""
    shape = attend.fit(SHAPE)
    tensors = shape.make(device, torch.float16)
    pattern = PATTERNS[name](shape, device)
    want = attend(pattern, *tensors)
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(attend, pattern, *tensors).result()
    assert torch.equal(got, want)


def test_threads_leave_each_other_shared_memory(device):
    """One kernel, launched with more and with less of it by threads of a process at once."""
    many, few = (Shape(1, 2, 2, *sizes, 128).make(device, torch.float16) for sizes in MORE_AND_LESS)
    if not sa.can_use(*many, engine="small"):
        pytest.skip("needs compute capability 8.0")

    def call_often(tensors):
        for _ in range(2000):
            out = sa.fused_attention(*tensors, engine="small")
        return out

    want = [call_often(tensors) for tensors in (many, few)] * 2
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(call_often, (many, few, many, few)))
    assert all(map(torch.equal, got, want))


BAD = 2**31 - 1
MALFORMED = {
    "index-too-large": lambda counts, indices: indices[..., 1].fill_(BAD),
    "index-negative": lambda counts, indices: indices[..., 1].fill_(-7),
    "every-index": lambda counts, indices: indices.fill_(-BAD),
    "count-too-large": lambda counts, indices: counts.fill_(BAD),
    "count-negative": lambda counts, indices: counts.fill_(-1),
}


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_ragged_shapes_stay_inside_their_tensors(attend, device, name, dtype):
    """Lengths off every tile's edge, more heads than one, strides of a transposed view.

    Compared on the CPU: a sanitizer then watches the package's kernels, not the comparison's.
    """
    shape = attend.fit(Shape(1, 4, 2, 67, 131))
    tensors = shape.make(device, dtype, "transposed")
    bounds = torch.tensor([3, 129], dtype=torch.int32).expand(1, 1, shape.Sq, 2)
    common = dict(is_causal=True, return_lse=True)
    torch.manual_seed(0)  # for layouts that are drawn
    result = attend(PATTERNS[name](shape, device), *tensors, key_bounds=bounds.to(device), **common)
    place = device if "topk" in name else "cpu"  # what rounding decides, the same engine decides
    torch.manual_seed(0)
    pattern = PATTERNS[name](shape, place)
    result, tensors = ([tensor.to(place) for tensor in group] for group in (result, tensors))
    common["key_bounds"] = bounds.to(place)
    assert_close_to_reference(tuple(result), *tensors, pattern, **common)


BLOCKS = {  # the sanitizers run a small and a large one
    (16, 16): [pytest.mark.sanitizer],
    (32, 48): [],
    (128, 64): [pytest.mark.sanitizer],
    (128, 128): [],
}


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=marks, id=str(block)) for block, marks in BLOCKS.items()]
)
@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED)
def test_malformed_lists_are_clamped_and_skipped(attend, device, spoil, block):
    """The good entries of a spoilt list give what they give alone; nothing else is read."""
    Sq, Skv = 130, 300
    tensors = Shape(1, 2, 1, Sq, Skv).make(device, torch.bfloat16)
    num_q, num_kv = -(-Sq // block[0]), -(-Skv // block[1])
    layout = sa.BlockLayout.from_mask(torch.ones(num_q, num_kv, device=device) > 0, *block)
    spoil(layout.counts, layout.indices)
    out = attend(sa.BlockSparse(layout), *tensors).cpu()
    counts, indices = layout.counts[0, 0].cpu(), layout.indices[0, 0].cpu()
    listed = torch.arange(num_kv) < counts.clamp(0, num_kv)[:, None]
    row, entry = (listed & (indices >= 0) & (indices < num_kv)).nonzero(as_tuple=True)
    mask = torch.zeros(num_q, num_kv, dtype=torch.bool)
    mask[row, indices[row, entry].long()] = True
    good = sa.BlockSparse(sa.BlockLayout.from_mask(mask, *block))
    assert_close_to_reference(out, *(tensor.cpu() for tensor in tensors), good)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("limit", [64, 99, 163, 227])
def test_tiles_of_every_shared_memory_limit(monkeypatch, device, limit, head_dim, dtype):
    monkeypatch.setenv("SPARSE_ATTN_SMEM_LIMIT", str(limit << 10))
    tensors = Shape(1, 2, 1, 150, 270, head_dim).make(device, dtype)
    for pattern in (sa.Full(), sa.Band((100, 20), sinks=3), sa.TopK(20)):
        result = sa.sparse_attention(*tensors, pattern, engine="portable", return_lse=True)
        assert_close_to_reference(result, *tensors, pattern)


LARGE = {
    "causal": (sa.Full(), True),
    "band": (sa.Band((700, 0)), True),
    "band-both-sides": (sa.Band((300, 450), sinks=70), False),
    "globals": (sa.Band(129, global_tokens=131), False),
    "dilated": (sa.Dilated((200, 100), 3), False),
    "strided": (sa.Strided(200, 33), True),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("pattern, is_causal", LARGE.values(), ids=LARGE)
def test_many_tiles(attend, device, pattern, is_causal, head_dim, dtype):
    tensors = Shape(1, 4, 2, 1531, 1703, head_dim).make(device, dtype)
    result = attend(pattern, *tensors, is_causal=is_causal, return_lse=True)
    assert_close_to_reference(result, *tensors, pattern, is_causal=is_causal)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "block",
    [(16, 16), (16, 128), (32, 32), (48, 80), (64, 64), (128, 64), (128, 128), (256, 192)],
    ids=str,
)
def test_blocks_of_every_size(attend, device, block, head_dim):
    tensors = Shape(1, 2, 1, 1000, 1100, head_dim).make(device, torch.bfloat16)
    for density in (0.1, 0.6):
        layout = random_layout(1000, 1100, *block, device, 1, 2, density)
        for is_causal in (False, True):
            pattern = sa.BlockSparse(layout)
            result = attend(pattern, *tensors, is_causal=is_causal, return_lse=True)
            assert_close_to_reference(result, *tensors, pattern, is_causal=is_causal)


def uneven_layout(num_q, num_kv, block, device):
    """Lists of every length: the first row lists all blocks, the last none."""
    mask = torch.rand(2, num_q, num_kv) < torch.rand(2, num_q, 1)
    mask[:, 0], mask[:, -1] = True, False
    return sa.BlockLayout.from_mask(mask[None].to(device), *block)


@pytest.mark.parametrize("block", [(64, 64), (128, 64), (128, 128), (256, 32)], ids=str)
def test_lists_of_every_length_over_many_keys(attend, device, block):
    """Engines may deal out long lists first; a graph's replay orders them again."""
    Sq, Skv = 700, 4300
    tensors = Shape(1, 2, 1, Sq, Skv, 128).make(device, torch.bfloat16)
    blocks = -(-Sq // block[0]), -(-Skv // block[1])
    layout = uneven_layout(*blocks, block, device)
    graph, out = captured(lambda: attend(sa.BlockSparse(layout), *tensors))
    for _ in range(2):
        graph.replay()
        assert_close_to_reference(out, *tensors, sa.BlockSparse(layout))
        other = uneven_layout(*blocks, block, device)
        layout.counts.copy_(other.counts)
        layout.indices.copy_(other.indices)


@pytest.mark.parametrize("topk", [1, 100, 2048])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_topk_of_long_rows(attend, device, engine, topk, dtype):
    tensors = Shape(1, 2, 1, 150, 5000, 128).make(device, dtype)
    out = attend(sa.TopK(topk), *tensors, is_causal=True)
    assert_close_to_reference(out, *tensors, sa.TopK(topk), is_causal=True, engine=engine)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_lse_of_long_sums(attend, device, dtype):
    """A factor by which each tile rescales the sums before it would show after a thousand tiles."""
    tensors = Shape(1, 1, 1, 64, 131072, 64).make(device, dtype)
    lse = attend(sa.Full(), *tensors, return_lse=True)[1]
    want = reference_attention(*tensors)[1]
    assert ((lse - want).abs() <= LSE_TERM * want.abs()).all()


def test_error_of_long_sums(attend, device):
    """float32 stays float32 where 16K keys are summed."""
    tensors = Shape(1, 1, 1, 64, 16384, 64).make(device, torch.float32)
    out = attend(sa.Full(), *tensors)
    want = reference_attention(*tensors)[0]
    math = math_attention(*tensors).double()
    limit = 2 * (math - want).abs().max() + 2.0**-20 * want.abs().max()
    assert (out.double() - want).abs().max() <= limit

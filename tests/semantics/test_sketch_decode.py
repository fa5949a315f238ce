"""Decode with the key sketch: attention over its blocks, compiled and in the replays of a graph."""

import pytest
import torch
from reference import DTYPES, Shape
from selection import decoding

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference


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


class Decoder(torch.nn.Module):
    """A step of a module that holds its sketch."""

    def __init__(self, key):
        super().__init__()
        self.sketch = sa.KeySketch(key, capacity=512)

    def forward(self, key):
        self.sketch.append(key)


def test_steps_of_a_module_are_compiled_once(device):
    """The number of tokens is no constant of the graph, which would fail at the ninth step."""
    key = torch.randn(1, 2, 400, 16, device=device)
    module, graphs = Decoder(key[:, :, :300]), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(module, fullgraph=True, backend=backend)
    for at in range(300, 330):
        step(key[:, :, at : at + 1])
    assert len(graphs) <= 2  # of one size, then of any
    assert torch.equal(module.sketch.codes, sa.KeySketch(key[:, :, :330], capacity=512).codes)


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
    at_once = sa.KeySketch(key[:, :, :420])
    assert sketch.lengths.tolist() == [420, 420]
    assert torch.equal(sketch.codes[:, :, :420], at_once.codes[:, :, :420])
    keys = (query, key[:, :, :420], value[:, :, :420])
    want = sa.sparse_attention(*keys, decoding(at_once, group="kv"), is_causal=True)
    torch.testing.assert_close(out, want)

"""Every function traces whole and dynamic: one graph for all lengths, the same numbers."""

import pytest
import torch
from reference import Shape
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_attn as sa

LENGTHS = ((40, 73), (57, 90), (33, 71))


def blocks(query, key, value, **common):
    num_q, num_kv = -(-query.shape[2] // 16), -(-key.shape[2] // 16)
    mask = torch.ones(num_q, num_kv, dtype=torch.bool, device=query.device).tril()
    layout = sa.BlockLayout.from_mask(mask, 16, 16)
    return sa.block_sparse_attention(query, key, value, layout, **common)


def partial_blocks(query, key, value, **common):
    counts = torch.ones(-(-query.shape[2] // 64), dtype=torch.int32, device=query.device)
    partial = torch.zeros_like(counts)[None, None, :, None]
    bits = torch.arange(64 * 4, dtype=torch.int32, device=query.device).view(1, 64, 4)
    layout = sa.BlockLayout._trusted(
        counts[None, None], torch.zeros_like(partial), 64, 128, 1, partial, bits
    )
    return sa.block_sparse_attention(query, key, value, layout, **common)


def into_out(query, key, value, **common):
    out = query.new_zeros((*query.shape[:3], value.shape[3]))
    sa.band_attention(query, key, value, 5, out=out, **common)
    return out + 1


def bounded(query, key, value, **common):
    low = torch.arange(query.shape[2], device=query.device, dtype=torch.int32) % 7
    bounds = torch.stack([low, low + 30], -1).expand(query.shape[0], 1, -1, -1)
    mask = torch.ones(key.shape[2], device=query.device, dtype=torch.bool)
    return sa.fused_attention(query, key, value, mask, key_bounds=bounds, **common)


def offset(query, key, value, **common):
    length = key.shape[2] - query.shape[2]
    offsets = torch.full((query.shape[0],), 3, dtype=torch.int32, device=query.device)
    early = sa.fused_attention(query, key, value, query_offset=length // 2, **common)
    return early + sa.fused_attention(query, key, value, query_offset=offsets, **common)


def merged(query, key, value, **common):
    first = sa.fused_attention(query, key, value, return_lse=True, **common)
    return torch.cat([sa.merge_states(*first, *first)[0], first[0]])


FUNCTIONS = {
    "fused": lambda *t, **c: sa.fused_attention(*t, softcap=3.0, **c),
    "naive": lambda *t, **c: sa.naive_attention(*t, sa.Band(9, sinks=2), **c),
    "band": lambda *t, **c: sa.band_attention(*t, (9, 0), sinks=2, global_tokens=1, **c),
    "dilated": lambda *t, **c: sa.dilated_attention(*t, 3, 4, **c),
    "strided": lambda *t, **c: sa.strided_attention(*t, 3, 4, **c),
    "block-sparse": blocks,
    "partial-blocks": partial_blocks,
    "topk": lambda *t, **c: sa.topk_attention(*t, 5, **c),
    "block-topk": lambda *t, **c: sa.block_topk_attention(
        *t, block_size=16, mass=None, budget_share=0.5, local_blocks=1, **c
    ),
    "naive-block-topk": lambda *t, **c: sa.naive_attention(
        *t, sa.BlockTopK(16, mass=None, selector="mean", budget_blocks=2, local_blocks=1), **c
    ),
    "sparse": lambda *t, **c: sa.sparse_attention(*t, sa.Dilated(5, 2), **c),
    "lse": lambda *t, **c: torch.cat(
        [x.flatten() for x in sa.fused_attention(*t, return_lse=True, **c)]
    ),
    "out": into_out,
    "bounds-and-mask": bounded,
    "offset": offset,
    "merge": merged,
}


#: Graphs of a function where they are more than one: the default mass is a float, which torch takes
#: for an input first and traces once more as a constant.
GRAPHS = {"naive-block-topk": 2}


#: Of those whose output has a shape of its own; that of the other ops' fakes is opcheck's to test.
OTHER_VALUES = ("fused", "lse", "out", "merge")


@pytest.mark.parametrize(
    ("name", "value_dim"), [*((n, 64) for n in FUNCTIONS), *((n, 32) for n in OTHER_VALUES)]
)
def test_one_dynamic_graph(device, name, value_dim):
    function = FUNCTIONS[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for Sq, Skv in LENGTHS:
        tensors = Shape(2, 4, 2, Sq, Skv, 64, Dv=value_dim).make(device)
        assert torch.equal(compiled(*tensors), function(*tensors))
    assert counter.frame_count == GRAPHS.get(name, 1)
    tensors = Shape(2, 4, 2, 33, 71, 64, Dv=value_dim).make(device)
    assert torch.equal(compiled(*tensors, scale=0.3), function(*tensors, scale=0.3))


def test_block_size_that_changes_stays_in_the_graph(device):
    torch._dynamo.reset()

    def function(query, key, value, block):
        return sa.block_topk_attention(query, key, value, block_size=block)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    tensors = Shape(1, 2, 2, 130, 130, 64).make(device)
    for block in (16, 32, 64):
        assert torch.equal(compiled(*tensors, block), function(*tensors, block))


def test_window_that_changes_compiles_once(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(query, key, value, window, dilation):
        band = sa.band_attention(query, key, value, (window, 0), is_causal=True)
        return band + sa.dilated_attention(query, key, value, window, dilation)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    tensors = Shape(1, 2, 1, 40, 50, 64).make(device)
    for window, dilation in ((3, 2), (5, 3), (9, 7)):
        assert torch.equal(
            compiled(*tensors, window, dilation), function(*tensors, window, dilation)
        )
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["band", "out", "block-sparse"])
def test_inductor(device, name):
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True)
    tensors = Shape(2, 4, 2, 40, 57, 64).make(device)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), FUNCTIONS[name](*tensors))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compiled_in_grad_mode_only_the_backward_raises(device, backend, dynamic):
    torch._dynamo.reset()
    tensors = Shape(2, 4, 2, 40, 57, 64).make(device)
    sink_logits = torch.zeros(4, dtype=torch.float32, device=device)
    for tensor in (*tensors, sink_logits):
        tensor.requires_grad_()

    def function(query, key, value, sink_logits):
        pair = sa.band_attention(query, key, value, 9, sink_logits=sink_logits, return_lse=True)
        return sa.merge_states(*pair, *pair)[0]

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    out = compiled(*tensors, sink_logits)
    assert out.requires_grad and torch.equal(out, function(*tensors, sink_logits))
    with pytest.raises(RuntimeError, match="^sparse_attn::.*: expected inference.*backward") as e:
        out.sum().backward()
    assert "\n" not in str(e.value)


def test_export_of_windows_by_head_takes_all_lengths(device):
    """Nor does one of few queries, which takes lists by another way, narrow them."""
    pattern = sa.ByHead({0: sa.Full()}, rest=sa.Band((9, 0), sinks=2))

    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            return sa.sparse_attention(query, key, value, pattern, is_causal=True)

    length = torch.export.Dim("length", min=2, max=8192)
    tensors = Shape(1, 4, 2, 40, 40, 64).make(device)
    program = torch.export.export(Layer(), tensors, dynamic_shapes=[{2: length}] * 3)
    for rows in (5, 70):
        others = Shape(1, 4, 2, rows, rows, 64).make(device)
        assert torch.equal(program.module()(*others), Layer()(*others))


def test_export(device):
    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            return sa.band_attention(query, key, value, (9, 0), sinks=2)

    tensors = Shape(1, 2, 1, 40, 57, 64).make(device)
    program = torch.export.export(Layer(), tensors)
    assert torch.equal(program.module()(*tensors), Layer()(*tensors))
    targets = [str(node.target) for node in program.graph.nodes]
    assert "sparse_attn.band.default" in targets


def write_layer(new, caches, slots):
    sa.append_to_cache(new, new, caches[0, 1], caches[1, 1], slots)
    return caches + 0


def write_out(new, caches, slots):
    query = caches[0].transpose(1, 2)  # (3, 16, pages, 2, 16)
    query = query[:, :, :, 0]
    outs = query.new_zeros(2, *query.shape)
    sa.fused_attention(query, query, query, out=outs[1])
    return outs


def caches_of(pages, device):
    new, caches = torch.randn(3, 2, 16, device=device), torch.randn(2, 3, pages, 16, 2, 16)
    return new, caches.to(device), torch.arange(3, device=device)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("write", [write_layer, write_out])
def test_writes_at_places_that_open_sizes_move_are_refused(device, backend, write):
    """Inductor takes such a place for the start of the tensor and writes there."""
    torch._dynamo.reset()
    compiled = torch.compile(write, backend=backend, fullgraph=True)
    with torch.no_grad():
        call = caches_of(5, device)
        own = [tensor.clone() for tensor in call]
        assert torch.equal(compiled(*call), write(*own))  # sizes are numbers yet
        with pytest.raises(RuntimeError, match="fixed place of its storage, got one that moves"):
            compiled(*caches_of(7, device))


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_views_that_a_graph_takes_are_written(device, dynamic):
    torch._dynamo.reset()

    def step(new, key_cache, value_cache, slots):
        sa.append_to_cache(new, new, key_cache, value_cache, slots)
        return key_cache.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for pages in (5, 7, 9):
            new, caches, slots = caches_of(pages, device)
            keys, values = caches.unbind(0)
            values = values.clone()
            own = keys.clone(), values.clone()
            compiled(new, keys[1], values[2], slots)
            sa.append_to_cache(new, new, own[0][1], own[1][2], slots)
            assert torch.equal(keys, own[0]) and torch.equal(values, own[1])


@pytest.mark.parametrize("kind", ["halves", "interleaved"])
def test_two_inputs_of_one_tensor(device, kind):
    """Inductor mixes up halves at a place that is open; what interleaves is written."""
    torch._dynamo.reset()

    def step(new, key_cache, value_cache, slots):
        sa.append_to_cache(new, new, key_cache, value_cache, slots)
        return key_cache.sum()

    compiled = torch.compile(step, fullgraph=True)
    with torch.no_grad():
        for pages in (5, 7, 9):
            new, caches, slots = caches_of(pages, device)
            axis = 0 if kind == "halves" else 1
            caches = caches[:, 0].transpose(0, axis).contiguous()
            own = caches.clone()
            if kind == "halves" and pages > 5:
                with pytest.raises(RuntimeError, match="of storages of their own, got parts of"):
                    compiled(new, *caches.unbind(axis), slots)
                continue
            compiled(new, *caches.unbind(axis), slots)
            sa.append_to_cache(new, new, *own.unbind(axis), slots)
            assert torch.equal(caches, own)

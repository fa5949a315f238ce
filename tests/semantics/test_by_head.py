"""ByHead: every key head has a pattern of its own, equal to running each head alone."""

import copy
import pickle
from itertools import product

import pytest
import torch
from reference import Shape
from torch.fx.experimental.proxy_tensor import make_fx

import sparse_attn as sa

SHAPE = Shape(B=2, Hq=8, Hkv=4, Sq=70, Skv=70, D=32)
BAND = sa.Band((7, 0), sinks=2)
#: Scores by key head of a call, which one of its key heads would take for those of its query heads.
SCORES = sa.BlockTopK(16, selector=torch.zeros(1, 2, 5, 5))


def layout(device):
    return sa.BlockSparse(sa.BlockLayout.local(70, 70, 16, 16, (1, 0), device=device))


PATTERNS = {
    "neighbours": lambda d: sa.ByHead({0: sa.Full(), 1: sa.Full()}, rest=BAND),
    "alternating": lambda d: sa.ByHead({1: BAND, 3: BAND}),
    "one": lambda d: sa.ByHead({2: BAND}, rest=BAND),
    "lists": lambda d: sa.ByHead(
        {1: sa.BlockTopK(16, 0.4), 3: sa.BlockTopK(16, None, budget_blocks=2)},
        rest=sa.BlockTopK(16, 0.7, row_step=8),
    ),
    "lists-beside": lambda d: sa.ByHead(
        {0: sa.BlockTopK(16, 0.4), 1: sa.BlockTopK(32, 0.4), 2: sa.BlockTopK(32, 0.6)},
        rest=sa.BlockTopK(32, 0.5, group="kv"),
    ),
    "all-different": lambda d: sa.ByHead(
        {0: sa.Strided(5, 8), 1: layout(d), 2: sa.TopK(5)},
        rest=sa.BlockTopK(16, 0.5, local_blocks=1),
    ),
}


def alone(query, key, value, pattern, common):
    """Run every key head in a call of its own."""
    group = query.shape[1] // key.shape[1]
    outs, lses = [], []
    for head in range(key.shape[1]):
        rows = slice(head * group, (head + 1) * group)
        own = {
            name: argument[..., rows] if name == "sink_logits" else argument
            for name, argument in common.items()
        }
        for name in ("attn_mask", "key_bounds"):
            if name in own and own[name].shape[1] > 1:
                own[name] = own[name][:, rows]
        tensors = query[:, rows], key[:, head : head + 1], value[:, head : head + 1]
        out, lse = sa.sparse_attention(*tensors, pattern.of(head), return_lse=True, **own)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


COMMON = {
    "plain": lambda s, d: {},
    "mask-of-heads": lambda s, d: {"attn_mask": torch.rand(2, 8, 70, 70, device=d) < 0.8},
    "bounds-of-heads": lambda s, d: {
        "key_bounds": torch.randint(0, 60, (2, 8, 70, 2), device=d, dtype=torch.int32)
    },
    "sinks-of-heads": lambda s, d: {"sink_logits": torch.randn(8, device=d), "softcap": 3.0},
    "offsets": lambda s, d: {"query_offset": torch.tensor([3, -2], device=d, dtype=torch.int32)},
}


@pytest.mark.parametrize("common", COMMON)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("memory", ["contiguous", "transposed"])
def test_equals_each_head_alone(device, pattern, common, memory):
    query, key, value = SHAPE.make(device, memory=memory)
    pattern = PATTERNS[pattern](device)
    common = dict(COMMON[common](SHAPE, device), is_causal=True)
    out, lse = sa.sparse_attention(query, key, value, pattern, return_lse=True, **common)
    want, want_lse = alone(query, key, value, pattern, common)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert out.stride() == query.stride()
    assert torch.equal(sa.sparse_attention(query, key, value, pattern, **common), out)


def test_heads_of_one_pattern_are_one_call_on_views(device, monkeypatch):
    from sparse_attn import _common

    calls = []

    def call(name, tensors, arguments, written):
        query = tensors[0]
        calls.append((query.shape[1], query.data_ptr(), arguments["out"].data_ptr()))
        return real(name, tensors, arguments, written)

    real = _common.ops.call
    monkeypatch.setattr(_common.ops, "call", call)
    query, key, value = SHAPE.make(device)
    out = sa.sparse_attention(query, key, value, sa.ByHead({1: BAND, 2: BAND}))
    step = 70 * 32 * query.element_size()
    assert calls == [
        (heads, query.data_ptr() + first * step, out.data_ptr() + first * step)
        for heads, first in ((2, 0), (4, 2), (2, 6))
    ]


def test_lists_of_neighbouring_heads_are_one_call(device, monkeypatch):
    from sparse_attn import ops

    calls = []

    def call(name, tensors, arguments, written=()):
        calls.append((name.removesuffix("_out"), tensors[0].shape[1]))
        return real(name, tensors, arguments, written)

    real = ops.call
    monkeypatch.setattr(ops, "call", call)
    tensors = SHAPE.make(device)
    sa.sparse_attention(*tensors, PATTERNS["lists"](device), is_causal=True)
    assert calls == [*4 * [("select_blocks", 2)], ("block_sparse", 8)]
    calls.clear()
    sa.sparse_attention(*tensors, PATTERNS["lists-beside"](device), is_causal=True)
    selected = 2 * [("select_blocks", 2)]
    assert calls == [("block_topk", 2), *selected, ("block_sparse", 4), ("block_topk", 2)]
    calls.clear()
    few = [tensor[:, :, :16] for tensor in tensors]  # decode has lists of its own
    sa.sparse_attention(*few, PATTERNS["lists"](device))
    assert {name for name, _ in calls} == {"block_topk"}


def test_out_is_written_and_returned(device):
    query, key, value = SHAPE.make(device)
    pattern = PATTERNS["alternating"](device)
    want, _ = alone(query, key, value, pattern, {})
    buffer = torch.zeros(2, 70, 8, 40, device=device)
    out = buffer.transpose(1, 2)[..., :32]
    assert sa.sparse_attention(query, key, value, pattern, out=out) is out
    assert torch.equal(out, want) and not buffer[..., 32:].any()


@pytest.mark.parametrize("run", [sa.sparse_attention, sa.naive_attention], ids=lambda f: f.__name__)
@pytest.mark.parametrize("overlapped", ["query", "key", "itself"])
def test_out_that_meets_other_heads_is_refused(device, run, overlapped):
    """Each run of heads sees its part alone, in which nothing overlaps."""
    heads = torch.randn(1, 6, 20, 16, device=device)
    query, key, value = torch.randn(3, 1, 4, 20, 16, device=device)
    tensors = {"query": query, "key": key, "value": value}
    if overlapped != "itself":
        tensors[overlapped] = heads[:, :4]
    out = heads[:, :1].expand(1, 4, 20, 16) if overlapped == "itself" else heads[:, 2:]
    pattern = sa.ByHead({0: BAND, 2: BAND})
    sentence = "without overlapping" if overlapped == "itself" else f"does not overlap {overlapped}"
    before = heads.clone()
    with pytest.raises(ValueError, match=f"expected out .*{sentence}"):
        run(**tensors, pattern=pattern, out=out)
    assert torch.equal(heads, before)
    assert not sa.can_use(**tensors, pattern=pattern, out=out)
    assert sa.can_use(**tensors, pattern=pattern, out=torch.empty_like(query))


def test_naive_attention_takes_it(device):
    tensors = SHAPE.make(device)
    pattern = PATTERNS["alternating"](device)
    torch.testing.assert_close(
        sa.naive_attention(*tensors, pattern, is_causal=True),
        sa.sparse_attention(*tensors, pattern, is_causal=True),
        rtol=1e-4,
        atol=1e-5,
    )


def test_quality_and_capability_take_it(device):
    query, key, value = SHAPE.make(device)
    pattern = PATTERNS["alternating"](device)
    got = sa.quality.compare(query, key, value, pattern, is_causal=True)
    band = sa.quality.compare(query, key, value, BAND, is_causal=True)
    full = sa.quality.compare(query, key, value, sa.Full(), is_causal=True)
    dense = torch.tensor([True, True, False, False] * 2, device=device)
    torch.testing.assert_close(got.mass, full.mass.where(dense, band.mass))
    assert got.worst == band.quantiles[:, ~dense, 0].min()
    torch.testing.assert_close(got.pairs, (full.pairs + band.pairs) / 2)
    assert sa.can_use(query, key, value, pattern).served
    assert not sa.can_use(query, key[..., :8], value, pattern).served


def test_grad_mode_and_autocast(device):
    query, key, value = SHAPE.make(device)
    pattern = PATTERNS["alternating"](device)
    want, _ = alone(query, key, value, pattern, {})
    out = sa.sparse_attention(query.clone().requires_grad_(), key, value, pattern)
    assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="sparse_attn"):
        out.sum().backward()
    with torch.autocast(device, torch.bfloat16):
        assert sa.sparse_attention(query, key, value, pattern).dtype == torch.bfloat16


ORDERS = {"bhs": (0, 1, 2), "bsh": (0, 2, 1), "sbh": (2, 0, 1)}


@pytest.mark.parametrize(
    ("mode", "order", "value_dim"),
    [
        *product(("grad", "autocast"), ORDERS, (32, 24)),
        *(("compile", order, 24) for order in ORDERS),  # seconds each; a graph knows no other way
        ("compile", "bsh", 32),
    ],
)
def test_joined_outputs_have_the_order_of_query(device, mode, order, value_dim):
    """Where no call can write its part of one output."""
    query, key, value = SHAPE.make(device)
    order = ORDERS[order]
    query = query.permute(*order, 3).contiguous().permute([order.index(d) for d in range(3)] + [3])
    value = value[..., :value_dim]
    pattern, call = PATTERNS["alternating"](device), sa.sparse_attention
    want = call(query, key, value, pattern)
    if mode == "compile":
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    query.requires_grad_(mode == "grad")
    with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
        out, lse = call(query, key, value, pattern, return_lse=True)
        assert call(query, key, value, pattern).stride() == want.stride()
    assert out.stride() == want.stride() and lse.is_contiguous()
    assert mode == "autocast" or torch.equal(out, want)


def test_rows_of_queries_may_overlap(device):
    """As those of ``unfold`` do; torch.empty_like gives no memory for rows then."""
    _, key, value = SHAPE.make(device)
    Hq, D = SHAPE.Hq, SHAPE.D
    query = torch.randn(SHAPE.B, Hq, D + 4, device=device).unfold(-1, D, 1)
    pattern = PATTERNS["alternating"](device)
    out = sa.sparse_attention(query, key, value, pattern)
    assert torch.equal(out, sa.sparse_attention(query.contiguous(), key, value, pattern))


@pytest.mark.parametrize("name", ["sink_logits", "alibi_slopes", "attn_mask"])
@pytest.mark.parametrize("pattern", ["alternating", "lists"])
def test_parameters_beside_query_that_require_grad(device, pattern, name):
    """Learned sinks are a parameter of the model, which its other tensors need not be."""
    tensors, pattern = SHAPE.make(device), PATTERNS[pattern](device)
    shape = (2, 8, 70, 70) if name == "attn_mask" else (8,)
    parameter = torch.rand(shape, device=device, requires_grad=True)
    out, lse = sa.sparse_attention(*tensors, pattern, return_lse=True, **{name: parameter})
    with torch.no_grad():
        want = sa.sparse_attention(*tensors, pattern, return_lse=True, **{name: parameter})
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1]) and out.requires_grad
    with pytest.raises(RuntimeError, match="got a backward pass"):
        out.sum().backward()
    with pytest.raises(ValueError, match=f"expected out= under .*, got {name} that requires grad"):
        sa.sparse_attention(*tensors, pattern, out=torch.empty_like(out), **{name: parameter})


@pytest.mark.parametrize(
    ("pattern", "dynamic"), [("alternating", None), ("lists", True), ("lists-beside", True)]
)
def test_compiles_to_one_graph(device, pattern, dynamic):
    """With ``dynamic=True`` the block sizes of a pattern that is handed over stay open too."""
    torch._dynamo.reset()
    tensors = SHAPE.make(device)
    pattern = PATTERNS[pattern](device)
    compiled = torch.compile(
        sa.sparse_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    assert torch.equal(compiled(*tensors, pattern), sa.sparse_attention(*tensors, pattern))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("pattern", ["alternating", "lists", "lists-beside"])
def test_traces_by_make_fx(device, pattern, mode):
    tensors, pattern = SHAPE.make(device), PATTERNS[pattern](device)

    def call(*tensors):
        return sa.sparse_attention(*tensors, pattern)

    graph = make_fx(call, tracing_mode=mode)(*tensors)
    assert torch.equal(graph(*tensors), call(*tensors))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: sa.ByHead(3), "ByHead: expected patterns to be a mapping"),
        (lambda: sa.ByHead({"a": BAND}), "ByHead: expected head to be an int"),
        (lambda: sa.ByHead({-1: BAND}), "ByHead: expected head of at least 0"),
        (lambda: sa.ByHead({0: "band"}), "ByHead: expected pattern to be a pattern"),
        (lambda: sa.ByHead({0: sa.ByHead({})}), "ByHead: expected a pattern for each head"),
        (lambda: sa.ByHead({0: SCORES}), r"ByHead: expected scores of one head, got shape \(1, 2"),
        (
            lambda: sa.ByHead({}, rest=sa.TopK(3, inside=SCORES)),
            "ByHead: expected scores of one head",
        ),
        (lambda: sa.ByHead({9: BAND}).runs(4), "ByHead: expected patterns for the call's 4 key"),
        (lambda: sa.ByHead({0: BAND}).of([0]), "ByHead: expected head to be an int, got list"),
        (
            lambda: sa.ByHead({0: BAND}).runs(4.0),
            "ByHead: expected num_heads to be an int, got flo",
        ),
        (lambda: sa.ByHead({0: BAND}).runs(10**30), "ByHead: expected num_heads of at most 53687"),
    ],
    ids=[
        *("kind", "name", "negative", "pattern", "nested", "scores", "scores-inside"),
        *("beyond", "of", "count", "many"),
    ],
)
def test_wrong_arguments_are_refused(make, sentence):
    with pytest.raises((TypeError, ValueError), match=rf"^sparse_attn\.{sentence}"):
        make()


@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_wrong_tensors_are_refused_by_the_op(device, tensor):
    tensors = list(SHAPE.make(device))
    tensors[tensor] = tensors[tensor][0]
    with pytest.raises(ValueError, match=r"^sparse_attn::\w+: expected"):
        sa.sparse_attention(*tensors, sa.ByHead({0: BAND}))
    tensors[tensor] = "tensor"
    with pytest.raises(TypeError, match=r"^sparse_attn\.sparse_attention: expected"):
        sa.sparse_attention(*tensors, sa.ByHead({0: BAND}))


def test_patterns_stay_as_they_are():
    pattern = sa.ByHead({0: BAND})
    for same in (pattern, copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert same == pattern
        with pytest.raises(TypeError, match=r"^sparse_attn: expected the patterns of a Policy or"):
            same.patterns[1] = 3


def test_meta_tensors_have_the_shapes_of_a_result():
    tensors = SHAPE.make("meta")
    result = sa.sparse_attention(*tensors, sa.ByHead({0: BAND}))
    assert result.is_meta and result.shape == tensors[0].shape


def test_masks_of_all_heads_are_refused():
    for what in ("mask", "density"):
        with pytest.raises(NotImplementedError, match=r"sparse_attn\.ByHead: no .*\.of\(head\)"):
            getattr(sa.ByHead({0: BAND}), what)(8, 8)

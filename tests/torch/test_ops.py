"""The registered ops: their names, schemas, fakes, autograd, and what a straight call raises."""

import sys

import pytest
import torch
from reference import PATTERNS, Shape

import sparse_attn as sa
from sparse_attn.ops import ATTENTION_OPS, TOOL_OPS, empty_output

OPS = torch.ops.sparse_attn
COMMON = {
    "attn_mask",
    "is_causal",
    "scale",
    "key_bounds",
    "query_offset",
    "query_offsets",
    "key_origin",
    "softcap",
    "sink_logits",
    "alibi_slopes",
    "key_scale",
    "value_scale",
    "engine",
}


def call_of(name, device, value_dim=64):
    """An op's name and arguments, for each pattern."""
    shape = Shape(1, 2, 1, 20, 37, 64, Dv=value_dim)
    tensors = shape.make(device)
    pattern = PATTERNS[name](shape, device)
    return pattern._op, tensors, pattern._arguments()


def test_names_are_what_is_registered():
    registered = {
        schema.name.removeprefix("sparse_attn::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("sparse_attn::")
    }
    twins = {f"{name}_out" for name in (*ATTENTION_OPS, "merge_states")}
    twins |= {f"{name}_engine" for name in ATTENTION_OPS}
    assert registered == {*ATTENTION_OPS, *TOOL_OPS, *twins, "refuse_backward"}


@pytest.mark.parametrize("name", ATTENTION_OPS)
def test_schemas_share_the_common_arguments(name):
    schema = getattr(OPS, name).default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:3] == ["query", "key", "value"] and set(names[-14:]) == {*COMMON, "return_lse"}
    assert [value.name for value in schema.returns] == ["out", "lse"] and not schema.is_mutable
    twin = getattr(OPS, f"{name}_out").default._schema
    names.remove("return_lse")
    assert [argument.name for argument in twin.arguments] == [*names, "out", "lse"]
    assert twin.is_mutable and not twin.returns
    question = getattr(OPS, f"{name}_engine").default._schema
    assert [argument.name for argument in question.arguments] == [*names, "out", "lse"]
    assert not question.is_mutable and len(question.returns) == 1


#: An output of values' head dim, and one of query's beside an lse.
RESULTS = pytest.mark.parametrize(("value_dim", "with_lse"), [(24, False), (64, True)])


@RESULTS
@pytest.mark.parametrize("name", PATTERNS)
def test_opcheck(device, name, value_dim, with_lse):
    op, tensors, arguments = call_of(name, device, value_dim)
    arguments = dict(arguments, is_causal=True, return_lse=with_lse)
    torch.library.opcheck(getattr(OPS, op).default, tensors, arguments)


@RESULTS
@pytest.mark.parametrize("name", PATTERNS)
def test_opcheck_of_the_out_twin(device, name, value_dim, with_lse):
    op, tensors, arguments = call_of(name, device, value_dim)
    out = empty_output(tensors[0], tensors[2])
    lse = torch.empty(out.shape[:3], device=device) if with_lse else None
    torch.library.opcheck(
        getattr(OPS, f"{op}_out").default, tensors, dict(arguments, out=out, lse=lse)
    )


def test_opcheck_of_naive_and_tools(device):
    query, key, value = Shape(1, 2, 1, 20, 37, 64).make(device)
    window = {"left": 3, "right": 0, "sinks": 1}
    torch.library.opcheck(OPS.naive.default, (query, key, value), window)
    out = torch.empty_like(query)
    torch.library.opcheck(OPS.naive_out.default, (query, key, value), dict(window, out=out))
    selection = {"block_size": 16, "budget_count": 2, "is_causal": True}
    torch.library.opcheck(OPS.select_blocks.default, (query, key), selection)
    mask = torch.rand(2, 3, 4, device=device) < 0.5
    torch.library.opcheck(OPS.list_from_mask.default, (mask,))
    out, lse = OPS.fused(query, key, value, return_lse=True)
    torch.library.opcheck(OPS.merge_states.default, (out, lse, out, lse))
    outputs = {"out": torch.empty_like(out), "lse": torch.empty_like(lse)}
    torch.library.opcheck(OPS.merge_states_out.default, (out, lse, out, lse), outputs)


@pytest.mark.parametrize("value_dim", [64, 24, 128])
@pytest.mark.parametrize("memory", ["contiguous", "transposed", "gaps"])
def test_fakes_have_the_strides_of_the_kernels(device, memory, value_dim):
    query, key, value = Shape(2, 4, 2, 9, 9, 64, Dv=value_dim).make(device, memory=memory)
    real = OPS.fused(query, key, value, return_lse=True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = OPS.fused(*map(mode.from_tensor, (query, key, value)), return_lse=True)
    for kernel, shape in zip(real, fake, strict=True):
        assert kernel.shape == shape.shape and kernel.stride() == shape.stride()
        assert kernel.dtype == shape.dtype


def test_fakes_of_overlapping_queries(device):
    query = torch.randn(2, 4, 72, device=device).unfold(-1, 64, 1)
    real = OPS.fused(query, query, query)[0]
    with torch._subclasses.FakeTensorMode() as mode:
        fake = OPS.fused(*map(mode.from_tensor, (query, query, query)))[0]
    assert real.stride() == fake.stride() and real.stride(-1) == 1


@pytest.mark.parametrize("name", PATTERNS)
def test_backward_raises_one_sentence(device, name):
    op, (query, key, value), arguments = call_of(name, device)
    query.requires_grad_()
    out, lse = getattr(OPS, op)(query, key, value, **arguments, return_lse=True)
    assert out.requires_grad
    with pytest.raises(
        RuntimeError, match=f"^sparse_attn::{op}: expected inference.*backward"
    ) as e:
        out.sum().backward()
    assert "\n" not in str(e.value)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            again, _ = getattr(OPS, op)(query, key, value, **arguments)
        assert not again.requires_grad and torch.equal(again, out)


@pytest.mark.parametrize("name", PATTERNS)
def test_out_is_refused_in_grad_mode(device, name):
    op, (query, key, value), arguments = call_of(name, device)
    twin = getattr(OPS, f"{op}_out")
    out = torch.empty_like(query)
    value.requires_grad_()
    with pytest.raises(RuntimeError, match=f"^sparse_attn::{op}: .*got value that requires grad"):
        twin(query, key, value, **arguments, out=out)
    pattern = PATTERNS[name](Shape(1, 2, 1, 20, 37, 64), device)
    with pytest.raises(ValueError, match="expected out= under torch.no_grad"):
        sa.sparse_attention(query, key, value, pattern, out=out)
    with torch.no_grad():
        assert sa.sparse_attention(query, key, value, pattern, out=out) is out
    with torch.inference_mode():
        twin(query, key, value, **arguments, out=out)
    want = sa.sparse_attention(query, key, value.detach(), pattern)
    if not isinstance(pattern._region, sa.BlockSparse):  # a random layout
        assert torch.equal(out, want)


@pytest.mark.parametrize("way", ["function", "inference", "straight", "merge"])
def test_a_backward_that_saved_out_before_raises(device, way):
    query, key, value = Shape(1, 2, 1, 20, 37, 64).make(device)
    out, lse = torch.ones_like(query), torch.ones(1, 2, 20, device=device)
    saving = [tensor.clone().requires_grad_() * tensor for tensor in (out, lse)]
    with torch.inference_mode() if way == "inference" else torch.no_grad():
        if way in ("function", "inference"):
            sa.sparse_attention(query, key, value, sa.Band(3), out=out)
            saving.pop()
        elif way == "straight":
            OPS.band_out(query, key, value, out=out, lse=lse)
        else:
            OPS.merge_states_out(query, lse + 1, query, lse + 2, out=out, lse=lse)
    for product in saving:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_straight_calls_raise_runtime_errors(device):
    query, key, value = Shape(1, 2, 1, 20, 37, 64).make(device)
    with pytest.raises(RuntimeError, match=r"^sparse_attn::band: expected window's left side"):
        OPS.band(query, key, value, left=-1)
    with pytest.raises(RuntimeError, match=r"^sparse_attn::block_topk: expected selector mixed"):
        OPS.block_topk(query, key, value, budget_count=1, selector="best")
    long = torch.ones(1, dtype=torch.bool, device=device).expand(2**32 + 16)  # takes no memory
    with pytest.raises(RuntimeError, match="mask of up to 536870911 key blocks, got shape"):
        OPS.list_from_mask(long)


META = {
    "key": lambda q, k, v, m: sa.fused_attention(q, m(k), m(v)),
    "attn_mask": lambda q, k, v, m: sa.fused_attention(q, k, v, attn_mask=m(q[0, 0, :, :1])),
    "query_offset": lambda q, k, v, m: sa.fused_attention(
        q, k, v, query_offset=m(q[:, 0, 0, 0].int())
    ),
    "out": lambda q, k, v, m: sa.fused_attention(q, k, v, out=m(q)),
    "counts": lambda q, k, v, m: sa.block_sparse_attention(
        q, k, v, sa.BlockLayout.from_mask(m(q[:, :, :2, :3]).bool(), 16, 16)
    ),
    "lse_b": lambda q, k, v, m: sa.merge_states(q, q[..., 0], q, m(q[..., 0])),
}


@pytest.mark.parametrize("name", META)
def test_meta_tensors_beside_others_are_refused(device, name):
    tensors = Shape(1, 2, 1, 20, 37, 64).make(device)
    first = "out_a" if name == "lse_b" else "query"
    sentence = f"expected {name} on {first}'s device {tensors[0].device}, got meta$"
    with pytest.raises(ValueError, match=sentence):
        META[name](*tensors, lambda tensor: tensor.to("meta"))


def test_select_blocks_refuses_meta_keys(device):
    query, key, _ = Shape(1, 2, 1, 20, 37, 64).make(device)
    with pytest.raises(ValueError, match="expected key on query's device .*, got meta$"):
        sa.select_blocks(query, key.to("meta"), sa.BlockTopK(16, budget_blocks=1, local_blocks=1))


@pytest.mark.parametrize("name", PATTERNS)
def test_meta_tensors_alone_give_meta_outputs(name):
    op, tensors, arguments = call_of(name, "meta")
    out, lse = getattr(OPS, op)(*tensors, **arguments, return_lse=True)
    assert out.is_meta and out.shape == tensors[0].shape
    assert lse.is_meta and lse.shape == out.shape[:3]


def test_forward_mode_raises_one_sentence(device):
    query, key, value = Shape(1, 2, 1, 20, 37, 64).make(device)
    with pytest.raises(RuntimeError, match=r"^sparse_attn::fused: expected inference .*forward"):
        torch.func.jvp(lambda q: sa.fused_attention(q, key, value), (query,), (query,))
    tokens = torch.tensor([3], device=device)
    with pytest.raises(RuntimeError, match=r"^sparse_attn::band: expected inference .*forward"):
        torch.func.jacfwd(lambda v: sa.band_attention(query, key, v, 3, global_tokens=tokens))(
            value
        )
    want = sa.fused_attention(query, key, value)
    _, tangent = torch.func.jvp(
        lambda q: q * sa.fused_attention(query, key, value), (query,), (query,)
    )
    assert torch.equal(tangent, query * want)


@pytest.mark.parametrize("name", PATTERNS)
def test_straight_calls_refuse_forward_mode(device, name):
    op, (query, key, value), arguments = call_of(name, device)
    out, twin = torch.empty_like(query), getattr(OPS, f"{op}_out")
    sentence = rf"^sparse_attn::{op}: expected inference \(no dual tensors\), got forward-mode"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(RuntimeError, match=sentence):
            getattr(OPS, op)(query, key, dual, **arguments)
        with pytest.raises(RuntimeError, match=sentence):
            twin(query, key, dual, **arguments, out=out)
        getattr(OPS, op)(query, key, value, **arguments)  # no dual among its inputs


@pytest.mark.parametrize("transform", ["grad", "vjp", "hessian"])
def test_gradients_of_torch_func_raise_one_sentence(device, transform):
    query, key, value = Shape(1, 2, 1, 20, 37, 64).make(device)
    call = {
        "grad": lambda function: torch.func.grad(function)(query),
        "vjp": lambda function: torch.func.vjp(function, query),
        "hessian": lambda function: torch.func.hessian(function)(query),
    }[transform]
    with pytest.raises(RuntimeError, match=r"^sparse_attn::fused: expected inference .*differ"):
        call(lambda q: sa.fused_attention(q, key, value).sum())


def test_vmap(device):
    query, key, value = Shape(3, 2, 1, 20, 37, 64).make(device)
    got = torch.vmap(lambda *t: sa.band_attention(*(x[None] for x in t), 5)[0])(query, key, value)
    assert torch.equal(got, sa.band_attention(query, key, value, 5))


def test_vmap_of_nothing_says_so(device):
    query = torch.randn(0, 1, 2, 9, 16, device=device)
    sentence = r"^sparse_attn::band: not served: none of its calls \(a dimension of size 0\) under"
    with pytest.raises(NotImplementedError, match=sentence):
        torch.vmap(lambda q: sa.band_attention(q, q, q, 2))(query)


def test_vmap_makes_no_calls_that_write(device):
    """torch runs an op for each entry where it returns what it computes."""
    query, new = torch.zeros(3, 1, 2, 9, 16, device=device), torch.zeros(3, 4, 2, 16, device=device)
    slots = torch.zeros(4, dtype=torch.int64, device=device)
    cache = torch.zeros(3, 2, 16, 2, 16, device=device)

    def append(key, cache):
        sa.append_to_cache(key, key, cache, cache.clone(), slots)
        return key

    calls = {
        "band_out": lambda: torch.vmap(lambda q: sa.band_attention(q, q, q, 2, out=q * 1))(query),
        "append_to_cache": lambda: torch.vmap(append)(new, cache),
        "append_to_sketch": lambda: torch.vmap(lambda q: sa.KeySketch(q).codes)(query),
    }
    answers = []
    torch.vmap(lambda q: answers.append(sa.can_use(q, q, q, sa.Band(2))) or q)(query)
    sentence = "sparse_attn::band: not served: to ask for the engine under torch.vmap"
    assert [answer.reasons for answer in answers] == [(sentence,)]
    for op, call in calls.items():
        sentence = rf"^sparse_attn::{op}: not served: to write under torch\.vmap$"
        with pytest.raises(NotImplementedError, match=sentence):
            call()


@pytest.mark.parametrize("position", [2**31, 2**32, 2**32 + 3, 3 - 2**32, -1, 100])
def test_global_tokens_beyond_the_keys_are_none(device, position):
    query, key, value = Shape(1, 2, 1, 20, 37, 64).make(device)
    tokens = torch.tensor([position, 30, 30], device=device)
    got = sa.band_attention(query, key, value, 2, global_tokens=tokens)
    want = sa.band_attention(query, key, value, 2, global_tokens=tokens[1:])
    assert torch.equal(got, want)


BAND = sa.Band(3)
#: Functions of the package that a call on its plain way enters: the host's part of a short call.
ENTERED = {
    "fused": (8, lambda *t: sa.fused_attention(*t, is_causal=True)),
    "band": (16, lambda *t: sa.band_attention(*t, (4, 0))),
    "pattern": (13, lambda *t: sa.sparse_attention(*t, BAND, is_causal=True)),
    "out": (10, lambda *t: sa.fused_attention(*t, out=torch.empty_like(t[0]))),
}


@pytest.mark.parametrize("most, call", ENTERED.values(), ids=ENTERED)
def test_a_call_enters_few_functions(device, most, call):
    tensors = Shape(1, 2, 1, 20, 37, 64).make(device)
    entered = []

    def note(frame, event, argument):
        if event == "call" and "sparse_attn" in frame.f_globals["__name__"]:
            entered.append(frame.f_code.co_name)

    with torch.no_grad():
        call(*tensors)
        sys.setprofile(note)
        try:
            call(*tensors)
        finally:
            sys.setprofile(None)
    assert len(entered) <= most, entered

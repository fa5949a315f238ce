"""can_use: the engine that really serves a call, or the sentence that the call would raise."""

import pytest
import torch
from reference import DTYPES, PATTERNS, Shape

import sparse_attn as sa
from sparse_attn.capability import ENGINES, _of_all

SHAPE = Shape(1, 2, 1, 34, 67, 64)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_answer_is_what_a_forced_call_shows(device, name, dtype):
    query, key, value = SHAPE.make(device, dtype)
    pattern = PATTERNS[name](SHAPE, device)
    answer = sa.can_use(query, key, value, pattern)
    assert answer and isinstance(answer.reasons, tuple)
    assert answer.engine in ENGINES[device]
    auto = sa.sparse_attention(query, key, value, pattern)
    forced = sa.sparse_attention(query, key, value, pattern, engine=answer.engine)
    assert torch.equal(auto, forced)
    faster = ENGINES[device][: ENGINES[device].index(answer.engine)]
    assert len(answer.reasons) == len(faster)
    for engine, reason in zip(faster, answer.reasons, strict=True):
        forced = sa.can_use(query, key, value, pattern, engine=engine)
        assert reason.startswith(engine)
        if reason.startswith(f"{engine} leaves"):  # it serves the call, but slower
            assert forced
            continue
        assert not forced and reason in forced.reasons
        with pytest.raises(NotImplementedError, match="not served"):
            sa.sparse_attention(query, key, value, pattern, engine=engine)


def test_the_engines_in_python_are_those_of_the_library(device):
    query, key, value = SHAPE.make(device)
    (sentence,) = sa.can_use(query, key, value, engine="fastest").reasons
    names = ", ".join(("auto", *ENGINES[device]))
    where = "the CPU" if device == "cpu" else "CUDA"
    assert sentence.endswith(f"expected engine to be one of {names} on {where}, got fastest")


def test_a_refused_argument_is_a_reason(device):
    """As a call would say it; only an argument of a wrong kind raises."""
    tensors = SHAPE.make(device)
    answer = sa.can_use(*tensors, dropout_p=0.1)
    assert not answer and "dropout_p of 0 (inference only), got 0.1" in answer.reasons[0]
    with pytest.raises(TypeError, match="can_use: expected dropout_p to be a float, got str"):
        sa.can_use(*tensors, dropout_p="0.1")


def test_of_the_engines_of_several_patterns_the_slowest_is_named(device):
    *faster, slowest = (sa.Capability(name, (name,), served=True) for name in ENGINES[device])
    for answers in ([*faster, slowest], [slowest, *faster]):
        joined = _of_all(answers)
        assert joined.engine == slowest.engine
        assert joined.reasons == tuple(answer.engine for answer in answers)


def test_what_patterns_of_heads_and_choices_refuse_is_a_reason(device):
    query, key, value = SHAPE.make(device, torch.bfloat16)
    absent = sa.can_use(query, key, value, sa.ByHead({5: sa.Full()}))
    assert not absent and "the call's 1 key heads, got one for head 5" in absent.reasons[0]
    pattern = sa.TopK(3, inside=sa.BlockTopK(16, selector="sketch"))
    answer = sa.can_use(query, key, value, pattern)
    with pytest.raises(ValueError, match="up to 16 queries with selector sketch"):
        sa.sparse_attention(query, key, value, pattern)
    assert not answer and "up to 16 queries with selector sketch" in answer.reasons[0]


def test_the_answer_names_the_limit(device):
    if device == "cpu":
        pytest.skip("needs a CUDA device: every CPU engine serves every case")
    query, key, value = SHAPE.make(device, torch.bfloat16)
    tokens = torch.tensor([3, 40], dtype=torch.int32, device=device)
    answer = sa.can_use(query, key, value, sa.Band(9, global_tokens=tokens), engine="decode")
    assert not answer and "global_tokens given as indices" in answer.reasons[0]
    for refused, common in {
        "multiples of 16 bytes": dict(out=torch.empty(34 * 64 * 2 + 1, device=device).bfloat16()),
    }.items():
        if "out" in common:
            common["out"] = common["out"][1:].view(1, 2, 34, 64)
        answer = sa.can_use(query, key, value, engine="hopper", **common)
        assert not answer and refused in answer.reasons[0]
    for pattern in (sa.BlockTopK(32), PATTERNS["blocks"](SHAPE, device)):
        answer = sa.can_use(query, key, value, pattern, engine="hopper")
        assert not answer and "query blocks" in answer.reasons[0]


def test_engine_by_name(device):
    tensors = SHAPE.make(device)
    assert sa.can_use(*tensors, engine="naive").engine == "naive"
    answer = sa.can_use(*tensors, engine="hopper" if device == "cpu" else "tiled")
    assert not answer and answer.engine is None and "engine" in answer.reasons[0]


def strided(tensor):
    """The same shape with gaps in the last dimension."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


WRONG = {
    "rank": lambda q, k, v: ((q[0], k, v), {}),
    "dtype": lambda q, k, v: ((q.double(), k, v), {}),
    "head-dim": lambda q, k, v: ((q[..., :12], k[..., :12], v[..., :12]), {}),
    "query-strides": lambda q, k, v: ((strided(q), k, v), {}),
    "key-strides": lambda q, k, v: ((q, strided(k), v), {}),
    "key-batch": lambda q, k, v: ((q, k.repeat(2, 1, 1, 1), v), {}),
    "mask": lambda q, k, v: ((q, k, v), {"attn_mask": q.new_ones(3, 3).bool()}),
    "offset-strides": lambda q, k, v: (
        [t.repeat(2, 1, 1, 1) for t in (q, k, v)],
        {"query_offset": torch.zeros(4, dtype=torch.int32, device=q.device)[::2]},
    ),
    "scale": lambda q, k, v: ((q, k, v), {"scale": float("nan")}),
    "engine": lambda q, k, v: ((q, k, v), {"engine": "fastest"}),
    "out": lambda q, k, v: ((q, k, v), {"out": q.half()}),
    "out-is-query": lambda q, k, v: ((q, k, v), {"out": q}),
    "out-overlaps": lambda q, k, v: ((q, k, v), {"out": torch.empty_like(q[:, :1]).expand_as(q)}),
    "out-strides": lambda q, k, v: ((q, k, v), {"out": strided(q)}),
    "out-grad": lambda q, k, v: ((q, k.requires_grad_(), v), {"out": torch.empty_like(q)}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
def test_wrong_calls_are_refused_with_their_sentence(device, wrong, return_lse):
    tensors, common = wrong(*SHAPE.make(device))
    answer = sa.can_use(*tensors, sa.Band(3), return_lse=return_lse, **common)
    with pytest.raises(ValueError, match="expected") as caught:
        sa.sparse_attention(*tensors, sa.Band(3), return_lse=return_lse, **common)
    assert not answer and answer.engine is None and answer.reasons == (str(caught.value),)


def test_tensors_without_data_are_refused():
    answer = sa.can_use(*torch.empty(3, 1, 2, 8, 16, device="meta"))
    assert not answer and "not served: meta tensors have no data" in answer.reasons[0]


def test_inputs_that_require_grad_are_served(device):
    query, key, value = SHAPE.make(device)
    assert sa.can_use(query.requires_grad_(), key, value)
    with torch.no_grad():
        assert sa.can_use(query, key, value, out=torch.empty_like(query))


def test_nothing_is_computed_and_all_arguments_count(device):
    query, key, value = SHAPE.make(device)
    out = torch.full_like(query, 7.0)
    answer = sa.can_use(
        query,
        key,
        value,
        PATTERNS["blocks-of-heads"](SHAPE, device),
        attn_mask=torch.ones(1, 1, 34, 67, device=device).bool(),
        key_bounds=torch.zeros(1, 1, 34, 2, dtype=torch.int32, device=device),
        query_offset=torch.zeros(1, dtype=torch.int32, device=device),
        sink_logits=torch.zeros(2, device=device),
        is_causal=True,
        return_lse=True,
        out=out,
    )
    assert answer and (out == 7.0).all()


def test_wrong_kinds_raise(device):
    query, key, value = SHAPE.make(device)
    with pytest.raises(TypeError, match="query to be a tensor, got list"):
        sa.can_use([1], key, value)
    with pytest.raises(TypeError, match="pattern to be a pattern"):
        sa.can_use(query, key, value, "band")
    with pytest.raises(TypeError, match="unexpected keyword argument 'fast'"):
        sa.can_use(query, key, value, fast=True)


@pytest.mark.parametrize(
    "common",
    [{}, {"softcap": 20.0}, {"scale": -0.25}, {"scale": 2000.0}, {"key_bounds": True}],
    ids=["plain", "softcap", "negative-scale", "large-scale", "bounds"],
)
def test_the_answer_for_top_k_is_what_runs(device, common):
    query, key, value = SHAPE.make(device, torch.bfloat16)
    if "key_bounds" in common:
        common = {
            "key_bounds": torch.tensor([3, 60], dtype=torch.int32).to(device).expand(1, 1, 34, 2)
        }
    answer = sa.can_use(query, key, value, sa.TopK(9), **common)
    auto = sa.topk_attention(query, key, value, 9, **common)
    assert torch.equal(
        auto, sa.topk_attention(query, key, value, 9, engine=answer.engine, **common)
    )
    in_front = ENGINES[device][: ENGINES[device].index(answer.engine)]
    for engine, reason in zip(in_front, answer.reasons, strict=False):
        if reason.startswith(f"{engine} leaves"):  # it serves the call by name
            by_name = sa.topk_attention(query, key, value, 9, engine=engine, **common)
            torch.testing.assert_close(by_name, auto, atol=2e-2, rtol=2e-2)
            continue
        with pytest.raises(NotImplementedError, match="not served"):
            sa.topk_attention(query, key, value, 9, engine=engine, **common)


def test_notebooks_show_the_answer(device):
    query, key, value = torch.randn(3, 1, 2, 64, 16, device=device).unbind(0)
    answer = sa.can_use(query, key, value, sa.Band(8), engine="naive")
    assert answer._repr_html_().startswith("<b>served by naive</b>")
    refused = sa.can_use(query, key[..., :8], value, sa.Band(8))._repr_html_()
    assert refused.startswith("<b>not served</b><ul><li>sparse_attn::band: expected ")
    assert (
        sa.Capability("naive", ("a < b",), served=True)
        ._repr_html_()
        .endswith("<ul><li>a &lt; b</li></ul>")
    )


def test_what_torch_refuses_is_said_in_the_words_of_the_call(device):
    """The question goes to an op of its own, which no sentence names."""
    query, key, value = torch.randn(3, 1, 2, 16, 16, device=device)
    calls = {
        "meta": ((query, key, value.to("meta")), {}),
        "meta-sinks": ((query, key, value), {"sink_logits": torch.zeros(2, device="meta")}),
        "sparse": ((query, key.to_sparse(), value), {}),
        "negated": ((query, key, value), {"out": torch._neg_view(torch.empty_like(query))}),
    }
    for tensors, common in calls.values():
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            sa.sparse_attention(*tensors, sa.Band(3), **common)
        assert sa.can_use(*tensors, sa.Band(3), **common).reasons == (str(raised.value),)

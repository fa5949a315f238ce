"""can_use: the engine that really serves a call, or the sentence that the call would raise."""

import pytest
import torch
from conftest import ENGINES
from reference import DTYPES, PATTERNS, Shape

import sparse_attn as sa

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
        refused = sa.can_use(query, key, value, pattern, engine=engine)
        assert not refused and reason.startswith(engine) and reason in refused.reasons
        with pytest.raises(NotImplementedError, match="not served"):
            sa.sparse_attention(query, key, value, pattern, engine=engine)


def test_the_table_is_asked_about_the_whole_case(device, monkeypatch):
    asked = {}

    def choose_engine(requested, **case):
        asked.update(case, requested=requested)
        return None, ["nothing serves it"]

    monkeypatch.setattr("sparse_attn._info.choose_engine", choose_engine)
    query, key, value = SHAPE.make(device, torch.bfloat16, memory="gaps")
    answer = sa.can_use(query, key, value, sa.BlockTopK(32), engine="naive")
    assert not answer and answer.engine is None and answer.reasons == ("nothing serves it",)
    assert asked["requested"] == "naive" and asked["cuda"] == (device == "cuda")
    assert asked["dtype"] == "bfloat16" and asked["head_dim"] == 64 and not asked["aligned"]
    assert asked["block_q"] == asked["block_kv"] == 32 and not asked["topk"]
    mask = torch.ones(67, device=device, dtype=torch.bool)
    sa.can_use(*SHAPE.make(device), PATTERNS["band-scattered"](SHAPE, device), attn_mask=mask)
    assert asked["aligned"] and asked["dense_mask"] and asked["scattered_globals"]
    sa.can_use(*SHAPE.make(device), PATTERNS["topk"](SHAPE, device))
    assert asked["topk"] and not asked["dense_mask"] and asked["block_q"] == 0
    sa.can_use(*SHAPE.make(device), PATTERNS["blocks"](SHAPE, device))
    assert (asked["block_q"], asked["block_kv"]) == (16, 32) and not asked["scattered_globals"]


def test_engine_by_name(device):
    tensors = SHAPE.make(device)
    assert sa.can_use(*tensors, engine="naive").engine == "naive"
    answer = sa.can_use(*tensors, engine="hopper" if device == "cpu" else "tiled")
    assert not answer and answer.engine is None and "engine" in answer.reasons[0]


WRONG = {
    "rank": lambda q, k, v: sa.can_use(q[0], k, v),
    "dtype": lambda q, k, v: sa.can_use(q.double(), k, v),
    "head-dim": lambda q, k, v: sa.can_use(q[..., :12], k[..., :12], v[..., :12]),
    "mask": lambda q, k, v: sa.can_use(q, k, v, attn_mask=torch.ones(3, 3, device=q.device).bool()),
    "scale": lambda q, k, v: sa.can_use(q, k, v, sa.Band(3), scale=float("nan")),
    "out": lambda q, k, v: sa.can_use(q, k, v, sa.Band(3), out=q.half()),
}


@pytest.mark.parametrize("ask", WRONG.values(), ids=WRONG)
def test_wrong_calls_are_refused_with_their_sentence(device, ask):
    answer = ask(*SHAPE.make(device))
    assert not answer and answer.engine is None
    assert answer.reasons[0].startswith("sparse_attn::") and ": expected " in answer.reasons[0]


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


def test_without_the_table(device, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sparse_attn._info", None)
    monkeypatch.delattr(sa, "_info", raising=False)
    answer = sa.can_use(*SHAPE.make(device), sa.Band(3))
    assert answer and answer.engine is None and "table is missing" in answer.reasons[0]

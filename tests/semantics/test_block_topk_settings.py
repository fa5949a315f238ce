"""The settings of block selection: what they say, their defaults, and what is refused."""

import dataclasses
import inspect
import pickle

import pytest
import torch
from reference import Shape

import sparse_attn as sa


def test_defaults_say_what_they_do():
    settings = "mass=0.9, selector='mixed', groups=8, row_step=16, sink_blocks=1, local_blocks=4"
    assert repr(sa.BlockTopK()) == f"BlockTopK((128, 64), {settings})"
    assert "groups=16, row_step=16, sink_blocks=1, local_blocks=2)" in repr(sa.BlockTopK(128))
    wide = sa.BlockTopK((64, 32))
    assert eval(repr(wide), {"BlockTopK": sa.BlockTopK}) == wide
    with pytest.raises(ValueError, match="mass, budget_blocks or budget_share, got none of them"):
        sa.BlockTopK(mass=None)
    scores = torch.zeros(1, 2, 3, 4)
    assert "selector=<scores (1, 2, 3, 4)>" in repr(sa.BlockTopK(selector=scores))
    own, same = sa.BlockTopK(selector=scores), sa.BlockTopK(selector=scores.clone())
    assert own == same and hash(own) == hash(same)
    assert own != sa.BlockTopK() and own != sa.BlockTopK(selector=scores + 1)


def test_a_mass_that_is_given_is_kept_beside_a_budget_in_keys():
    given, default = sa.BlockTopK(16, 0.9, budget_tokens=64), sa.BlockTopK(16, budget_tokens=64)
    assert given.mass == 0.9 and default.mass is None and sa.BlockTopK(16).mass == 0.9
    assert given != default and sa.BlockTopK(16) == sa.BlockTopK(16, 0.9)
    for pattern in (given, default, sa.BlockTopK(16)):
        again = [pickle.loads(pickle.dumps(pattern)), dataclasses.replace(pattern)]
        again.append(eval(repr(pattern), {"BlockTopK": sa.BlockTopK}))
        assert all(p == pattern and hash(p) == hash(pattern) for p in again)
    assert dataclasses.replace(sa.BlockTopK(16), budget_tokens=64) == given
    mass = inspect.signature(sa.block_topk_attention).parameters["mass"]
    assert str(mass) == "mass: 'float | None' = 0.9"


def test_functions_keep_a_mass_beside_a_budget_in_keys(device):
    query, key, value = Shape(1, 2, 1, 64, 256, 16).make(device)
    sizes = {"block_size": 16, "budget_tokens": 240, "local_blocks": 0}
    for given in ({}, {"mass": 0.9}):
        lists = sa.select_blocks(query, key, sa.BlockTopK(**sizes, **given))
        assert bool((lists.counts == 15).all()) == (not given)
        want = sa.block_sparse_attention(query, key, value, lists)
        got = sa.block_topk_attention(query, key, value, **sizes, **given)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("given", [{}, {"mass": 0.9}], ids=["default", "given"])
def test_compilers_know_the_default_mass(given):
    tensors = Shape(1, 2, 1, 64, 256, 16).make("cpu")
    settings = {"block_size": 16, "budget_tokens": 240, "local_blocks": 0, **given}

    def attend(*tensors):
        pattern = sa.BlockTopK(**settings)
        return sa.sparse_attention(*tensors, pattern), sa.block_topk_attention(*tensors, **settings)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*tensors), attend(*tensors)))


def test_numbers_of_numpy_become_those_of_python():
    numpy = pytest.importorskip("numpy")
    whole = {"sink_blocks": 2, "local_blocks": 3, "groups": 2, "row_step": 8, "stride": 8}
    whole |= {"block_size": 32, "budget_blocks": 5}
    given = {name: numpy.int64(number) for name, number in whole.items()}
    want = sa.BlockTopK(mass=0.5, **whole)
    got = sa.BlockTopK(mass=numpy.float32(0.5), **given)
    assert repr(got) == repr(want) and got.stride.__class__ is int
    sizes = (numpy.int64(32), numpy.int32(16))
    for fields in ({"budget_tokens": 64}, {"budget_share": 0.25, "mass": None}):
        want = sa.BlockTopK((32, 16), **fields)
        fields = {n: None if v is None else numpy.array(v)[()] for n, v in fields.items()}
        assert repr(sa.BlockTopK(sizes, **fields)) == repr(want)


REFUSED = {
    "scores-shape": (
        {"selector": torch.zeros(1, 2, 2, 3)},
        r"scores of shape \(1, 1 or 2, 2, 2\), got shape \(1, 2, 2, 3\)",
    ),
    "scores-rank": (
        {"selector": torch.zeros(2, 2)},
        r"scores of shape \(1, 1 or 2, 2, 2\), got shape \(2, 2\)",
    ),
    "scores-kind": (
        {"selector": torch.zeros(1, 2, 2, 2).int()},
        "scores of dtype float32, float16 or bfloat16, got int32",
    ),
}


@pytest.mark.parametrize("change, words", REFUSED.values(), ids=REFUSED)
def test_scores_that_do_not_fit_are_refused(device, change, words):
    query, key, value = Shape(1, 2, 1, 32, 32, 16).make(device)
    change = {name: value.to(device) for name, value in change.items()}
    with pytest.raises(ValueError, match=f"^sparse_attn::block_topk: expected {words}$"):
        sa.block_topk_attention(query, key, value, block_size=16, **change)


OP_REFUSALS = {
    "mass": ({"mass": 1.5}, "mass above 0 and up to 1, got 1.5"),
    "mass-zero": ({"mass": 0.0}, "mass above 0 and up to 1, got 0.0"),
    "mass-nan": ({"mass": float("nan")}, "mass above 0 and up to 1, got nan"),
    "count": ({"budget_count": 0}, "budget_blocks of at least 1, got 0"),
    "share": ({"budget_share": 0.0}, "budget_share above 0 and up to 1, got 0.0"),
    "none": ({}, "mass, budget_blocks or budget_share, got none"),
    "both": ({"budget_count": 1, "budget_share": 0.5}, "budget_blocks or budget_share, got both"),
    "groups": ({"mass": 0.5, "groups": 5}, "groups that divides blocks of 16, got 5"),
    "row-step": ({"mass": 0.5, "row_step": 0}, "row_step of at least 1, got 0"),
    "stride": (
        {"mass": 0.5, "selector": "antidiagonal", "stride": 4},
        "stride of 8 or 16, got 4",
    ),
    "block-rows": ({"mass": 0.5, "block_rows": 24}, "block_size that is a multiple of 16, got 24"),
}


@pytest.mark.parametrize("change, words", OP_REFUSALS.values(), ids=OP_REFUSALS)
def test_what_the_op_refuses(device, change, words):
    query, key, _ = Shape(1, 2, 1, 32, 32, 16).make(device)
    with pytest.raises(RuntimeError, match=f"sparse_attn::select_blocks: expected {words}"):
        torch.ops.sparse_attn.select_blocks(query, key, block_size=16, **change)


@pytest.mark.parametrize("op", ["block_topk", "select_blocks"])
def test_ops_have_the_defaults_of_the_pattern(op):
    schema = getattr(torch.ops.sparse_attn, op).default._schema
    said = {argument.name: argument.default_value for argument in schema.arguments}
    for name in ("selector", "group", "groups", "sink_blocks", "row_step"):
        assert said[name] == getattr(sa.BlockTopK(), name)
    assert said["block_size"] == sa.BlockTopK()._blocks[1]  # its rows are as many unless given

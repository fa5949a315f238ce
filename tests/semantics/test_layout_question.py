"""Tensors (B, S, H, D) of grouped-query heads pass as (B, H, S, D) with more queries than keys, of
which the first see nothing: one warning asks."""

import warnings

import pytest
import torch
from reference import Shape

import sparse_attn as sa
from sparse_attn import _warn


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.setattr(_warn, "_given", set())


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


EMPTY = {
    "causal": lambda *t: sa.fused_attention(*t, is_causal=True),
    "sinks": lambda *t: sa.band_attention(*t, 5, sinks=1, is_causal=True),
    "band": lambda *t: sa.band_attention(*t, (9, 5)),
    "dilated": lambda *t: sa.dilated_attention(*t, (9, 2), 2),
    "strided": lambda *t: sa.strided_attention(*t, 8, 8),
    "naive": lambda *t: sa.naive_attention(*t, sa.Band((3, 0))),
    "out": lambda *t: sa.fused_attention(*t, is_causal=True, out=torch.empty_like(t[0])),
}


@pytest.mark.parametrize("call", EMPTY.values(), ids=EMPTY)
def test_rows_without_keys_ask_once(device, call):
    tensors = Shape(1, 40, 40, 8, 2, 16).make(device)  # 8 and 2 heads of 40 tokens
    zero = call(*tensors)[0, 0, 0]
    assert not zero.any()
    _warn._given.clear()
    (sentence,) = warned(lambda: call(*tensors))
    assert "of 8 queries see none of 2 keys" in sentence and "(B, S, H, D)" in sentence
    assert sentence.startswith("sparse_attn.") and "\n" not in sentence
    assert not warned(lambda: call(*tensors))


def test_a_script_is_asked_too(device):
    """The frame of a script that Python was started with belongs to no package."""
    tensors = Shape(1, 40, 40, 8, 2, 16).make(device)
    script = compile("sa.fused_attention(*tensors, is_causal=True)", "script.py", "exec")
    known = {"__name__": "__main__", "__package__": None, "sa": sa, "tensors": tensors}
    with pytest.warns(UserWarning, match="queries see none") as caught:
        exec(script, known)
    assert caught[0].filename == "script.py"


SEEN = {
    "cross": lambda q, k, v: sa.fused_attention(q, k, v),
    "sinks": lambda q, k, v: sa.band_attention(q, k, v, (3, 0), sinks=1),
    "globals": lambda q, k, v: sa.band_attention(q, k, v, (3, 0), global_tokens=1),
    "reach": lambda q, k, v: sa.band_attention(q, k, v, (0, 6)),
    "taps": lambda q, k, v: sa.dilated_attention(q, k, v, (0, 3), 2),
    "offset": lambda q, k, v: sa.fused_attention(q, k, v, is_causal=True, query_offset=0),
    "fewer": lambda q, k, v: sa.fused_attention(q[:, :, :2], k, v, is_causal=True),
    "none": lambda q, k, v: sa.fused_attention(q, k[:, :, :0], v[:, :, :0], is_causal=True),
    "own": lambda q, k, v: sa.naive_attention(q, k, v, OwnBand((3, 0))),
}


class OwnBand(sa.Band):
    def allows(self, row, position, key):
        return super().allows(row, position, key) | (key == 0)


@pytest.mark.parametrize("call", SEEN.values(), ids=SEEN)
def test_nothing_is_asked_where_rows_see_keys(device, call):
    tensors = Shape(1, 40, 40, 8, 2, 16).make(device)
    assert not warned(lambda: call(*tensors))


def test_each_function_asks_for_itself(device):
    tensors = Shape(1, 40, 40, 8, 2, 16).make(device)
    assert len(warned(lambda: sa.fused_attention(*tensors, is_causal=True))) == 1
    assert len(warned(lambda: sa.band_attention(*tensors, (9, 0)))) == 1


def test_compiled_calls_ask_nothing_and_stay_whole(device):
    tensors = Shape(1, 40, 40, 8, 2, 16).make(device)
    compiled = torch.compile(
        lambda *t: sa.fused_attention(*t, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    assert not warned(lambda: compiled(*tensors))
    assert torch.equal(compiled(*tensors), sa.fused_attention(*tensors, is_causal=True))

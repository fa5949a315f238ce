"""Every attention function takes SDPA's arguments by name, spelled out with types and words."""

import inspect
import sys
import typing

import pytest
import torch
from reference import Shape

import sparse_attn as sa
from scripts.write_functions import COMMON, SDPA, expanded, files
from sparse_attn import _common

LAYOUT = sa.BlockLayout.local(65, 65, 16, 32, 1)
#: What a function takes beside the common arguments.
OWN = {
    "fused_attention": {},
    "naive_attention": {"pattern": sa.Band(9)},
    "band_attention": {"window": 9},
    "dilated_attention": {"window": 9, "dilation": 2},
    "strided_attention": {"local": 9, "stride": 4},
    "block_sparse_attention": {"layout": LAYOUT},
    "topk_attention": {"k": 9},
    "block_topk_attention": {"block_size": 16, "budget_blocks": 3},
    "sparse_attention": {"pattern": sa.Band(9)},
}
FUNCTIONS = [pytest.param(getattr(sa, name), own, id=name) for name, own in OWN.items()]


def test_the_files_are_what_the_script_writes():
    written = files()
    assert len(written) >= len(OWN)
    for path, text in written.items():
        assert path.read_text() == text, f"{path.name}: run python -m scripts.write_functions"


def test_one_table_of_arguments():
    rows = [row.name for row in (*SDPA, *COMMON)]
    assert rows == list(_common.Common.__annotations__) == list(_common._RULES)
    assert all(row.words.startswith(f"{row.name} : ") for row in (*SDPA, *COMMON))


def test_a_template_without_common_arguments_stays_as_it_is():
    text = "def f(\n    a: int,\n) -> int:\n    return a\n"
    assert expanded(text) == text


def test_bounds_say_that_packed_documents_have_one_origin():
    doc = inspect.getdoc(sa.band_attention)
    words = " ".join(doc.partition("\nkey_bounds :")[2].partition("\nquery_offset :")[0].split())
    assert "one origin" in words and "`varlen_attention`" in words


def test_calls_of_sequences_tell_their_own_shapes():
    packed, paged = map(inspect.getdoc, (sa.varlen_attention, sa.paged_attention))
    assert "Sq, Dv)" not in packed and "Hq, Sq)" not in packed
    for doc in (packed, paged):
        outcome = doc.partition("Returns")[2]
        assert "(T, Hq, Dv)" in outcome and "(Hq, T)" in doc
        assert "attn_mask, key_bounds : None" in doc and doc.count("attn_mask") == 1


def test_varlen_attention_is_called_as_varlen_attn():
    """Its help tells what each argument of torch's is here that has another name."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    theirs = inspect.signature(varlen.varlen_attn).parameters
    ours = inspect.signature(sa.varlen_attention).parameters
    positional = [name for name, given in ours.items() if given.default is given.empty]
    assert list(theirs)[: len(positional)] == positional
    notes = inspect.getdoc(sa.varlen_attention).partition("Notes")[2]
    others = ("window_size", "return_aux", "block_table", "num_splits")
    assert all(f"`{name}`" in notes for name in others)


@pytest.mark.parametrize("function, own", FUNCTIONS)
def test_signatures_are_complete(function, own):
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    sdpa = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    for name in ("query", "key", "value", *own, *sdpa, "key_bounds", "return_lse", "engine"):
        assert name in parameters and parameters[name].annotation is not inspect.Parameter.empty
    assert all(f"\n{name}" in inspect.getdoc(function) for name in sdpa)


def test_fused_attention_has_the_arguments_of_sdpa_in_its_order():
    names = list(inspect.signature(sa.fused_attention).parameters)
    sdpa = ["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert names[:8] == ["query", "key", "value", *sdpa]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="overloads are kept from 3.11 on")
@pytest.mark.parametrize("function, own", FUNCTIONS)
def test_overloads_by_return_lse(function, own):
    overloads = typing.get_overloads(inspect.unwrap(function))
    results = [typing.get_type_hints(overload)["return"] for overload in overloads]
    pair, several = tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]
    with_indices = [several, torch.Tensor | several] if function is sa.topk_attention else []
    assert results == [torch.Tensor, pair, torch.Tensor | pair, *with_indices]
    names = list(inspect.signature(function).parameters)
    assert all(list(inspect.signature(overload).parameters) == names for overload in overloads)


@pytest.mark.parametrize("function, own", FUNCTIONS)
def test_each_swaps_in_for_sdpa_by_name(device, function, own):
    query, key, value = Shape(1, 4, 2, 65, 65, 16).make(device)
    if "layout" in own:
        own = {"layout": LAYOUT.to(device)}
    mask = torch.rand(65, 65, device=device) < 0.8
    calls = {"attn_mask": mask, "is_causal": True, "scale": 0.2}
    out = function(query, key, value, **own, **calls, dropout_p=0.0, enable_gqa=True)
    assert torch.equal(out, function(query, key, value, **own, **calls))
    plain = function(query, key, value, **own)
    given = function(query, key, value, **own, attn_mask=None, dropout_p=0.0, scale=None)
    assert torch.equal(plain, given)


WRONG = {
    "dropout": ({"dropout_p": 0.1}, ValueError, r"dropout_p of 0 \(inference only\), got 0.1"),
    "dropout-kind": ({"dropout_p": None}, TypeError, "dropout_p to be a float, got NoneType"),
    "gqa": ({"enable_gqa": 1}, TypeError, "enable_gqa to be a bool, got int"),
}


@pytest.mark.parametrize("wrong, kind, sentence", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("function, own", FUNCTIONS)
def test_wrong_arguments_of_sdpa(function, own, wrong, kind, sentence):
    tensors = Shape(1, 4, 2, 65, 65, 16).make("cpu")
    with pytest.raises(kind, match=f"^sparse_attn.{function.__name__}: expected {sentence}"):
        function(*tensors, **own, **wrong)

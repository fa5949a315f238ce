"""What `ByHead` refuses: calls whose tensors differ in their heads, in the words of the call."""

import pytest
import torch
from reference import Shape

import sparse_attn as sa

SHAPE = Shape(B=2, Hq=8, Hkv=4, Sq=20, Skv=20, D=16)
#: Heads 0 and 1 are a run, and so are 2 and 3: each takes two key heads, four query heads.
PATTERN = sa.ByHead({0: sa.Full(), 1: sa.Full()}, rest=sa.Band(3))
FUNCTIONS = [sa.sparse_attention, sa.naive_attention]

#: Tensors that fit a run, or almost, and not the call: an argument, its shape, what is expected.
#: A shape is of `value` and `key` too; others are of keywords.
WRONG = {
    "values-of-more-heads": ("value", (2, 5, 20, 16), "value of shape (2, 4, 20, 16)"),
    "values-of-fewer-heads": ("value", (2, 2, 20, 16), "value of shape (2, 4, 20, 16)"),
    "values-of-one-head": ("value", (2, 1, 20, 16), "value of shape (2, 4, 20, 16)"),
    "values-of-no-head": ("value", (2, 0, 20, 16), "value of shape (2, 4, 20, 16)"),
    "values-of-less-length": ("value", (2, 4, 19, 16), "value of shape (2, 4, 20, 16)"),
    "keys-of-more-heads": ("key", (2, 8, 20, 16), "value of shape (2, 8, 20, 16)"),
    "sinks-of-a-run": ("sink_logits", (4,), "sink_logits of shape (8)"),
    "sinks-of-entries": ("sink_logits", (1, 8), "sink_logits of shape (8)"),
    "sink-of-all": ("sink_logits", (), "sink_logits of shape (8)"),
    "slopes-of-a-run": ("alibi_slopes", (2, 4), "alibi_slopes of shape (8) or (2, 8)"),
    "slopes-of-one-entry": ("alibi_slopes", (1, 8), "alibi_slopes of shape (8) or (2, 8)"),
    "mask-of-a-run": ("attn_mask", (2, 4, 20, 20), "attn_mask that broadcasts to (2, 8, 20, 20)"),
    "mask-of-less-length": ("attn_mask", (8, 20, 9), "attn_mask that broadcasts to (2, 8, 20, 20)"),
    "bounds-of-a-run": ("key_bounds", (2, 4, 20, 2), "key_bounds of shape (2, 8, 20, 2)"),
    "bounds-of-more-rows": ("key_bounds", (2, 8, 21, 2), "key_bounds of shape (2, 8, 20, 2)"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_jit_trace_is_refused(function):
    """How many heads a call has, a trace does not tell."""
    tensors = tuple(torch.randn(2, heads, 20, 16) for heads in (8, 4, 4))
    with pytest.raises(TypeError, match=r"ByHead: .* got Tensor; torch.jit.trace .*torch.export"):
        torch.jit.trace(lambda *call: function(*call, PATTERN), tensors, check_trace=False)


def sentence_of(function, **call):
    with pytest.raises(ValueError, match=r"^sparse_attn::\w+: expected") as raised:
        function(**call)
    return str(raised.value)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("wrong", WRONG)
def test_tensors_of_other_heads(device, function, wrong):
    """None of them is cut to what a run would take."""
    name, shape, expected = WRONG[wrong]
    call = dict(zip(("query", "key", "value"), SHAPE.make(device), strict=True), pattern=PATTERN)
    before = function(**call)
    dtype = torch.int32 if name == "key_bounds" else None
    wrong_call = call | {name: torch.ones(shape, dtype=dtype, device=device)}
    got = (2, 4, 20, 16) if name == "key" else shape
    sentence = f"expected {expected}, got shape ({', '.join(map(str, got))})"
    assert sentence in sentence_of(function, **wrong_call)
    assert sentence in sa.can_use(**wrong_call).reasons[0]
    if function is sa.sparse_attention:
        assert sentence in sentence_of(sa.quality.compare, **wrong_call)
    assert torch.equal(function(**call), before)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_keys_that_do_not_fit_where_settings_choose_lists_for_one_call(device, function):
    """The choice sees the heads of one setting; the sentence is of the call's tensors."""
    pattern = sa.ByHead({0: sa.BlockTopK(16, mass=0.3)}, rest=sa.BlockTopK(16))
    query, key, value = SHAPE.make(device)
    sentence = r"expected key of shape \(2, heads, .*, got shape \(1, 4, 20, 16\)$"
    with pytest.raises(ValueError, match=sentence):
        function(query, key[:1], value[:1], pattern)


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2), (1, 4)], ids=str)
def test_scales_of_other_heads(device, shape):
    query, key, value = SHAPE.make(device)
    tensors = query.half(), *(tensor.to(torch.float8_e4m3fn) for tensor in (key, value))
    scales = {"key_scale": torch.tensor(2.0, device=device)}
    sa.sparse_attention(*tensors, PATTERN, **scales)
    scales["value_scale"] = torch.ones(shape, device=device)
    expected = r"expected value_scale of shape \(\), \(4\) or \(2, 4\), got shape"
    with pytest.raises(ValueError, match=rf"^sparse_attn::\w+: {expected}"):
        sa.sparse_attention(*tensors, PATTERN, **scales)


def test_values_of_other_heads_in_sequences_and_pages(device):
    query, key = torch.randn(20, 8, 16, device=device), torch.randn(20, 4, 16, device=device)
    value = torch.randn(20, 6, 16, device=device)
    starts = torch.tensor([0, 20], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^sparse_attn::varlen: expected value of shape \(20, 4"):
        sa.varlen_attention(query, key, value, starts, starts, 20, 20, pattern=PATTERN)
    keys, values = (torch.randn(2, 16, heads, 16, device=device) for heads in (4, 2))
    table = torch.arange(2, dtype=torch.int32, device=device)[None]
    tensors = query.transpose(0, 1)[None], keys, values
    with pytest.raises(ValueError, match=r"^sparse_attn::paged: expected value_cache of shape \(2"):
        sa.paged_attention(*tensors, table, starts[1:], pattern=PATTERN)


@pytest.mark.parametrize("name", ["is_causal", "softcap", "dropout_p", "engine", "return_lse"])
@pytest.mark.parametrize("out", [False, True], ids=["new", "out"])
def test_none_in_place_of_a_number(device, name, out):
    """As beside every other pattern."""
    tensors = SHAPE.make(device)
    given = {name: None} | ({"out": torch.empty_like(tensors[0])} if out else {})
    sentence = rf"^sparse_attn\.sparse_attention: expected {name} to be a \w+, got NoneType$"
    for pattern in (PATTERN, sa.Full()):
        with pytest.raises(TypeError, match=sentence):
            sa.sparse_attention(*tensors, pattern, **given)


def test_sentences_about_numbers_name_the_function(device):
    tensors = SHAPE.make(device)
    for given in ({}, {"out": torch.empty_like(tensors[0])}):
        with pytest.raises(ValueError, match=r"^sparse_attn\.sparse_attention: expected dropout_p"):
            sa.sparse_attention(*tensors, PATTERN, dropout_p=0.1, **given)
        with pytest.raises(
            ValueError, match=r"^sparse_attn\.sparse_attention: expected key_origin"
        ):
            sa.sparse_attention(
                *tensors, PATTERN, key_origin=torch.zeros(2, device=device), **given
            )


def test_out_without_data(device):
    tensors = SHAPE.make(device)
    out = torch.empty_like(tensors[0], device="meta")
    sentence = (
        rf"^sparse_attn::fused: expected out on query's device {tensors[0].device}, got meta$"
    )
    with pytest.raises(ValueError, match=sentence):
        sa.sparse_attention(*tensors, PATTERN, out=out)


def test_what_a_run_refuses_under_vmap(device):
    """No op is asked there about the whole call: the run's own sentence stays."""
    tensors = torch.zeros(3, *SHAPE.make(device)[0].shape, device=device)
    pattern = sa.ByHead({0: sa.Band(3)})
    call = torch.vmap(lambda t: sa.sparse_attention(t, t, t[:, :, :9], pattern))
    with pytest.raises(ValueError, match=r"^sparse_attn::\w+: expected value of shape"):
        call(tensors)
    assert torch.vmap(lambda t: sa.quality.compare(t, t, t, pattern).mass)(tensors).shape == (
        3,
        2,
        8,
    )

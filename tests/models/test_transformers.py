"""A model that only changes the engine equals its own eager attention, whatever the padding."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import (
    COMMON,
    CONFIGS,
    PADDINGS,
    SEQUENCE_TO_SEQUENCE,
    WINDOW,
    assert_same,
    build,
    output,
    pair,
    sequence_to_sequence,
    text,
)

import sparse_attn as sa
from sparse_attn.integrations import _masks

pytestmark = pytest.mark.usefixtures("on_device")

sa.integrations.transformers.register()


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_eager(name, padding):
    eager, ours = pair(name)
    ids, mask = text(padding)
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


@pytest.mark.parametrize("padding", PADDINGS)
def test_bert_decoder_with_cross_attention(padding):
    def make():
        config = CONFIGS["bert"]()
        config.is_decoder = config.add_cross_attention = True
        return config

    eager, ours = pair("bert", make, transformers.BertLMHeadModel)
    ids, mask = text(padding)
    _, memory_mask = text(padding, length=17)
    memory = torch.randn(
        2, 17, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1)
    )
    inputs = dict(
        input_ids=ids,
        attention_mask=mask,
        encoder_hidden_states=memory,
        encoder_attention_mask=memory_mask,
    )
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_two_chunk_prefill(name, padding, cache):
    ids, mask = text(padding)

    def logits(model):
        past = transformers.DynamicCache(config=model.config)
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=40)
        first = dict(input_ids=ids[:, :13], attention_mask=mask[:, :13], past_key_values=past)
        second = dict(input_ids=ids[:, 13:], attention_mask=mask, past_key_values=past)
        return torch.cat([output(model, **first), output(model, **second)], dim=1)

    eager, ours = pair(name)
    assert_same(logits(ours), logits(eager), mask)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_sliding"])
def test_decoder_made_bidirectional(name):
    eager, ours = pair(name)
    ids, mask = text("right")
    inputs = dict(input_ids=ids, attention_mask=mask, is_causal=False, use_cache=False)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


def test_packed_sequences():
    eager, ours = pair("mistral")
    ids, _ = text(batch=1)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    inputs = dict(input_ids=ids, position_ids=positions, use_cache=False)
    assert_same(output(ours, **inputs), output(eager, **inputs))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_own_4d_mask(kind):
    eager, ours = pair("llama")
    ids, _ = text()
    allowed = torch.ones(24, 24, dtype=torch.bool).tril()[None, None].expand(2, 1, 24, 24).clone()
    allowed[:, :, 12:, 3:6] = False
    additive = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    mask = allowed if kind == "bool" else additive
    theirs = output(eager, input_ids=ids, attention_mask=additive)
    assert_same(output(ours, input_ids=ids, attention_mask=mask), theirs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_a_mask_of_three_dimensions_is_refused(dtype):
    _, ours = pair("llama")
    mask = torch.ones(2, 24, 24, dtype=dtype)
    with pytest.raises(
        ValueError, match=r"expected attention_mask of shape .* got shape \(2, 24, 24\)"
    ):
        output(ours, input_ids=text()[0], attention_mask=mask)


def test_padded_rows_are_finite():
    _, ours = pair("llama")
    ids, mask = text("left")
    assert output(ours, input_ids=ids, attention_mask=mask).isfinite().all()


@pytest.mark.parametrize("name", SEQUENCE_TO_SEQUENCE)
def test_masks_alone_say_what_is_causal(name):
    eager, ours = pair(name, lambda: sequence_to_sequence(name), transformers.AutoModel)
    ids, mask = text("left")
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    assert_same(output(ours, **inputs), output(eager, **inputs))


def test_models_that_compute_with_their_mask_get_a_dense_one():
    sizes = {key: COMMON[key] for key in COMMON if key != "eos_token_id"}
    eager, ours = pair("doge", lambda: transformers.DogeConfig(**sizes, keep_window_size=4))
    ids, mask = text("left")
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


def test_convolutions_that_look_for_padding_in_the_mask_get_a_dense_one():
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LasrEncoderConfig(**sizes, subsampling_conv_channels=16, num_mel_bins=16)
    eager, ours = (
        build(config, name, transformers.LasrEncoder) for name in ("eager", "sparse_attn")
    )
    mask = torch.ones(2, 96, dtype=torch.long)
    mask[0, 64:] = 0
    inputs = dict(input_features=torch.randn(2, 96, 16), attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs))


@pytest.mark.parametrize("pattern", [sa.Full(), sa.Band(4, global_tokens=1)], ids=["full", "band"])
@pytest.mark.parametrize(
    "bias", ["use_relative_position_bias", "use_shared_relative_position_bias"]
)
def test_a_position_bias_is_added_to_a_dense_mask(bias, pattern):
    """BEiT's layers add a bias to the mask before they call their attention."""
    image = dict(image_size=24, patch_size=4)  # 37 tokens
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.BeitConfig(**sizes, **image, **{bias: True})
    model, eager = (build(config, cls=transformers.BeitModel) for _ in range(2))
    pixels = torch.randn(2, 3, 24, 24)
    allowed = pattern.mask(37, 37)
    mask = torch.zeros(37, 37).masked_fill(~allowed, -torch.inf).expand(2, 1, 37, 37)
    expected = output(eager, pixel_values=pixels, attention_mask=mask)
    assert_same(
        output(sa.integrations.transformers.apply(model, pattern), pixel_values=pixels), expected
    )


@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_compiles_to_one_graph(name):
    def make():
        config = CONFIGS[name]()
        config.num_hidden_layers = 1
        return config

    torch._dynamo.reset()
    eager, ours = pair(name, make)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids, mask = text("left")
    padded = dict(input_ids=ids, attention_mask=mask)
    shorter = {name: tensor[:, 3:] for name, tensor in padded.items()}
    for inputs in (padded, dict(input_ids=ids[:1]), shorter):  # then a graph for any batch
        rows = inputs.get("attention_mask")
        assert_same(output(compiled, **inputs), output(eager, **inputs), rows)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "modernbert"])
def test_windows_need_no_dense_mask(name, padding, monkeypatch):
    """The mask of a window is an interval per row, never Sq x Skv."""
    monkeypatch.setattr(_masks, "sdpa_mask", lambda **_: pytest.fail("a dense mask was made"))
    _, ours = pair(name)
    ids, mask = text(padding)
    assert output(ours, input_ids=ids, attention_mask=mask).isfinite().all()


def test_window_shorter_than_the_text_cuts():
    """Mistral's window is really used: far tokens do not reach the last one."""
    assert WINDOW * 2 < 24
    _, ours = pair("mistral")
    ids, _ = text()
    other = ids.clone()
    other[:, : 24 - 2 * WINDOW] = 5
    assert_same(output(ours, input_ids=ids)[:, -1], output(ours, input_ids=other)[:, -1])


def test_gradients_are_refused_in_one_sentence():
    _, ours = pair("llama")
    with pytest.raises(RuntimeError, match="inference"):
        ours(input_ids=text()[0]).logits.sum().backward()


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (torch.ones(2, 1, 23, 24).bool(), r"that broadcasts to .*, got shape \(2, 1, 23, 24\)"),
        (torch.zeros(2, 1, 24, 24).double(), "of dtype bool or float32, got float64"),
    ],
    ids=["shape", "dtype"],
)
def test_of_a_wrong_mask_the_call_is_to_be_corrected(mask, sentence):
    """No other pattern helps, nor `model.float()`."""
    _, ours = pair("llama")
    advice = "no pattern changes that: correct the call's attention_mask$"
    with pytest.raises(ValueError, match=f"expected attn_mask {sentence}; {advice}"):
        output(ours, input_ids=text()[0], attention_mask=mask.to(ours.device))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_a_dense_mask_of_another_batch_is_refused(kind):
    """Also where the pattern counts from where the mask says that texts begin."""
    ours = sa.integrations.transformers.apply(build(CONFIGS["llama"]()), sa.Band((3, 0), sinks=1))
    mask = torch.ones(3, 1, 24, 24, dtype=kind)
    with pytest.raises(ValueError, match=r"layer 0 \(.* of 2 rows, one for each text, got .*\(3, "):
        output(ours, input_ids=text()[0], attention_mask=mask)


@pytest.mark.parametrize("asked", ["call", "configuration"])
def test_attention_weights_are_asked_for_in_vain_with_one_warning(asked, monkeypatch):
    monkeypatch.setattr("sparse_attn._warn._given", set())
    config = CONFIGS["llama"]()
    config.output_attentions = asked == "configuration"
    ours = sa.integrations.transformers.apply(build(config))
    ids, _ = text()
    inputs = {} if asked == "configuration" else {"output_attentions": True}
    with pytest.warns(
        UserWarning, match="output_attentions=True gives none; load .*eager"
    ) as caught:
        assert not ours(ids, **inputs).attentions
    assert len([w for w in caught if "no attention weights" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(ids, **inputs)

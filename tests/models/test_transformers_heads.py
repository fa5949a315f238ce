"""Models whose layers differ in their heads."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import GROUPED, WINDOW, assert_same, build, output, text

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

by_layer = pytest.mark.skipif(
    not hasattr(transformers, "EmbeddingGemma2TextConfig"), reason="an older transformers"
)


def embedding_gemma2():
    """A model whose configuration no longer names one number for all layers."""
    config = transformers.EmbeddingGemma2TextConfig(
        **GROUPED,
        global_head_dim=32,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    with pytest.raises(RuntimeError, match="num_key_value_heads"):
        print(config.num_key_value_heads)
    return build(config, cls=transformers.AutoModel)


@by_layer
def test_apply_takes_layers_that_differ():
    eager, ours = embedding_gemma2(), sa.integrations.transformers.apply(embedding_gemma2())
    ids, mask = text("left")
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


@by_layer
def test_advise_takes_layers_that_differ():
    texts = list(torch.randint(3, 97, (2, 1, 128)))
    bands = [sa.Band(8), sa.Band(32)]
    advice = sa.advise(embedding_gemma2(), texts, keep=0.5, patterns=bands, progress=False)
    assert advice.validation[-1].pairs < 1


def llava():
    """A tower of four heads beside a text model of two key heads."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LlavaConfig(
        vision_config=dict(model_type="clip_vision_model", **sizes, image_size=32, patch_size=8),
        text_config=dict(model_type="llama", **GROUPED),
        image_token_id=96,
    )
    return build(config, cls=transformers.LlavaForConditionalGeneration)


def test_advise_takes_a_model_whose_towers_differ():
    model = llava()
    ids = torch.randint(3, 96, (2, 40))
    ids[:, 4:20] = 96
    inputs = dict(input_ids=ids, pixel_values=torch.randn(2, 3, 32, 32))
    advice = sa.advise(model, inputs, keep=0.5, patterns=[sa.Band(9)], progress=False)
    sa.integrations.transformers.apply(model, advice.policy)
    heads = sa.Policy(sa.Full(), heads={0: {3: sa.Band(9)}, 3: {3: sa.Band(9)}})
    sa.integrations.transformers.apply(model, heads)
    with pytest.raises(ValueError, match="layer 3 .* the call's 2 key heads, got one for head 3"):
        output(model, **inputs)


def test_a_configuration_of_two_text_models_is_taken():
    """MusicGen's encoder and decoder are text models alike, of which transformers names none."""
    sizes = dict(num_hidden_layers=1, num_attention_heads=4, hidden_size=64, ffn_dim=64)
    config = transformers.MusicgenConfig(
        text_encoder=transformers.T5Config(d_model=64, d_ff=64, num_layers=1, num_heads=4),
        audio_encoder=transformers.EncodecConfig(num_filters=4, upsampling_ratios=[2, 2]),
        decoder=transformers.MusicgenDecoderConfig(**sizes, vocab_size=64, num_codebooks=2),
    )
    model = transformers.MusicgenForConditionalGeneration._from_config(config)
    model = sa.integrations.transformers.apply(model, sa.Band(3), only="decoder.*")
    assert model.decoder.config._attn_implementation == "sparse_attn"

"""Models that look at images: queries of one length that meet keys of another."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import assert_same, build, output, pair, text

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

apply = sa.integrations.transformers.apply


def sam():
    sizes = dict(num_hidden_layers=1, num_attention_heads=2, mlp_dim=32)
    image = dict(image_size=64, patch_size=8)
    vision = dict(hidden_size=32, output_channels=32, window_size=4, num_pos_feats=16)
    return transformers.SamConfig(
        vision_config=dict(**sizes, **image, **vision, global_attn_indexes=[0]),
        prompt_encoder_config=dict(hidden_size=32, **image),
        mask_decoder_config=dict(**sizes, hidden_size=32, iou_head_hidden_dim=32),
    )


def kosmos2():
    """A model whose image is projected to a few tokens."""
    vision = dict(num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8)
    text = dict(layers=1, ffn_dim=64, attention_heads=4, max_position_embeddings=128)
    config = transformers.Kosmos2Config(
        text_config=dict(**text, vocab_size=97, embed_dim=64),
        vision_config=dict(**vision, hidden_size=64, intermediate_size=64),
        latent_query_num=6,
    )
    model = build(config, cls=transformers.Kosmos2ForConditionalGeneration)
    # transformers 5.17 calls the projection causal, which its eager attention does not ask about.
    model.image_to_text_projection.x_attn.is_causal = False
    return model


def test_the_tokens_of_a_mask_decoder_that_look_at_the_image_stay_dense():
    ours = apply(build(sam(), cls=transformers.SamModel), sa.Band(1))
    paths = [path for path, module in ours.named_modules() if hasattr(module, "_sparse_attn")]
    assert paths and not any("token" in path for path in paths), paths


def test_a_pattern_across_two_lengths_warns_once(monkeypatch):
    """A projection of an image to a few tokens has a name that says nothing of cross attention."""
    monkeypatch.setattr("sparse_attn._warn._given", set())
    pixels, place = torch.randn(1, 3, 32, 32), torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0, 0]])
    ids, _ = text(batch=1, length=10)
    inputs = dict(input_ids=ids, pixel_values=pixels, image_embeds_position_mask=place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = output(kosmos2(), **inputs)
        ours = apply(kosmos2())
        assert_same(output(ours, **inputs), expected)
        apply(ours, sa.Band(2), only="*layers*")
        output(ours, **inputs)
    apply(ours, sa.Band(2))
    with pytest.warns(UserWarning, match="x_attn.* 6 queries and 23 keys.*only= of apply"):
        output(ours, **inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output(ours, **inputs)


def test_what_generate_hands_on_to_a_tower_is_accepted():
    pixels, place = torch.randn(1, 3, 32, 32), torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0, 0]])
    ids, _ = text(batch=1, length=10)
    inputs = dict(input_ids=ids, pixel_values=pixels, image_embeds_position_mask=place)
    chosen = dict(max_new_tokens=3, do_sample=False, num_beams=2)
    expected = kosmos2().generate(**inputs, **chosen)
    assert torch.equal(apply(kosmos2()).generate(**inputs, **chosen), expected)


def test_what_heads_hand_on_to_their_text_model_is_accepted():
    """Of logits_to_keep LLaVA-OneVision makes an argument of its layers, of labels Gemma 4."""
    eager, ours = pair("llama", cls=transformers.LlamaModel)
    ids, _ = text()
    handed_on = dict(logits_to_keep=1, labels=ids, image_sizes=torch.tensor([[32, 32]]))
    expected = output(eager, input_ids=ids)
    assert_same(output(apply(ours), input_ids=ids, **handed_on), expected)


def vit_mae():
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    decoder = {f"decoder_{name}": size for name, size in sizes.items()}
    config = transformers.ViTMAEConfig(**sizes, **decoder, image_size=32, patch_size=8)
    return build(config, cls=transformers.ViTMAEForPreTraining)


def test_a_copied_configuration_is_reached_and_given_back():
    """ViTMAE's decoder has a configuration that no model has, which transformers leaves out."""
    pixels, noise = torch.randn(1, 3, 32, 32), torch.rand(1, 16)
    inputs = dict(pixel_values=pixels, noise=noise)
    model, restore = vit_mae(), sa.integrations.transformers.restore
    expected = output(model, **inputs)
    assert_same(output(apply(model), **inputs), expected)
    apply(model, sa.Policy(sa.Full(), layers={1: sa.Band(0)}, dense_below=0))
    narrow = output(model, **inputs)
    assert not torch.allclose(narrow, expected, rtol=1e-2)
    sa.quality.model(model, inputs, sa.Full(), timed=False, progress=False)
    assert torch.equal(output(model, **inputs), narrow)
    assert torch.equal(output(restore(model), **inputs), expected)


def bridgetower():
    sizes = dict(hidden_size=64, num_hidden_layers=2)
    text = dict(**sizes, num_attention_heads=4, intermediate_size=64, vocab_size=97)
    config = transformers.BridgeTowerConfig(
        **sizes,
        num_attention_heads=4,
        text_config=dict(**text, max_position_embeddings=128),
        vision_config=dict(**sizes, patch_size=8, image_size=32),
    )
    return build(config, cls=transformers.BridgeTowerModel)


def test_a_flag_that_eager_attention_does_not_read_does_not_count():
    """BridgeTower calls layers causal that see all of an image, without a mask."""
    image = torch.randn(2, 17, 64)
    with torch.no_grad():
        models = bridgetower(), apply(bridgetower())
        expected, ours = (model.cross_modal_image_layers[0].attention(image)[0] for model in models)
    assert_same(ours, expected)


def test_a_swap_that_leaves_the_layers_of_transformers_warns_once(monkeypatch):
    """SigLIP pools by an nn.MultiheadAttention; its layers are none."""
    monkeypatch.setattr("sparse_attn._warn._given", set())
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=8)
    model = build(config, cls=transformers.SiglipVisionModel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sa.swap_attention(apply(model, sa.Band(3)), sa.Full())  # both are meant
        sa.swap_attention(sa.integrations.transformers.restore(model), sa.Full(), only="*head*")
    with pytest.warns(UserWarning, match="swaps 1 nn.* alone; 2 attention .*transformers.apply$"):
        sa.swap_attention(model, sa.Full())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sa.swap_attention(model, sa.Full())


def test_a_mask_of_keypoints_is_dense():
    """LightGlue's layers give the keypoints of either image to the other by reshaping the mask."""
    detector = transformers.SuperPointConfig(
        encoder_hidden_sizes=[32, 32, 64],
        decoder_hidden_size=64,
        descriptor_decoder_dim=64,
        max_keypoints=30,
        keypoint_threshold=0.0,
    )
    config = transformers.LightGlueConfig(
        keypoint_detector_config=detector,
        descriptor_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    eager, ours = (build(config, cls=transformers.LightGlueForKeypointMatching) for _ in range(2))
    images = torch.rand(1, 2, 3, 64, 64)
    images[:, 1, :, :40] = 0  # fewer keypoints
    with torch.no_grad():
        expected, got = (model(pixel_values=images) for model in (eager, apply(ours)))
    assert torch.equal(got.matches, expected.matches)
    torch.testing.assert_close(got.matching_scores, expected.matching_scores)


def test_a_part_with_attention_of_its_own_gets_a_dense_mask():
    """BLIP's text model adds its mask itself, in a module of Python beside that of the others."""
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    config = transformers.BlipConfig(
        text_config=dict(**sizes, vocab_size=97, encoder_hidden_size=64, projection_dim=64),
        vision_config=dict(**sizes, image_size=32, patch_size=8),
    )
    eager, ours = pair("blip", lambda: config, transformers.BlipForConditionalGeneration)
    ids, mask = text("right")
    inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=torch.randn(2, 3, 32, 32))
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


def pixtral():
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.PixtralVisionConfig(**sizes, image_size=32, patch_size=4)
    return build(config, cls=transformers.PixtralVisionModel)


def of_pixtral(model, pixels, sizes):
    with torch.no_grad():
        call = dict(pixel_values=pixels, image_sizes=torch.tensor(sizes))
        return model(**call).last_hidden_state


def test_images_that_a_mask_keeps_apart_in_one_row():
    """Windows stay inside of each; what counts from a beginning has that of the first alone."""
    pixels, sizes = torch.randn(2, 3, 32, 32), [[32, 24], [16, 32]]
    model = apply(pixtral(), sa.Band((5, 5)))
    alone = [
        of_pixtral(model, pixels[i : i + 1, :, :height, :width], [size])
        for i, size in enumerate(sizes)
        for height, width in [size]
    ]
    torch.testing.assert_close(of_pixtral(model, pixels, sizes), torch.cat(alone, 1))
    for pattern in (sa.Band((5, 5), sinks=2), sa.Band((5, 5), global_tokens=1), sa.BlockTopK()):
        apply(model, sa.Policy(pattern, dense_below=0))
        of_pixtral(model, pixels[:1], sizes[:1])
        for attend in (model, torch.compile(model, backend="eager")):
            with pytest.raises(
                NotImplementedError, match="layer 0.*texts of one row that a mask keeps apart"
            ):
                of_pixtral(attend, pixels, sizes)

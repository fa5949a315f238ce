"""A policy stands at positions of the text under masks that look ahead, and in any decoder."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import (
    COMMON,
    CONFIGS,
    GROUPED,
    assert_same,
    build,
    new_cache,
    output,
    sequence_to_sequence,
    text,
)

import sparse_attn as sa
from sparse_attn.integrations._positions import query_positions

pytestmark = pytest.mark.usefixtures("on_device")

apply = sa.integrations.transformers.apply
PATTERNS = {
    "band": lambda: sa.Band((3, 0)),
    "sinks": lambda: sa.Band((3, 0), sinks=2),
    "both sides": lambda: sa.Band((3, 2)),
    "strided": lambda: sa.Strided(3, 4),
    "scattered": lambda: sa.Band((3, 0), global_tokens=torch.tensor([7, 2], dtype=torch.int32)),
}
IMAGES = (slice(4, 9), slice(14, 18))
VISION = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)
CALLS = {"prefill": [(0, 24)], "two turns": [(0, 11), (11, 23), (23, 24)]}


def exactly(pattern):
    return sa.Policy(PATTERNS[pattern](), dense_below=0)


def gemma3():
    """Tokens of an image see each other, later ones too."""
    config = transformers.Gemma3Config(
        text_config=dict(**GROUPED, sliding_window=30, layer_types=["full_attention"] * 2),
        vision_config=VISION,
        image_token_id=96,
    )
    return build(config, cls=transformers.Gemma3ForConditionalGeneration)


# In a second turn transformers' own mask loses what an image's tokens see ahead.
@pytest.mark.parametrize(
    ("pattern", "calls"),
    [
        (name, calls)
        for name in PATTERNS
        for calls in CALLS
        if (name, calls) != ("both sides", "two turns")
    ],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_images_in_a_cache(pattern, padding, cache, calls):
    model = gemma3()
    apply(model.model.language_model, exactly(pattern))
    ids, mask = text(padding)
    ids = ids.clamp(max=90)
    image = torch.zeros_like(ids)
    for place in IMAGES:
        image[:, place] = 1
    whole = output(model, input_ids=ids, attention_mask=mask, token_type_ids=image, use_cache=False)
    past, parts = new_cache(model, cache), []
    for begin, end in CALLS[calls]:
        inputs = dict(input_ids=ids[:, begin:end], token_type_ids=image[:, begin:end])
        inputs |= dict(attention_mask=mask[:, :end], past_key_values=past)
        parts.append(output(model, **inputs))
    assert_same(torch.cat(parts, dim=1), whole, mask)


def test_a_side_that_looks_ahead_ends_there_in_an_image():
    model = gemma3()
    ids = text()[0].clamp(max=90)
    image = torch.zeros_like(ids)
    image[:, IMAGES[0]] = 1
    other = ids.clone()
    other[:, IMAGES[0].stop - 1] += 1
    first = IMAGES[0].start

    def changes(policy):
        apply(model.model.language_model, policy)
        own, moved = (output(model, input_ids=x, token_type_ids=image) for x in (ids, other))
        return not torch.equal(own[:, first], moved[:, first])

    assert changes(sa.Full()) and changes(sa.Band((None, 0)))  # the model's own attention
    assert not changes(sa.Band((None, 1)))


def decoder(name):
    config = sequence_to_sequence(name)
    return apply(build(config, cls=transformers.AutoModelForSeq2SeqLM), exactly("sinks"))


def assert_parts_equal_the_whole(model, called, padding):
    """In a static cache; `called` runs the parts that find keys in it."""
    source, _ = text()
    ids, mask = text(padding)
    with torch.no_grad():
        common = dict(encoder_outputs=model.get_encoder()(input_ids=source))
    whole = output(
        model, decoder_input_ids=ids, decoder_attention_mask=mask, use_cache=False, **common
    )
    past = transformers.EncoderDecoderCache(
        new_cache(model, "static"), transformers.DynamicCache(config=model.config)
    )
    parts = []
    for begin, end in ((0, 15), (15, 23), (23, 24)):
        inputs = dict(decoder_input_ids=ids[:, begin:end], decoder_attention_mask=mask[:, :end])
        run = called if begin else model
        parts.append(output(run, **inputs, past_key_values=past, **common))
    assert_same(torch.cat(parts, dim=1), whole, mask)


@pytest.mark.parametrize("padding", ["none", "left", "holes"])
@pytest.mark.parametrize("name", ["pegasus_x", "nllb_moe", "bigbird_pegasus"])
def test_decoders_that_are_not_marked_causal_in_a_static_cache(name, padding):
    model = decoder(name)
    assert_parts_equal_the_whole(model, model, padding)


@pytest.mark.parametrize(
    "name", ["nllb_moe", "bigbird_pegasus"]
)  # PegasusX does not compile: numpy
def test_such_decoders_compiled_once_for_all_paddings(name):
    torch._dynamo.reset()
    model = decoder(name)
    compiled = torch.compile(model, backend="eager")
    for padding in ("none", "left", "holes"):
        assert_parts_equal_the_whole(model, compiled, padding)


@pytest.mark.parametrize("pattern", ["all before", "scattered", "all blocks"])
@pytest.mark.parametrize("name", ["LayoutLM", "MarkupLM"])
def test_encoders_that_make_their_mask_themselves_are_not_causal(name, pattern):
    """Their modules do not say what they are, and no note stands on their mask."""
    config = getattr(transformers, f"{name}Config")(**COMMON)
    allowed = torch.ones(24, 24).bool()
    if pattern == "all blocks":
        own = sa.BlockTopK(16, mass=1.0)
    else:
        own = sa.Band((None, 2)) if pattern == "all before" else PATTERNS[pattern]()
        allowed = own.mask(24, 24)
    eager, ours = (build(config, cls=transformers.AutoModel) for _ in range(2))
    apply(ours, own)
    hidden, mask = torch.randn(2, 24, 64), text("right")[1]
    padding = (1.0 - mask[:, None, None]) * -10000.0
    narrow = padding.masked_fill(~allowed, torch.finfo(torch.float32).min)
    got, want = (
        output_of(model.encoder.layer[0].attention.self, hidden, seen)
        for model, seen in ((ours, padding), (eager, narrow))
    )
    assert_same(got, want, mask)


@torch.no_grad()
def output_of(module, *args):
    return module(*args)[0]


def test_a_dense_mask_of_one_row_serves_all_texts():
    """A mask of one's own, made for one text, in a cache with more keys than queries."""
    model = apply(build(CONFIGS["llama"]()), exactly("sinks"))
    ids, _ = text()
    past = transformers.DynamicCache(config=model.config)
    output(model, input_ids=ids[:, :20], past_key_values=past)
    own = torch.ones(24, 24, dtype=torch.bool).tril()[None, None, 20:]
    last = output(model, input_ids=ids[:, 20:], attention_mask=own, past_key_values=past)
    assert_same(last, output(model, input_ids=ids, use_cache=False)[:, 20:])


def test_positions_are_read_off_a_mask_that_looks_ahead():
    """Eight queries at keys 5 to 12 of 20: tokens, an image, then tokens or padding."""
    sees = torch.arange(20) <= torch.arange(5, 13)[:, None]
    sees[2:5] |= torch.arange(20) < 10
    padded = sees & (torch.arange(20) < 11)
    mask = torch.stack([sees, padded])[:, None]
    assert query_positions(mask, None, 2, 8).tolist() == [5, 5]
    assert query_positions(mask[:1, :, :1], None, 2, 1).tolist() == [5, 5]


def deepseek_v4():
    """Keys of a window, and appended to them summaries of four tokens each."""
    config = transformers.DeepseekV4Config(
        **{**GROUPED, "num_key_value_heads": 1},
        layer_types=["compressed_sparse_attention"] * 2,
        mlp_layer_types=["hash_moe", "moe"],
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=6,
        moe_intermediate_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
    )
    return build(config)


def t5gemma2_decoder():
    """A decoder whose keys end with those of its encoder."""
    sizes = dict(GROUPED, num_hidden_layers=1, sliding_window=30, layer_types=["full_attention"])
    config = transformers.T5Gemma2Config(
        encoder=dict(text_config=sizes, vision_config=VISION),
        decoder=sizes,
        eoi_token_index=95,
        image_token_index=96,
    )
    return build(config, cls=transformers.T5Gemma2ForConditionalGeneration)


@pytest.mark.parametrize(
    ("make", "number"), [(deepseek_v4, 0), (t5gemma2_decoder, 1)], ids=["deepseek_v4", "t5gemma2"]
)
def test_layers_that_append_keys_take_no_pattern(make, number):
    ids, mask = text("left")
    ids = ids.clamp(max=90)
    inputs = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    if number:
        inputs |= dict(decoder_input_ids=ids, decoder_attention_mask=mask)
    own, model = output(make(), **inputs), make()
    only = "*layers*self_attn" if number == 0 else ["*text_model*", "*decoder*"]
    assert_same(output(apply(model, only=only), **inputs), own, mask)
    policy = sa.Policy(sa.Band(99), dense_below=0, dense_layers=[0, 1])
    assert_same(output(apply(model, policy, only=only), **inputs), own, mask)
    sentence = (
        rf"layer {number} \(model.*pattern=Band in a layer that appends keys .*; .*dense_layers"
    )
    with pytest.raises(NotImplementedError, match=sentence):
        output(apply(model, sa.Band(99), only=only), **inputs)


@pytest.mark.parametrize("size", [20, 264])
def test_a_head_dim_that_no_pattern_changes(size):
    """`apply` knows it before the first call, which a model that is loaded by the name has."""
    config = transformers.LlamaConfig(**{**GROUPED, "head_dim": size})
    with pytest.raises(NotImplementedError, match=f"layers.0.self_attn: .* head_dim={size}, .*own"):
        apply(build(config), exactly("band"))
    sa.integrations.transformers.register()
    with pytest.raises(ValueError, match=f"got {size}; no pattern changes that: load the model w"):
        output(build(config, "sparse_attn"), input_ids=text()[0])


@pytest.mark.parametrize("name", ["Bert", "BigBird", "Longformer"])
def test_a_head_dim_of_an_encoder(name):
    sizes = {**COMMON, "num_attention_heads": 2, "hidden_size": 60}
    config = getattr(transformers, f"{name}Config")(**sizes)
    with pytest.raises(NotImplementedError, match=r"attention.*: not served: head_dim=30, which"):
        apply(build(config, cls=transformers.AutoModel))


def test_a_head_dim_of_latent_attention():
    config = CONFIGS["deepseek_v3"]()
    apply(build(config), exactly("band"))
    config.qk_nope_head_dim = 20
    with pytest.raises(NotImplementedError, match=r"self_attn: not served: head_dim=28, which "):
        apply(build(config), exactly("band"))

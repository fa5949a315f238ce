"""`apply` narrows a loaded model's attention to a policy, and refuses by name what it cannot."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import (
    CONFIGS,
    ENCODERS,
    GROUPED,
    PADDINGS,
    WINDOW,
    assert_same,
    build,
    output,
    pair,
    text,
)

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

apply = sa.integrations.transformers.apply
NARROW = sa.Band((3, 0))


def mistral(window):
    return transformers.MistralConfig(**GROUPED, sliding_window=window)


def exactly(pattern, **options):
    return sa.Policy(pattern, dense_below=0, **options)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gpt_oss", "modernbert"])
def test_dense_policy_changes_nothing(name, padding):
    eager, ours = build(CONFIGS[name]()), build(CONFIGS[name]())
    pattern = sa.Band(4) if name in ENCODERS else sa.Band((4, 0))
    apply(ours, sa.Policy(pattern, dense_layers=[0, 1]))
    ids, mask = text(padding)
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


@pytest.mark.parametrize("padding", PADDINGS)
def test_band_equals_a_model_with_that_window(padding):
    """A causal band of three keys back in Llama is Mistral with a window of four."""
    eager = build(mistral(4))
    ours = apply(build(CONFIGS["llama"]()), exactly(NARROW))
    ids, mask = text(padding)
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("pattern", "window"), [(NARROW, 4), (sa.Band((WINDOW + 5, 0)), WINDOW)], ids=["inner", "outer"]
)
def test_band_and_the_models_window_intersect(pattern, window, padding):
    eager = build(mistral(window))
    ours = apply(build(mistral(WINDOW)), exactly(pattern))
    ids, mask = text(padding)
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


@pytest.mark.parametrize(
    "pattern",
    [
        sa.Band((2, 0), sinks=2),
        sa.Band((2, 0), global_tokens=2),
        sa.Dilated((3, 0), 2),
        sa.Strided(3, 4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_pattern_equals_its_mask(name, pattern):
    """Any pattern, beside the model's own window, equals eager under the dense mask of both."""
    eager, ours = build(CONFIGS[name]()), build(CONFIGS[name]())
    apply(ours, exactly(pattern))
    ids, _ = text()
    allowed = pattern.mask(24, 24, is_causal=True)
    if name == "mistral":
        allowed &= sa.Band((WINDOW - 1, 0)).mask(24, 24)
    additive = torch.where(allowed, 0.0, torch.finfo(torch.float32).min).expand(2, 1, 24, 24)
    assert_same(output(ours, input_ids=ids), output(eager, input_ids=ids, attention_mask=additive))


def test_layers_of_a_policy():
    """The second layer stays dense: as Qwen3 whose first layer alone slides."""
    config = CONFIGS["qwen3_sliding"]()
    config.layer_types = ["sliding_attention", "full_attention"]
    eager, ours = build(config), build(CONFIGS["qwen3"]())
    apply(ours, exactly(sa.Band((WINDOW - 1, 0)), dense_layers=[1]))
    ids, mask = text("left")
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(eager, **inputs), mask)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_chunks_and_decode_stand_where_they_are(padding, cache):
    """With a static cache the key length does not say where the queries stand; the mask does."""
    ids, mask = text(padding)

    def logits(model):
        past = transformers.DynamicCache()
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=40)
        parts = []
        for begin, end in ((0, 10), (10, 23), (23, 24)):
            inputs = dict(input_ids=ids[:, begin:end], attention_mask=mask[:, :end])
            parts.append(output(model, **inputs, past_key_values=past))
        return torch.cat(parts, dim=1)

    eager = build(mistral(4))
    ours = apply(build(CONFIGS["llama"]()), exactly(NARROW))
    assert_same(logits(ours), output(eager, input_ids=ids, attention_mask=mask), mask)


@pytest.mark.parametrize(
    ("decode", "window"), [(None, 4), (sa.Full(), None)], ids=["keeps", "widens"]
)
def test_decode(decode, window):
    eager = build(mistral(window))
    ours = apply(build(CONFIGS["llama"]()), exactly(NARROW, decode=decode))
    ids, mask = text("left")

    def last(model, prefill):
        past = transformers.DynamicCache()
        output(prefill, input_ids=ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=past)
        return output(model, input_ids=ids[:, -1:], attention_mask=mask, past_key_values=past)

    assert_same(last(ours, ours), last(eager, build(mistral(4))))


def test_dense_below():
    ours = apply(build(CONFIGS["llama"]()), sa.Policy(NARROW, dense_below=25))
    ids, mask = text("left")
    inputs = dict(input_ids=ids, attention_mask=mask)
    assert_same(output(ours, **inputs), output(build(CONFIGS["llama"]()), **inputs), mask)


def test_cross_attention_stays_dense():
    def make():
        config = CONFIGS["bert"]()
        config.is_decoder = config.add_cross_attention = True
        return build(config, cls=transformers.BertLMHeadModel)

    ours = apply(make(), exactly(sa.Band((30, 0)), num_layers=2))
    ids, mask = text()
    memory = torch.randn(
        2, 90, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1)
    )
    inputs = dict(input_ids=ids, attention_mask=mask, encoder_hidden_states=memory)
    assert_same(output(ours, **inputs), output(make(), **inputs), mask)


@pytest.mark.parametrize(
    "pattern", [sa.TopK(6), sa.BlockTopK(16, budget_blocks=1, local_blocks=1)], ids=repr
)
def test_patterns_that_select_run_with_padding(pattern):
    ours = apply(build(CONFIGS["llama"]()), exactly(pattern))
    ids, mask = text("left", length=40)
    logits = output(ours, input_ids=ids, attention_mask=mask)
    other = ids.clone()
    other[:, -1] = 5
    assert logits.isfinite().all()
    assert_same(output(ours, input_ids=other, attention_mask=mask)[:, :-1], logits[:, :-1])


def test_policy_compiles_to_one_graph():
    torch._dynamo.reset()
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 1
    ours = apply(build(config), exactly(NARROW))
    ids, mask = text("left")
    inputs = dict(input_ids=ids, attention_mask=mask)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same(output(compiled, **inputs), output(ours, **inputs), mask)


def test_layers_are_checked():
    with pytest.raises(ValueError, match="LlamaForCausalLM's 2 layers"):
        apply(build(CONFIGS["llama"]()), sa.Policy.dense_on_top(NARROW, num_layers=3))
    with pytest.raises(ValueError, match="dense_layers below .* 2 layers, got 2"):
        apply(build(CONFIGS["llama"]()), sa.Policy(NARROW, dense_layers=[2]))


@pytest.mark.parametrize(
    ("extra", "argument"),
    [
        (dict(cu_seq_lens_q=torch.tensor([0, 24])), "cu_seq_lens_q"),
        (dict(dropout=0.1), "dropout"),
        (dict(position_bias=torch.zeros(1)), "position_bias"),
        (dict(block_indices=[1]), "block_indices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_layer_and_argument(extra, argument):
    model = apply(build(CONFIGS["llama"]()), NARROW)
    module = model.model.layers[1].self_attn
    heads = torch.zeros(1, 4, 8, 16)
    with pytest.raises(
        NotImplementedError, match=rf"layer 1 \(model.layers.1.*not served: {argument}"
    ):
        call(module, heads, heads, heads, **extra)


def call(module, query, key, value, mask=None, **extra):
    function = transformers.AttentionInterface()["sparse_attn"]
    return function(module, query, key, value, mask, **extra)


def test_refusals_of_the_ops_name_the_layer():
    model = apply(build(CONFIGS["llama"]()), NARROW)
    heads = torch.zeros(1, 4, 8, 16)
    with pytest.raises(ValueError, match=r"layer 0 \(model\.layers\.0\.self_attn\).*attn_mask"):
        call(model.model.layers[0].self_attn, heads, heads, heads, torch.ones(1, 1, 8, 9) > 0)
    for pattern in (NARROW, sa.Band((3, 0), sinks=2), sa.Strided(3, 4), sa.Full()):
        module = apply(model, pattern).model.layers[0].self_attn
        with pytest.raises(NotImplementedError, match="layer 0.*mask=int64.*; give .* bool"):
            call(module, heads, heads, heads, torch.ones(1, 1, 8, 8).long())


@pytest.mark.parametrize("holes", [False, True], ids=["run", "holes"])
def test_a_mask_of_other_texts_is_told_apart(holes):
    """One position short, and of another batch; one row is for all texts."""
    model = apply(build(CONFIGS["bert"]()), sa.Band(3))
    ids = text()[0][:, :16]

    def masked(rows, positions):
        mask = torch.ones(rows, positions, dtype=torch.long)
        mask[:, 5] = 0 if holes else 1
        return output(model, input_ids=ids, attention_mask=mask)

    with pytest.raises(
        ValueError, match=r"layer 0 \(enc.*: expected attention_mask of 16 p.*got 15$"
    ):
        masked(2, 15)
    with pytest.raises(
        ValueError, match=r"expected attention_mask of 2 rows, .* got shape \(3, 16\)$"
    ):
        masked(3, 16)
    with pytest.raises(ValueError, match=r"attention_mask of at least one p.* got shape \(2, 0\)$"):
        output(model, input_ids=ids, attention_mask=torch.ones(2, 0))
    assert torch.equal(masked(1, 16), masked(2, 16))


def test_a_dense_mask_of_the_new_tokens_alone_is_short():
    """The cache holds the first tokens, the mask does not know them."""
    model = apply(build(CONFIGS["llama"]()), NARROW)
    ids = text()[0][:, :10]
    mask = torch.ones(3, 3, dtype=torch.bool).tril().expand(2, 1, 3, 3)
    sentence = (
        r"layer 0 \(model.*: expected attention_mask of 10 positions, one for each key, got 3$"
    )
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=sentence):
            model(ids[:, 7:], past_key_values=cache, attention_mask=mask)


def test_t5_fails_loudly():
    config = transformers.T5Config(
        vocab_size=97, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4
    )
    model = build(config, "sparse_attn", transformers.T5EncoderModel)
    with pytest.raises(NotImplementedError, match="position_bias=.*sdpa.*eager"):
        output(model, input_ids=text()[0])


def test_refuses_what_is_no_model_or_calls_no_attention_function():
    with pytest.raises(TypeError, match="expected a transformers model, got Linear"):
        apply(torch.nn.Linear(2, 2), NARROW)
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match="got BloomModel; keep its own attention, or .*patch_sdpa"):
        apply(transformers.BloomModel(config), NARROW)


def test_refuses_the_key_where_attention_functions_are_not_called():
    sa.integrations.transformers.register()
    config = transformers.LongformerConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        attention_window=8,
    )
    model = build(config, "sparse_attn", transformers.LongformerModel)
    with pytest.raises(ValueError, match=r"got Longformer.*apply\(model\)"):
        output(model, input_ids=text()[0])


def test_register_alone_leaves_other_models():
    sa.integrations.transformers.register()
    eager, _ = pair("llama")
    assert eager.config._attn_implementation == "eager"


class Holder(torch.nn.Module):
    """As a SentenceTransformer: models inside modules."""

    def __init__(self, *models):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.ModuleDict({"auto_model": m}) for m in models)


def test_the_model_inside_another_module_is_found():
    inner = build(CONFIGS["bert"]())
    holder = Holder(inner)
    assert sa.integrations.transformers.apply(holder, sa.Band(3)) is holder
    assert inner.config._attn_implementation == "sparse_attn"
    with pytest.raises(TypeError, match="got Holder with 2: parts.0.auto_model, parts.1.auto_m"):
        sa.integrations.transformers.apply(Holder(inner, build(CONFIGS["bert"]())), sa.Band(3))
    with pytest.raises(TypeError, match="expected a transformers model, got Linear; models w"):
        sa.integrations.transformers.apply(torch.nn.Linear(2, 2), sa.Band(3))
    with pytest.raises(TypeError, match=r"got the class BertModel; .*swap_attention.*patch_sdpa"):
        sa.integrations.transformers.apply(transformers.BertModel, sa.Band(3))


def test_a_model_in_float64_is_told_what_helps():
    model = apply(build(CONFIGS["bert"]()).double(), sa.Full())
    with torch.no_grad(), pytest.raises(ValueError, match=r"got float64; .* model\.float\(\)$"):
        model(input_ids=text()[0])


def own_state(model):
    return [(path, type(module), sorted(vars(module))) for path, module in model.named_modules()]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_restore_gives_the_own_attention_back(name):
    model = build(CONFIGS[name]())
    before, implementation = own_state(model), model.config._attn_implementation
    want = output(model, input_ids=text()[0])
    for pattern in (sa.Full(), sa.Band(3)):
        sa.integrations.transformers.apply(model, pattern)
        assert model.config._attn_implementation == "sparse_attn"
    assert not torch.allclose(output(model, input_ids=text()[0]), want)
    assert sa.integrations.transformers.restore(model) is model
    assert own_state(model) == before and model.config._attn_implementation == implementation
    assert torch.equal(output(model, input_ids=text()[0]), want)
    with pytest.warns(
        UserWarning, match=r"sparse_attn\.restore: .* got \w+ without one: nothing ch"
    ):
        assert sa.integrations.transformers.restore(model) is model
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sa.quality.model(model, text()[0], sa.Band(3), progress=False)  # restores by itself
        apply(model, sa.Band(3))
        sa.integrations.transformers.restore(model)


def test_restore_reaches_the_model_inside_and_towers_apart():
    inner = build(CONFIGS["bert"]())
    inner.set_attn_implementation("eager")
    holder = Holder(inner, build(CONFIGS["llama"]()))
    sa.integrations.transformers.apply(inner, sa.Band(3))
    sa.integrations.transformers.restore(holder)
    assert inner.config._attn_implementation == "eager"
    assert holder.parts[1]["auto_model"].config._attn_implementation != "sparse_attn"
    with pytest.raises(TypeError, match=r"sparse_attn.restore: expected model to be an nn.Module"):
        sa.integrations.transformers.restore("bert")


def test_a_policy_for_layers_by_name():
    ids, apply = text()[0], sa.integrations.transformers.apply
    model = build(CONFIGS["llama"]())
    other = build(CONFIGS["llama"]())
    other.load_state_dict(model.state_dict())
    policy = sa.Policy(sa.Band(1), layers={0: sa.Full()}, dense_below=0)
    want = output(apply(model, policy), input_ids=ids)
    apply(other, sa.Band(1))
    apply(other, sa.Policy(sa.Band(1), dense_below=0, num_layers=1), only="*layers.1.*")
    assert torch.equal(output(other, input_ids=ids), want)
    for names in ([3], b"x"):
        with pytest.raises(TypeError, match="apply: expected each of only to be a name, got int"):
            apply(other, sa.Band(1), only=names)
    there = "it has 2: model.layers.0.self_attn, model.layers.1.self_attn$"
    for only, shown in (("x", "'x'"), (["*layers.0.*", "x"], r"\['x'\]")):
        what = f"self-attention of LlamaF.* under the names {shown}, .*{there}"
        with pytest.raises(ValueError, match=what):
            apply(other, sa.Band(1), only=only)


def test_a_part_with_a_configuration_of_its_own_is_reached():  # T5's stacks; 5.17 leaves it out
    model = build(CONFIGS["llama"]())
    own = type(model.config)(**model.config.to_dict(), attn_implementation="eager")
    for part in model.model.modules():
        vars(part).update({"config": own} if hasattr(part, "config") else {})
    assert apply(model, NARROW).model.config._attn_implementation == "sparse_attn"
    assert sa.integrations.transformers.restore(model).model.config._attn_implementation == "eager"

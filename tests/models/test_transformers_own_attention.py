"""Longformer and BigBird, whose attention modules are their own, equal their eager outputs."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import COMMON, assert_same, build, text

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

apply = sa.integrations.transformers.apply
SIZES = {k: v for k, v in COMMON.items() if k != "eos_token_id"}

GLOBALS = {
    "no global tokens": [[], []],
    "leading": [[0, 1], [0, 1]],
    "scattered": [[0, 9, 17], [0, 9, 17]],
    "different by text": [[0, 5], [0, 9, 17]],
    "in one text": [[], [3]],
}


def longformer(attention_window=(8, 8)):
    config = transformers.LongformerConfig(
        **SIZES, attention_window=list(attention_window), eos_token_id=2
    )
    return build(config, cls=transformers.LongformerModel)


def bigbird(attention_type="block_sparse", cls=transformers.BigBirdModel, block_size=16, **options):
    sizes = dict(SIZES, max_position_embeddings=512, eos_token_id=2, sep_token_id=2)
    config = transformers.BigBirdConfig(
        **sizes,
        attention_type=attention_type,
        block_size=block_size,
        num_random_blocks=2,
        **options,
    )
    return build(config, cls=cls)


def hidden(model, ids, mask, **options):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **options)[0]


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("tokens", GLOBALS.values(), ids=GLOBALS)
def test_longformer(tokens, padding):
    ids, mask = text(padding, length=37)
    is_global = torch.zeros_like(mask)
    for row, positions in enumerate(tokens):
        is_global[row, positions] = 1
    options = dict(global_attention_mask=is_global * mask)
    expected = hidden(longformer(), ids, mask, **options)
    assert_same(hidden(apply(longformer()), ids, mask, **options), expected)


def test_longformer_band_narrows_the_window():
    """Layer 0 has half the window, layer 1 is dense: the model's own."""
    ids, mask = text("right", length=37)
    ours = apply(longformer(), sa.Policy(sa.Band(2), dense_layers=[1], dense_below=0))
    expected = hidden(longformer(attention_window=[4, 8]), ids, mask)
    assert_same(hidden(ours, ids, mask), expected, mask)


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("length", [192, 203], ids=["whole blocks", "padded to blocks"])
def test_bigbird(length, padding):
    ids, mask = text(padding, length=length)
    expected = hidden(bigbird(), ids, mask)
    assert_same(hidden(apply(bigbird()), ids, mask), expected, mask)


@pytest.mark.parametrize("padding", ["none", "right"])
def test_bigbird_changes_to_full_attention_for_short_texts(padding):
    ids, mask = text(padding, length=48)
    ours = apply(bigbird())
    assert_same(hidden(ours, ids, mask), hidden(bigbird(), ids, mask), mask)
    inner = ours.encoder.layer[0].attention.self
    assert type(inner).__module__ == "sparse_attn.integrations._bigbird"


def test_bigbird_decoder_generates():
    def make():
        return bigbird("original_full", transformers.BigBirdForCausalLM, is_decoder=True)

    ids, mask = text("none", length=10)
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        expected = make().generate(ids, **options)
        assert apply(make()).generate(ids, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("make", [longformer, bigbird])
def test_parameters_are_shared(make):
    model = make()
    before = dict(model.named_parameters())
    after = dict(apply(model).named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [(longformer, sa.Band(4, sinks=1)), (longformer, sa.TopK(4)), (bigbird, sa.Band(4))],
)
def test_other_patterns_are_refused_by_name(make, pattern):
    with pytest.raises(NotImplementedError, match=r"encoder\.layer\.0.*not served.*give"):
        apply(make(), pattern)


def test_weights_and_training_are_refused_by_name():
    ids, mask = text(length=37)
    model = apply(longformer())
    with pytest.raises(NotImplementedError, match="layer 0 .*output_attentions"):
        hidden(model, ids, mask, output_attentions=True)
    with pytest.raises(NotImplementedError, match="layer 0 .*dropout"):
        hidden(model.train(), ids, mask)


def test_bigbird_block_size_is_refused_with_what_to_set():
    with pytest.raises(NotImplementedError, match="block_size=8; set .* a multiple of 16"):
        hidden(apply(bigbird(block_size=8)), *text(length=192))


@pytest.mark.parametrize(("kind", "length"), [(longformer, 37), (bigbird, 37), (bigbird, 300)])
def test_restore_gives_the_own_modules_back(kind, length):
    model = kind()
    ids, mask = text(length=length)
    want = hidden(model, ids, mask)  # BigBird picks its modules by the length
    own = [type(module) for module in model.modules()]
    assert_same(hidden(apply(model), ids, mask), want)
    assert [type(module) for module in model.modules()] != own
    sa.integrations.transformers.restore(model)
    assert [type(module) for module in model.modules()] == own
    assert torch.equal(hidden(model, ids, mask), want)

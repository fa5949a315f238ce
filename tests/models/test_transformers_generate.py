"""Generation with every cache gives the tokens of eager attention."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import GROUPED, assert_same, pair, text

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

sa.integrations.transformers.register()


def generate(model, padding, **options):
    ids, mask = text(padding, length=10)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
            **options,
        )
    return out.sequences, torch.stack(out.logits, dim=1)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llama", "dynamic"),
        ("llama", "static"),
        ("mistral", "dynamic"),
        ("mistral", "static"),
        ("gemma2", "static"),
        ("gemma3", "dynamic"),
        ("qwen3_sliding", "static"),
        ("gpt_oss", "dynamic"),
        ("gpt_oss", "static"),
        ("phi3", "dynamic"),
        ("gpt2", "dynamic"),
    ],
)
def test_greedy(name, cache, padding):
    eager, ours = pair(name)
    expected = generate(eager, padding, cache_implementation=cache)
    tokens, logits = generate(ours, padding, cache_implementation=cache)
    assert tokens.tolist() == expected[0].tolist()
    assert_same(logits, expected[1])


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decode_by_a_sketch(cache, padding):
    """A policy decodes over the pages that a sketch of the call chooses: of all, it is eager."""
    eager, ours = pair("llama")
    expected = generate(eager, padding, cache_implementation=cache)
    forced = {"sink_blocks": 0, "local_blocks": 0}
    for tokens, same in ((4096, True), (16, False)):
        decode = sa.BlockTopK(16, selector="sketch", budget_tokens=tokens, **forced)
        sa.integrations.transformers.apply(ours, sa.Policy(sa.Full(), decode=decode))
        found, logits = generate(ours, padding, cache_implementation=cache)
        if same:
            assert found.tolist() == expected[0].tolist()
            assert_same(logits, expected[1])
        else:
            assert logits.isfinite().all() and not torch.allclose(logits, expected[1])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_beams(name):
    eager, ours = pair(name)
    expected = generate(eager, "left", num_beams=3)
    assert generate(ours, "left", num_beams=3)[0].tolist() == expected[0].tolist()


def test_chunked_prefill():
    eager, ours = pair("mistral")
    expected = generate(eager, "left", prefill_chunk_size=4)
    tokens, logits = generate(ours, "left", prefill_chunk_size=4)
    assert tokens.tolist() == expected[0].tolist()
    assert_same(logits, expected[1])


def minimax():
    """Linear attention first: its cache counts no keys, so masks are of the new tokens alone."""
    return transformers.MiniMaxConfig(
        **GROUPED, num_local_experts=2, layer_types=["linear_attention", "full_attention"]
    )


def test_a_cache_that_counts_no_keys():
    eager, ours = pair("minimax", minimax)
    expected = generate(eager, "none")
    tokens, logits = generate(ours, "none")
    assert tokens.tolist() == expected[0].tolist()
    assert_same(logits, expected[1])
    sa.integrations.transformers.apply(ours, sa.Band((3, 0), sinks=1))
    cached, whole = generate(ours, "none"), generate(ours, "none", use_cache=False)
    assert_same(cached[1], whole[1])


def test_a_mask_of_fewer_keys_than_the_call_is_refused_by_name():
    ours = pair("minimax", minimax)[1]
    ids = text(length=10)[0]
    sentence = r"layer 1 \(MiniMaxAttention\): not served: attention_mask=a mask of 3 keys for 10;"
    with torch.no_grad():
        cache = ours(ids[:, :7], use_cache=True).past_key_values
        with pytest.raises(NotImplementedError, match=sentence):
            ours(ids[:, 7:], past_key_values=cache)

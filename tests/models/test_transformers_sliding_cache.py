"""A policy stands at positions of the text, however many keys a sliding cache has dropped."""

import pytest
import torch

pytest.importorskip("transformers")
from tiny_models import CONFIGS, assert_same, build, new_cache, output, text
from transformers import AttentionInterface

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

apply = sa.integrations.transformers.apply
PATTERNS = {
    "sinks": sa.Band((3, 0), sinks=16),  # dropped one after the other, in the end all
    "strided": sa.Strided(2, 3),
    "dilated with sinks": sa.Dilated((2, 0), 2, sinks=16),
    "leading global tokens": sa.Band((3, 0), global_tokens=16),
    "scattered global tokens": (3, 0),  # the tensor is made on the device
}
CALLS = {
    "long prompt": [(0, 19), *((i, i + 1) for i in range(19, 24))],
    "short prompt and chunks": [(0, 3), (3, 4), (4, 5), (5, 10), (10, 14), (14, 15), (15, 24)],
}


def bound(name, pattern, **options):
    if isinstance(pattern, tuple):
        pattern = sa.Band(pattern, global_tokens=torch.tensor([15, 1, 18], dtype=torch.int32))
    return apply(build(CONFIGS[name]()), sa.Policy(pattern, dense_below=0, **options))


def assert_calls_equal_the_whole_text(model, cache, calls, padding="none"):
    ids, mask = text(padding)
    past = new_cache(model, cache)
    parts = []
    for begin, end in calls:
        inputs = dict(input_ids=ids[:, begin:end], attention_mask=mask[:, :end])
        parts.append(output(model, **inputs, past_key_values=past))
    whole = output(model, input_ids=ids, attention_mask=mask, use_cache=False)
    assert_same(torch.cat(parts, dim=1), whole, mask)


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_calls_with_a_cache_equal_the_whole_text(name, pattern, cache, calls):
    assert_calls_equal_the_whole_text(bound(name, pattern), cache, calls)


@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pattern", ["sinks", "strided"])
def test_calls_with_padding_equal_the_whole_text(pattern, cache, padding):
    model = bound("mistral", PATTERNS[pattern])
    assert_calls_equal_the_whole_text(model, cache, CALLS["long prompt"], padding)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pattern", [sa.Band((3, 0), sinks=12), sa.Strided(2, 3)], ids=repr)
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_generated_tokens_equal_those_without_a_cache(name, pattern, cache):
    model = bound(name, pattern)
    ids, mask = text(length=10)
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, disable_compile=True)
    with torch.no_grad():
        expected = model.generate(ids, use_cache=False, **options)
        tokens = model.generate(ids, cache_implementation=cache, **options)
    assert tokens.tolist() == expected.tolist()


def test_blocks_that_the_cache_has_moved_are_refused_by_name():
    ids, _ = text()

    def decode(model):
        past = new_cache(model, "dynamic")
        output(model, input_ids=ids[:, :-1], past_key_values=past)
        return output(model, input_ids=ids[:, -1:], past_key_values=past)

    with pytest.raises(
        NotImplementedError, match=r"layer 0 .*pattern=BlockTopK.*dropped 17 keys; .*decode=Full"
    ):
        decode(bound("mistral", sa.BlockTopK(16, budget_blocks=1, local_blocks=1)))
    with pytest.raises(NotImplementedError, match="dropped 17 keys; list the layer in the policy"):
        model = bound("mistral", sa.BlockTopK(16, budget_blocks=1, local_blocks=1))
        past = new_cache(model, "dynamic")
        output(model, input_ids=ids[:, :-1], past_key_values=past)
        output(model, input_ids=ids[:, -2:], past_key_values=past)  # several queries: no decode
    assert (
        decode(
            bound("mistral", sa.BlockTopK(16, budget_blocks=1, local_blocks=1), decode=sa.Full())
        )
        .isfinite()
        .all()
    )


def test_a_mask_that_does_not_say_the_position_is_refused_by_name():
    """Beside a sliding cache; a layer whose cache keeps all keys needs no word."""
    query, key = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 7, 16)
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    call = AttentionInterface()["sparse_attn"]
    sliding, full = (bound("gemma3", sa.Strided(2, 3)).model.layers[i].self_attn for i in (0, 1))
    with pytest.raises(NotImplementedError, match=r"layer 0 .*pattern=Strided.*; leave the mask"):
        call(sliding, query, key, key, mask)
    call(full, query, key, key, mask)

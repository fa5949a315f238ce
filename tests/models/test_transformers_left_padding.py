"""A left-padded row equals the row alone, for every pattern and cache, in prefill and decode."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import CONFIGS, VOCABULARY, assert_same, build, output

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")

apply = sa.integrations.transformers.apply
LENGTH = 40
ONE_BLOCK = sa.BlockTopK(16, mass=None, budget_blocks=1, selector="mean", local_blocks=1)
BY_BLOCKS = {
    "block top-k": lambda: ONE_BLOCK,
    "block top-k by head": lambda: sa.ByHead({0: ONE_BLOCK}, rest=sa.BlockTopK(16, 0.3)),
    "top-k in blocks": lambda: sa.TopK(5, ONE_BLOCK),
}
PATTERNS = {
    "sinks": lambda: sa.Band((3, 0), sinks=4),
    "first global tokens": lambda: sa.Band((3, 0), global_tokens=3),
    "scattered global tokens": lambda: sa.Band(
        (3, 0), global_tokens=torch.tensor([9, 0, 4], dtype=torch.int32)
    ),
    "dilated with sinks": lambda: sa.Dilated((2, 0), 2, sinks=3),
    "strided": lambda: sa.Strided(2, 3),
    "by head": lambda: sa.ByHead({0: sa.Band((3, 0), sinks=4)}, rest=sa.Strided(2, 5)),
    "topk": lambda: sa.TopK(5),
    **BY_BLOCKS,
}
#: Pads of the first row: whole blocks where the pattern has blocks.
PADS = {name: 16 if name in BY_BLOCKS else 5 for name in PATTERNS}
CALLS = {
    "prefill": [(0, LENGTH)],
    "decode": [(0, 30), *((n, n + 1) for n in range(30, LENGTH))],
    "chunks": [(0, 16), (16, 32), (32, LENGTH)],
}


def padded_text(pads):
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :pads] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def in_calls(model, cache, calls, ids, mask, positions):
    past = None
    if cache == "dynamic":
        past = transformers.DynamicCache(config=model.config)
    elif cache == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=48)
    parts = []
    for begin, end in calls:
        inputs = dict(input_ids=ids[:, begin:end], position_ids=positions[:, begin:end])
        inputs["attention_mask"] = mask[:, :end]
        inputs |= {"past_key_values": past} if past is not None else {"use_cache": False}
        parts.append(output(model, **inputs))
    return torch.cat(parts, 1)


def assert_padded_equals_alone(name, pattern, cache, calls):
    model = apply(build(CONFIGS[name]()), sa.Policy(PATTERNS[pattern](), dense_below=0))
    pads = PADS[pattern]
    ids, mask, positions = padded_text(pads)
    batch = in_calls(model, cache, calls, ids, mask, positions)
    alone = output(model, input_ids=ids[:1, pads:], use_cache=False)
    assert_same(batch[:1, pads:], alone)
    whole = output(model, input_ids=ids[1:], use_cache=False)
    assert_same(batch[1:], whole)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_prefill(cache, pattern):
    assert_padded_equals_alone("llama", pattern, cache, CALLS["prefill"])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("calls", ["decode", "chunks"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decode(cache, calls, pattern):
    if pattern in BY_BLOCKS:  # alone, a block's queries choose together
        calls = "prefill"
    assert_padded_equals_alone("llama", pattern, cache, CALLS[calls])


@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name not in BY_BLOCKS])
@pytest.mark.parametrize("calls", ["decode", "chunks"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_sliding_caches(name, cache, calls, pattern):
    assert_padded_equals_alone(name, pattern, cache, CALLS[calls])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_encoders(pattern):
    model = apply(build(CONFIGS["bert"]()), sa.Policy(PATTERNS[pattern](), dense_below=0))
    pads = PADS[pattern]
    ids, mask, positions = padded_text(pads)
    batch = output(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    alone = output(model, input_ids=ids[:1, pads:], attention_mask=mask[:1, pads:])
    assert_same(batch[:1, pads:], alone)


@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name not in BY_BLOCKS])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_of_one_row_is_for_all_queries(kind, pattern):
    model = apply(build(CONFIGS["bert"]()), PATTERNS[pattern]())
    ids, mask, positions = padded_text(5)
    own = mask.bool()[:, None, None, :]
    own = own if kind == "bool" else torch.where(own, 0.0, torch.finfo(torch.float32).min)
    batch = output(model, input_ids=ids, attention_mask=own, position_ids=positions)
    assert_same(batch[:1, 5:], output(model, input_ids=ids[:1, 5:]))
    assert_same(batch[1:], output(model, input_ids=ids[1:]))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_dense_mask_of_ones_own_tells_where_the_text_begins(kind):
    model = apply(build(CONFIGS["llama"]()), sa.Policy(PATTERNS["sinks"](), dense_below=0))
    ids, mask, positions = padded_text(5)
    allowed = torch.ones(LENGTH, LENGTH).tril().bool() & mask.bool()[:, None, None, :]
    own = allowed if kind == "bool" else torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    batch = output(model, input_ids=ids, attention_mask=own, position_ids=positions)
    alone = output(model, input_ids=ids[:1, 5:], use_cache=False)
    assert_same(batch[:1, 5:], alone)


@pytest.mark.parametrize("pattern", ["sinks", "first global tokens", "strided", "topk"])
def test_padding_hidden_by_a_number(pattern):
    """MarkupLM adds -10000 to the scores of padding."""
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = transformers.MarkupLMConfig(**sizes, vocab_size=VOCABULARY)
    model = apply(build(config, cls=transformers.MarkupLMModel), PATTERNS[pattern]())
    ids, mask, positions = padded_text(5)
    batch = output(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    assert_same(batch[:1, 5:], output(model, input_ids=ids[:1, 5:], position_ids=positions[:1, 5:]))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens_of_a_padded_row_are_its_own(cache):
    model = apply(build(CONFIGS["llama"]()), sa.Policy(PATTERNS["sinks"](), dense_below=0))
    ids, mask, _ = padded_text(5)
    options = dict(
        max_new_tokens=6, do_sample=False, cache_implementation=cache, disable_compile=True
    )
    with torch.no_grad():
        batch = model.generate(ids, attention_mask=mask, **options)
        alone = model.generate(ids[:1, 5:], attention_mask=mask[:1, 5:], **options)
    assert batch[0, LENGTH:].tolist() == alone[0, LENGTH - 5 :].tolist()


def test_a_compiled_model_reads_the_mask():
    model = apply(build(CONFIGS["llama"]()), sa.Policy(PATTERNS["sinks"](), dense_below=0))
    ids, mask, positions = padded_text(5)
    inputs = dict(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    assert_same(output(compiled, **inputs)[:1, 5:], output(model, **inputs)[:1, 5:])


@pytest.mark.parametrize("kind", ["bool", "additive", "in a graph"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_blocks_are_chosen_among_the_keys_that_a_dense_mask_leaves(name, kind):
    config = CONFIGS[name]()
    config.sliding_window = 40  # Mistral's: of two blocks and a half
    model = apply(build(config), sa.BlockTopK(16, 0.3, local_blocks=1))
    length, pads = 128, 64
    ids = torch.randint(3, VOCABULARY, (1, length))
    mask = (torch.arange(length) >= pads).long()[None]
    inputs = dict(input_ids=ids, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    inputs |= {} if name == "bert" else {"use_cache": False}
    alone = {k: v if v is False else v[:, pads:] for k, v in inputs.items()}
    want = output(model, **alone, attention_mask=mask[:, pads:])
    if kind == "in a graph":
        model, inputs["attention_mask"] = torch.compile(model, backend="eager"), mask
    else:
        allowed = mask.bool()[:, None, None]
        if name != "bert":
            back = torch.arange(length)[:, None] - torch.arange(length)
            allowed = allowed & (back >= 0) & ((back < 40) if name == "mistral" else True)
        least = torch.finfo(torch.float32).min
        inputs["attention_mask"] = allowed if kind == "bool" else torch.where(allowed, 0.0, least)
    assert_same(output(model, **inputs)[:, pads:], want)

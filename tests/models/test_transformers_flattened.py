"""Flattened batches: texts packed into one row equal the texts alone."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tiny_models import COMMON, CONFIGS, GROUPED, build

import sparse_attn as sa
from sparse_attn.integrations.transformers import apply

pytestmark = pytest.mark.usefixtures("on_device")

LENGTHS = [5, 1, 24, 9]


def flattened():
    """One row of texts as transformers' flattening collator gives it, and the texts."""
    texts = [torch.randint(1, 50, (1, length)) for length in LENGTHS]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    row = {
        "input_ids": torch.cat(texts, 1),
        "position_ids": positions,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }
    return row, texts


@pytest.mark.parametrize("pattern", [sa.Full(), sa.Band((3, 0), sinks=1)], ids=["dense", "band"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_texts_equal_themselves_alone(name, pattern):
    if name == "mistral" and isinstance(pattern, sa.Band):
        pattern = sa.Band((3, 0))  # joins the model's own window
    model = apply(build(CONFIGS[name]()), sa.Policy(pattern, dense_below=0))
    row, texts = flattened()
    with torch.no_grad():
        logits = model(**row, use_cache=False).logits
        alone = [model(input_ids=text, use_cache=False).logits for text in texts]
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)


def test_heads_of_a_policy():
    """Each run of heads writes its part of the output."""
    policy = sa.Policy(sa.Band((3, 0), sinks=1), heads={0: {1: sa.TopK(3)}}, dense_below=0)
    model = apply(build(CONFIGS["llama"]()), policy)
    row, texts = flattened()
    with torch.no_grad():
        logits = model(**row, use_cache=False).logits
        alone = [model(input_ids=text, use_cache=False).logits for text in texts]
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_texts_that_positions_alone_tell_apart(name):
    """Transformers makes a dense mask of them, which does not place sinks in later texts."""
    row, texts = flattened()
    row = {name: row[name] for name in ("input_ids", "position_ids")}
    model = apply(build(CONFIGS[name]()), sa.Band((3, 0)))
    with torch.no_grad():
        alone = [model(input_ids=text, use_cache=False).logits for text in texts]
        logits = model(**row, use_cache=False).logits
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)
    by_head = sa.ByHead({0: sa.BlockTopK(16)}, rest=sa.BlockTopK(16, mass=0.5))
    for pattern in (sa.Band((3, 0), sinks=1), sa.Strided(2, 4), sa.BlockTopK(16), by_head):
        apply(model, pattern)
        kind = "BlockTopK" if pattern is by_head else type(pattern).__name__
        refusal = rf"layer 0.*pattern={kind} .*position_ids keep.*cu_seq_lens_q"
        with pytest.raises(NotImplementedError, match=refusal):
            model(**row, use_cache=False)


def test_texts_that_a_mask_of_the_caller_keeps_apart():
    row, texts = flattened()
    of_text = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    row = {name: row[name] for name in ("input_ids", "position_ids")}
    row["attention_mask"] = (of_text[:, None] == of_text).tril()[None, None]
    model = apply(build(CONFIGS["llama"]()), sa.Policy(sa.Band((3, 0)), dense_below=0))
    with torch.no_grad():
        alone = [model(input_ids=text, use_cache=False).logits for text in texts]
        logits = model(**row, use_cache=False).logits
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)
    apply(model, sa.Policy(sa.Band((3, 0), sinks=1), dense_below=0))
    with pytest.raises(NotImplementedError, match=r"layer 0.*texts of one row.*a row of its own"):
        model(**row, use_cache=False)


def test_a_window_that_no_pattern_joins_is_refused():
    model = apply(build(CONFIGS["mistral"]()), sa.Policy(sa.Strided(2, 4), dense_below=0))
    row, _ = flattened()
    with pytest.raises(NotImplementedError, match=r"layer 0.*sliding_window=.* flattened batch"):
        model(**row, use_cache=False)


@pytest.mark.parametrize(
    "pattern",
    [sa.Band((3, 0), sinks=1), sa.Band((3, 0), global_tokens=2), sa.Dilated((3, 0), 2, sinks=1)],
    ids=["sinks", "global tokens", "dilated"],
)
def test_dense_layers_join_any_window(pattern):
    """Also those of a pattern whose dense form has sinks or global tokens."""
    own, model = build(CONFIGS["mistral"]()), build(CONFIGS["mistral"]())
    apply(model, sa.Policy(pattern, dense_layers=[0, 1], dense_below=0))
    row, texts = flattened()
    with torch.no_grad():
        logits = model(**row, use_cache=False).logits
        alone = [own(input_ids=text, use_cache=False).logits for text in texts]
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)


def chunked():
    sizes = dict(num_local_experts=2, intermediate_size_mlp=64, no_rope_layers=[1, 1])
    return transformers.Llama4TextConfig(**GROUPED, **sizes, attention_chunk_size=7)


def doge():
    sizes = {name: size for name, size in COMMON.items() if name != "eos_token_id"}
    return transformers.DogeConfig(**sizes, keep_window_size=4)


@pytest.mark.parametrize("make", [chunked, doge])
def test_a_mask_of_more_than_a_window_is_refused(make):
    """Chunks of Llama 4, and what Doge makes of its mask, are not what the starts of texts say."""
    model = apply(build(make()))
    row, _ = flattened()
    with pytest.raises(NotImplementedError, match=r"attention_mask=a mask of more than a window"):
        model(**row, use_cache=False)
    row = {name: row[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():  # not of each text alone: transformers 5.17 takes chunks of the whole row
        expected, ours = (model(**row, use_cache=False).logits for model in (build(make()), model))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_a_compiled_model_refuses_chunks_too():
    model = torch.compile(apply(build(chunked())), backend="eager")
    row, _ = flattened()
    with pytest.raises(NotImplementedError, match=r"attention_mask=a mask of more than a window"):
        model(**row, use_cache=False)


def test_a_window_to_both_sides_is_that_of_the_mask():
    """Mistral calls with one key less to either side than its mask has."""
    config = CONFIGS["mistral"]()
    config.is_causal = False
    model = apply(build(config))
    row, texts = flattened()
    with torch.no_grad():
        logits = model(**row, use_cache=False).logits
        alone = [model(input_ids=text, use_cache=False).logits for text in texts]
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("starts", "sentence"),
    [
        ([0, 5, 40], "cu_seq_q up to 39, .* got 40; .* correct the call's cu_seq_lens_q$"),
        ([0, 39, 5], r"cu_seq_q\[2\] of at least 39, .* got 5; no pattern .* cu_seq_lens_q$"),
    ],
    ids=["past the row", "falling"],
)
def test_of_wrong_starts_the_call_is_to_be_corrected(device, starts, sentence):
    if device != "cpu":
        pytest.skip("contents are read on the CPU alone")
    row, _ = flattened()
    starts = torch.tensor(starts, dtype=torch.int32)
    model = apply(build(CONFIGS["llama"]()), sa.Band((3, 0)))
    with pytest.raises(ValueError, match=sentence):
        model(**row | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}, use_cache=False)

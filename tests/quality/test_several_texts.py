"""The advisor on texts of several lengths: pairs are counted over all of them, padding left out."""

import pytest
import torch

pytest.importorskip("transformers")

import sparse_attn as sa

PATTERNS = {
    "band": sa.Band((7, 0)),
    "sinks": sa.Band((15, 0), sinks=4),
    "topk": sa.TopK(5),
}


def pairs_of_search(llama, inputs, validate):
    advice = sa.advise(llama, inputs, 0.5, validate=validate, patterns=PATTERNS, progress=False)
    found = {tried.name: tried.pairs for tried in advice.tried}
    return {name: found[f"{name}, everywhere"] for name in PATTERNS}


def pairs_of_model(llama, inputs):
    judged = sa.quality.model(llama, inputs, PATTERNS, progress=False)
    return {name: judged[name].pairs for name in PATTERNS}


def padded(ids, *tokens):
    """A batch of texts of so many tokens, padded on the right."""
    length = ids.shape[1] // len(tokens)
    ends = torch.tensor(tokens, device=ids.device)[:, None]
    mask = torch.arange(length, device=ids.device) < ends
    return {"input_ids": ids.view(len(tokens), length), "attention_mask": mask.long()}


CASES = {
    "of-their-own": lambda ids: [ids[:, :180], ids[:, 180:210]],
    "of-a-batch": lambda ids: padded(ids, 128, 30),
    "one-of-padding-alone": lambda ids: padded(ids, 0, 128),
    "a-batch-of-padding-alone": lambda ids: [padded(ids, 0), padded(ids, 200)],
}


@pytest.mark.parametrize("texts", CASES.values(), ids=CASES)
def test_the_search_counts_the_pairs_of_all_texts(llama, ids, texts):
    inputs = texts(ids)
    found = pairs_of_search(llama, inputs, ids[:, :100])
    assert found == pytest.approx(pairs_of_model(llama, inputs))

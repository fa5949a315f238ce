"""What the advisor holds out of its inputs to validate on, and the inputs that it refuses."""

import pytest
import torch

pytest.importorskip("transformers")
from tiny_models import CONFIGS, build, text

import sparse_attn as sa

PATTERNS = {"narrow": sa.Band((3, 0), sinks=1), "wide": sa.Band((31, 0), sinks=4)}


def advise(model, inputs, **options):
    return sa.advise(model, inputs, 0.7, patterns=PATTERNS, progress=False, **options)


def test_texts_are_held_out(llama, ids):
    one, other = ids[:, :128], ids[:, 128:]
    split = advise(llama, ids)
    assert advise(llama, one, validate=other).policy == split.policy
    assert advise(llama, [one, other]).validation[-1] == split.validation[-1]
    short = advise(llama, ids[:, :100])
    assert short.validation == () and "on the calibration text alone" in short.summary()


def test_a_tokenizers_output_is_cut_in_two(llama, ids):
    split = advise(llama, ids)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (30, 3))
    padded = {"input_ids": torch.nn.functional.pad(ids, (30, 3)), "attention_mask": mask}
    assert advise(llama, padded).policy == split.policy
    assert advise(llama, padded).validation[-1] == split.validation[-1]
    both = torch.cat([ids[:, :128], ids[:, 128:], ids[:, :128]])
    mask = torch.ones_like(both)
    mask[2] = 0  # no text
    batch = {"input_ids": both, "attention_mask": mask}
    assert advise(llama, batch).validation[-1] == split.validation[-1]
    alone = advise(llama, {"input_ids": ids, "position_ids": torch.arange(256)[None]})
    assert alone.validation == () and "on the calibration text alone" in alone.summary()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda ids: dict(input_ids=ids, attention_mask=torch.zeros_like(ids)), "not padding"),
        (lambda ids: ids[:, :0], r"got input_ids of shape \(2, 0\)"),
        (lambda ids: ids[0], r"got shape \(24,\); ids of one text go in as ids\[None\]"),
    ],
    ids=["padding", "empty", "no batch"],
)
def test_inputs_without_tokens_are_sentences(on_device, change, sentence):
    model = build(CONFIGS["llama"](), "sdpa")
    with pytest.raises(ValueError, match=sentence):
        sa.advise(model, change(text()[0]), progress=False)

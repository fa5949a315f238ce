"""Texts of several lengths: the advisor counts the pairs of all, and padding counts nowhere."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import CONFIGS, build
from torch.nn import functional

import sparse_attn as sa
from sparse_attn._binding import bound
from sparse_attn._observe import watching
from sparse_attn.advisor._local import Local

PATTERNS = {
    "band": sa.Band((7, 0)),
    "sinks": sa.Band((15, 0), sinks=4),
    "strided": sa.Strided(4, 16),
    "topk": sa.TopK(5),
    "blocks": sa.BlockTopK(16, mass=None, budget_blocks=3, local_blocks=1),
}


def pairs_of_search(llama, inputs, validate):
    advice = sa.advise(llama, inputs, 0.5, validate=validate, patterns=PATTERNS, progress=False)
    found = {tried.name: tried.pairs for tried in advice.tried}
    return {name: found[f"{name}, everywhere"] for name in PATTERNS}


def pairs_of_model(llama, inputs):
    judged = sa.quality.model(llama, inputs, PATTERNS, progress=False)
    return {name: judged[name].pairs for name in PATTERNS}


def padded(ids, *tokens, left=False):
    """A batch of texts of so many tokens, padded on a side."""
    length = ids.shape[1] // len(tokens)
    ends = torch.tensor(tokens, device=ids.device)[:, None]
    mask = torch.arange(length, device=ids.device) < ends
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids.view(len(tokens), length), "attention_mask": mask.long()}


CASES = {
    "of-their-own": lambda ids: [ids[:, :180], ids[:, 180:210]],
    "of-a-batch": lambda ids: padded(ids, 128, 30),
    "padded-on-the-left": lambda ids: padded(ids, 128, 30, left=True),
    "one-of-padding-alone": lambda ids: padded(ids, 0, 128),
    "a-batch-of-padding-alone": lambda ids: [padded(ids, 0), padded(ids, 200)],
}


@pytest.mark.parametrize("texts", CASES.values(), ids=CASES)
def test_the_search_counts_the_pairs_of_all_texts(llama, ids, texts):
    inputs = texts(ids)
    found = pairs_of_search(llama, inputs, ids[:, :100])
    assert found == pytest.approx(pairs_of_model(llama, inputs))


def test_candidates_of_encoders_count_from_their_texts(on_device):
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    padding = torch.zeros(2, 90, dtype=torch.bool)
    padding[1, :37] = True
    inputs = {"src": torch.randn(2, 90, 32), "src_key_padding_mask": padding}
    found = pairs_of_search(encoder, inputs, {"src": torch.randn(1, 90, 32)})
    assert found == pytest.approx(pairs_of_model(encoder, inputs))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_layers_figures_do_not_depend_on_the_side_of_padding(on_device, name):
    model, ids = build(CONFIGS[name]()), torch.randint(3, 97, (1, 30))
    figures = []
    for left in (False, True):
        local = Local({"sinks": sa.Band((7, 0), sinks=4), "topk": sa.TopK(5), "dense": sa.Full()})
        side = (20, 0) if left else (0, 20)
        inputs = {"input_ids": functional.pad(ids, side), "attention_mask": torch.ones_like(ids)}
        inputs["attention_mask"] = functional.pad(inputs["attention_mask"], side)
        place = functional.pad(torch.arange(30)[None], side)
        with torch.no_grad(), bound("test", model, sa.Full()), watching(local):
            model(**inputs, position_ids=place)
        figures.append([row for own in local.figures.values() for row in own.values()])
    assert figures[0] == [pytest.approx(row, rel=1e-4) for row in figures[1]]


def test_candidates_rank_no_keys_that_a_model_forbids_by_its_lowest_number(on_device):
    class Low(torch.nn.Module):
        def forward(self, x, tokens):
            mask = torch.zeros(tokens.shape).masked_fill(~tokens, torch.finfo(x.dtype).min)
            x = x.unflatten(-1, (2, 16)).transpose(1, 2)
            return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, None])

    tokens = torch.arange(64)[None] < 20
    inputs = {"x": torch.randn(1, 64, 32), "tokens": tokens}
    local = Local({"topk": sa.TopK(20), "dense": sa.Full()})
    with torch.no_grad(), bound("test", model := Low().eval(), sa.Full()), watching(local):
        model(**inputs)
    assert all(own["topk"][:2] == pytest.approx((0, 1)) for own in local.figures.values())


class Inside(torch.nn.Module):
    """A model of one's own around torch's."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, src, src_key_padding_mask):
        return self.encoder(src, src_key_padding_mask=src_key_padding_mask)


@pytest.mark.parametrize(
    ("size", "is_inside"), [(3, False), (40, False), (3, True)], ids=["torchs", "square", "inside"]
)
def test_padding_is_that_of_models_of_length_and_batch(on_device, size, is_inside):
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    model = Inside(encoder) if is_inside else encoder
    src, padding = torch.randn(40, size, 32), torch.zeros(size, 40, dtype=torch.bool)
    padding[1:, 13:] = True
    inputs = {"src": src, "src_key_padding_mask": padding}
    with torch.no_grad():
        dense = encoder(**inputs)
        swapped = sa.swap_attention(encoder, sa.Band(3))
        own = swapped(**inputs)
        sa.restore_attention(encoder)
    found = sa.quality.model(model, inputs, {"band": sa.Band(3)}, progress=False)
    cosine = torch.cosine_similarity(own, dense, -1)[~padding.mT].mean()
    assert found.positions == 40 + 13 * (size - 1)
    assert found["band"].cosine == pytest.approx(cosine.item(), rel=1e-5)

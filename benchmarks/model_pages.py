"""Pages of what something keeps, or costs, of the real model on its texts: what they share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from sparse_attn.quality._figures import Output, Sums

from . import real_model
from .machine import describe, slug
from .report import markdown
from .store import RESULTS

#: Under which transformers knows the attention that a page measures.
_KEY = "sparse_attn_page"


@contextmanager
def attending(model: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """Run `model` with an attention function of transformers."""
    before = model.config._attn_implementation
    AttentionInterface.register(_KEY, attention)
    model.set_attn_implementation(_KEY)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def figures(own: Output, dense: Output, inputs: dict[str, Any]) -> tuple[str, str, str]:
    """Return perplexity, and top-1 and KL beside `dense`, as they are written."""
    sums = Sums()
    sums.add(own, dense, inputs, True)
    top = f"{sums.same / sums.judged:.1%}"
    return f"{sums.perplexity():.3f}", top, f"{max(0.0, sums.kl / sums.judged):.4f}"


@dataclass(frozen=True)
class Page:
    """What a program of ``python -m benchmarks`` measures on texts, and says of it.

    `measure(model, ids)` returns the rows of a text under `header`; `note` has places for
    ``{length}`` and ``{machine}``; `lengths` are tokens of each text, by the device's kind.
    """

    program: str
    title: str
    note: str
    texts: Sequence[str]
    lengths: dict[str, int]
    header: Sequence[str]
    measure: Callable[[Any, torch.Tensor], list[tuple[str, ...]]]

    def write(self, arguments: list[str] | None, about: str | None) -> int:
        """Measure and write; 1 where the model cannot be had."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.program}", description=about
        )
        parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the one at hand")
        usual = ", ".join(f"{length} on {kind}" for kind, length in self.lengths.items())
        parser.add_argument("--length", type=int, help=f"tokens of each text ({usual})")
        parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
        options = parser.parse_args(arguments)
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        file = real_model.find()
        if file is None:
            what = f"expected the package {real_model.PACKAGE}, got none"
            print(f"{self.program}: {what}", file=sys.stderr)
            return 1
        length = options.length or self.lengths[device.type]
        model, tokenizer = real_model.load(file, device, torch.float32)
        tables = []
        for name in self.texts:
            rows = self.measure(model, real_model.tokens(tokenizer, name, length))
            tables.append(f"## {name}\n\n{markdown(self.header, rows)}")
            print(tables[-1], flush=True)
        own = describe(device)
        machine = f"{own.get('gpu', own['processor'])}, torch {own['torch']}, {own['date']}"
        note = self.note.format(length=length, machine=machine)
        path = options.output / f"{self.program.replace('_', '-')}-{slug(device)}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {self.title}: {real_model.NAME}\n\n{note}\n\n" + "\n".join(tables))
        return 0

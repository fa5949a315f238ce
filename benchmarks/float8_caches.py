"""What caches of 8 bits cost a real model: ``python -m benchmarks.float8_caches``.

SmolLM2-135M-Instruct in bfloat16 reads texts with keys and values as they are, and rounded to
float8_e4m3fn in every layer; both stand beside the model in float32. Writes a page into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AttentionInterface

import sparse_attn as sa
from sparse_attn.quality._figures import Output, Sums

from . import real_model
from .machine import describe, slug
from .quality import LENGTH, TEXTS
from .store import RESULTS

KEY = "sparse_attn_float8"
#: Which scales the codes have, by row; None is no rounding.
SCALES = {"16 bits": None, "8 bits, a scale for each head": "head", "8 bits, one scale": "tensor"}
HEADER = ("cache", "perplexity", "top-1", "KL", "relative L1 of a layer")


def attention_of(per: str | None, errors: list[float]) -> Callable[..., Any]:
    """Return an attention function of transformers for whole causal texts; `errors` by layer."""

    def attend(
        module: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        call: dict[str, Any] = {"is_causal": True, "scale": scaling}
        plain = out = sa.fused_attention(query, key, value, **call)
        if per is not None:
            key, value, call["key_scale"], call["value_scale"] = sa.quantize_cache(
                key, value, per=per
            )
            out = sa.fused_attention(query, key, value, **call)
        difference = (out.float() - plain.float()).abs().sum(-1)
        errors.append(float((difference / plain.float().abs().sum(-1)).mean()))
        return out.transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def caches(model: Any, per: str | None) -> Iterator[list[float]]:
    """Run `model` on such caches; gives the relative L1 of each attention call to 16 bits."""
    before, errors = model.config._attn_implementation, list[float]()
    AttentionInterface.register(KEY, attention_of(per, errors))
    model.set_attn_implementation(KEY)
    try:
        yield errors
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor) -> list[tuple[str, ...]]:
    """Return the rows of one text: of a float32 model, and of it in bfloat16 by caches."""
    inputs = {"input_ids": ids.to(model.device)}
    dense = Output(model.to(torch.float32)(**inputs).logits, True)
    rows = [_row("float32", dense, dense, inputs, [])]
    model.to(torch.bfloat16)
    for name, per in SCALES.items():
        with caches(model, per) as errors:
            own = Output(model(**inputs).logits, True)
        rows.append(_row(name, own, dense, inputs, errors if per else []))
    return rows


def _row(
    name: str, own: Output, dense: Output, inputs: dict[str, Any], errors: list[float]
) -> tuple[str, ...]:
    sums = Sums()
    sums.add(own, dense, inputs, True)
    error = f"{fmean(errors):.1%} ({max(errors):.1%})" if errors else ""
    figures = f"{sums.perplexity():.3f}", f"{sums.same / sums.judged:.1%}"
    return (name, *figures, f"{max(0.0, sums.kl / sums.judged):.4f}", error)


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as a table of Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 where the model cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float8_caches", description=__doc__)
    parser.add_argument("--length", type=int, help="tokens of each text (2048; 8192 on a GPU)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the one at hand")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    file = real_model.find()
    if file is None:
        package = real_model.PACKAGE
        print(f"float8_caches: expected the package {package}, got none", file=sys.stderr)
        return 1
    length = options.length or LENGTH[device.type]
    model, tokenizer = real_model.load(file, device, torch.float32)
    tables = []
    for name in TEXTS:
        rows = measure(model, real_model.tokens(tokenizer, name, length))
        tables.append(f"## {name}\n\n{table(rows)}\n")
        print(tables[-1], flush=True)
    machine = describe(device)
    place = machine.get("gpu", machine["processor"])
    path = options.output / f"float8-caches-{slug(device)}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"# Caches of 8 bits: {real_model.NAME}\n\n"
        f"{length} tokens of each text; {place}, torch {machine['torch']}, {machine['date']}. The "
        "model in bfloat16, its keys and values rounded by `quantize_cache` in every layer, beside "
        "the model in float32: top-1 and KL are to that one. Relative L1 of attention's output is "
        "to that of keys and values in 16 bits, mean (and highest) of the layers.\n\n"
        + "\n".join(tables)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

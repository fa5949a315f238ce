"""What caches of 8 bits cost a real model: ``python -m benchmarks.float8_caches``.

SmolLM2-135M-Instruct in bfloat16 reads texts with keys and values as they are, and rounded to
float8_e4m3fn in every layer; both stand beside the model in float32. Writes a page into
benchmarks/results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch

import sparse_attn as sa
from sparse_attn.quality._figures import Output

from .model_pages import Page, attending, figures
from .quality import LENGTH, TEXTS

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
    errors = list[float]()
    with attending(model, attention_of(per, errors)):
        yield errors


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
    error = f"{fmean(errors):.1%} ({max(errors):.1%})" if errors else ""
    return (name, *figures(own, dense, inputs), error)


PAGE = Page(
    "float8_caches",
    "Caches of 8 bits",
    "{length} tokens of each text; {machine}. The model in bfloat16, its keys and values rounded "
    "by `quantize_cache` in every layer, beside the model in float32: top-1 and KL are to that "
    "one. Relative L1 of attention's output is to that of keys and values in 16 bits, mean (and "
    "highest) of the layers.",
    TEXTS,
    LENGTH,
    HEADER,
    measure,
)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 where the model cannot be had."""
    return PAGE.write(arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())

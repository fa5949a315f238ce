"""What decode by a key sketch keeps of a real model: ``python -m benchmarks.sketch_decode``.

SmolLM2-135M-Instruct reads texts. Each of the last tokens chooses blocks of 16 keys of its own from
a `KeySketch`, and its output stands beside dense attention's. Writes a page into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

import sparse_attn as sa
from sparse_attn.quality._figures import Output, Sums

from . import real_model
from .machine import describe, slug
from .report import markdown
from .store import RESULTS

KEY = "sparse_attn_sketch_decode"
LENGTH, DECODED, PAGE = 8192, 1024, 64
TEXTS = ("pydoc", "reference")
HEADER = ("bits", "keys kept", "a list for each", "perplexity", "top-1", "KL")
#: Bits of the sketch, keys that are kept, and whose lists: of query heads, or of key heads.
SETTINGS = ((2, 512, "q"), (2, 1024, "q"), (2, 1024, "kv"), (4, 1024, "kv"))


def attention_of(decoded: int, bits: int, tokens: int, group: str) -> Callable[..., Any]:
    """Return an attention function of transformers for one text, whose last tokens are decoded.

    These are sequences that share pages, and their lengths grow by one. A group of the sketch holds
    a text's later tokens too, but the blocks of a token's own group are always kept.
    """

    def attend(
        module: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        out = sa.fused_attention(query, key, value, is_causal=True, scale=scaling)
        length, device = key.shape[2], key.device
        keys, values = (x[0].transpose(0, 1).unflatten(0, (-1, PAGE)) for x in (key, value))
        table = torch.arange(length // PAGE, device=device, dtype=torch.int32)
        table = table.expand(decoded, -1).contiguous()
        used = torch.arange(length - decoded + 1, length + 1, device=device, dtype=torch.int32)
        sketch = sa.KeySketch(keys, bits, paged=True, block_table=table[-1:], seqused_k=used[-1:])
        chosen: dict[str, Any] = {"selector": "sketch", "budget_tokens": tokens, "group": group}
        pattern = sa.BlockTopK(16, sketch=sketch, **chosen)
        one_each = query[0, :, -decoded:].transpose(0, 1).unsqueeze(2)
        steps = sa.paged_attention(
            one_each, keys, values, table, used, pattern=pattern, scale=scaling
        )
        out[0, :, -decoded:] = steps.squeeze(2).transpose(0, 1)
        return out.transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def decoding(model: Any, decoded: int, bits: int, tokens: int, group: str) -> Iterator[None]:
    """Run `model` so."""
    before = model.config._attn_implementation
    AttentionInterface.register(KEY, attention_of(decoded, bits, tokens, group))
    model.set_attn_implementation(KEY)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor, decoded: int = DECODED) -> list[tuple[str, ...]]:
    """Return the rows of one text, of its last `decoded` tokens; its length is whole pages."""
    ids = ids.to(model.device)
    last = {"input_ids": ids[:, -decoded:]}

    def read() -> Output:
        return Output(model(input_ids=ids, logits_to_keep=decoded).logits, True)

    dense = read()
    rows = [("", "all", "", *_figures(dense, dense, last))]
    for bits, tokens, group in SETTINGS:
        with decoding(model, decoded, bits, tokens, group):
            own = read()
        head = "query head" if group == "q" else "key head"
        rows.append((str(bits), str(tokens), head, *_figures(own, dense, last)))
    return rows


def _figures(own: Output, dense: Output, inputs: dict[str, Any]) -> tuple[str, ...]:
    sums = Sums()
    sums.add(own, dense, inputs, True)
    top = f"{sums.same / sums.judged:.1%}"
    return f"{sums.perplexity():.3f}", top, f"{max(0.0, sums.kl / sums.judged):.4f}"


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 where the model cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sketch_decode", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the one at hand")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    file = real_model.find()
    if file is None:
        package = real_model.PACKAGE
        print(f"sketch_decode: expected the package {package}, got none", file=sys.stderr)
        return 1
    model, tokenizer = real_model.load(file, device, torch.float32)
    tables = []
    for name in TEXTS:
        rows = measure(model, real_model.tokens(tokenizer, name, LENGTH))
        tables.append(f"## {name}\n\n{markdown(HEADER, rows)}")
        print(tables[-1], flush=True)
    machine = describe(device)
    place = machine.get("gpu", machine["processor"])
    path = options.output / f"sketch-decode-{slug(device)}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"# Decode by a key sketch: {real_model.NAME}\n\n"
        f"{LENGTH} tokens of each text, float32; {place}, torch {machine['torch']}, "
        f"{machine['date']}. Each of the last {DECODED} tokens chooses blocks of 16 keys of its "
        f'own, `BlockTopK(16, selector="sketch", budget_tokens=...)` over pages of {PAGE}; the '
        "tokens before see all keys. Figures are of those tokens, top-1 and KL beside the model's "
        "own dense attention.\n\n" + "\n".join(tables)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

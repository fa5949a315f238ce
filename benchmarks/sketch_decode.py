"""What decode by a key sketch keeps of a real model: ``python -m benchmarks.sketch_decode``.

SmolLM2-135M-Instruct reads texts. Each of the last tokens chooses blocks of 16 keys of its own from
a `KeySketch`, and its output stands beside dense attention's. Writes a page into
benchmarks/results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import sparse_attn as sa
from sparse_attn.quality._figures import Output

from .model_pages import Page, attending, figures

LENGTH, DECODED, PAGE_SIZE = 8192, 1024, 64
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
        keys, values = (x[0].transpose(0, 1).unflatten(0, (-1, PAGE_SIZE)) for x in (key, value))
        table = torch.arange(length // PAGE_SIZE, device=device, dtype=torch.int32)
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


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor, decoded: int = DECODED) -> list[tuple[str, ...]]:
    """Return the rows of one text, of its last `decoded` tokens; its length is whole pages."""
    ids = ids.to(model.device)
    last = {"input_ids": ids[:, -decoded:]}

    def read() -> Output:
        return Output(model(input_ids=ids, logits_to_keep=decoded).logits, True)

    dense = read()
    rows: list[tuple[str, ...]] = [("", "all", "", *figures(dense, dense, last))]
    for bits, tokens, group in SETTINGS:
        with attending(model, attention_of(decoded, bits, tokens, group)):
            own = read()
        head = "query head" if group == "q" else "key head"
        rows.append((str(bits), str(tokens), head, *figures(own, dense, last)))
    return rows


PAGE = Page(
    "sketch_decode",
    "Decode by a key sketch",
    "{length} tokens of each text, float32; {machine}. "
    f"Each of the last {DECODED} tokens chooses blocks of 16 keys of its own, "
    f'`BlockTopK(16, selector="sketch", budget_tokens=...)` over pages of {PAGE_SIZE}; the tokens '
    "before see all keys. Figures are of those tokens, top-1 and KL beside the model's own dense "
    "attention.",
    TEXTS,
    {"cpu": LENGTH, "cuda": LENGTH},
    HEADER,
    measure,
)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 where the model cannot be had."""
    return PAGE.write(arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())

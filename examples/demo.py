"""Sparse attention at work in a real model on real text: ``make demo``.

Part 1 embeds passages of Python's documentation with all-MiniLM-L6-v2, every variant swapped in,
and compares with the model's dense attention. Part 2 joins one layer's queries, keys and values
over a long text and times every variant beside torch's SDPA. Both parts go into one picture. Part 3
searches a policy for a real decoder with the advisor, in the time that is left of three minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import advised
import minilm
import picture
import torch
import torch.nn.functional as F
from tqdm import tqdm

import sparse_attn as sa
from benchmarks.machine import processor_name
from benchmarks.memory import peak_bytes
from benchmarks.timing import Timer, interleaved
from sparse_attn.testing import reference_attention

PASSAGES = 48
PASSAGE_TOKENS = 256
CHECKED_ROWS = 256
SECONDS = 165  # of all parts
LONG = {"cpu": 4096, "cuda": 16384}
DTYPE = {"cpu": torch.float32, "cuda": torch.float16}

MODEL_TEXT = """
1. In the model: all-MiniLM-L6-v2 embeds {count} passages of Python's documentation, {tokens} tokens
   each, with every variant swapped into its 6 layers. Time and memory are those of one layer's
   attention on a batch of {batch}. Error is the greatest difference from float64 attention with the
   dense mask. Cosine and top hit compare with the embeddings of dense attention; each passage's
   summary line is a search.
"""
LONG_TEXT = """
2. Where length counts: one layer's queries, keys and values over {length} tokens of the same text,
   12 heads of 32. Cosine is the mean over the rows' outputs, beside dense attention's.
"""

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One row of the tables."""

    name: str
    pattern: Any
    text: str  # the pattern in words


@dataclass
class Result:
    """What one variant did; times in milliseconds."""

    variant: Variant
    share: float
    ms: float = 0.0
    peak: int = 0
    error: float = 0.0
    cosine: float = 0.0
    agreement: float = 0.0
    picture: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # bool (rows, keys)


def variants(length: int, window: int, block: int, device: torch.device) -> list[Variant]:
    """Return the six variants (and block top-k), sized for a sequence of ``length`` tokens."""
    layout = sa.BlockLayout.bigbird(
        length, length, block, block, window=1, num_global=1, num_random=1, device=device
    )
    band = sa.Band((window, window), global_tokens=1)
    dilated = sa.Dilated((window, window), 2)
    return [
        Variant("naive", sa.Full(), "all pairs, scores in memory"),
        Variant("fused", sa.Full(), "all pairs in one pass"),
        Variant("band", band, f"{window} keys each side, 1 global token"),
        Variant("dilated", dilated, f"{window} taps each side, step 2"),
        Variant("block-sparse", sa.BlockSparse(layout), f"BigBird, blocks of {block}"),
        Variant("top-k", sa.TopK(window), f"best {window} keys of each query"),
        Variant(
            "block top-k",
            sa.BlockTopK(block, None, budget_share=0.2, local_blocks=1),
            f"best fifth of blocks of {block}",
        ),
    ]


def call_of(
    variant: Variant, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **common: Any
) -> Call:
    """Return the call of a variant on these tensors."""
    attend: Any = sa.naive_attention if variant.name == "naive" else sa.sparse_attention
    return lambda: attend(query, key, value, variant.pattern, **common)


def share_of(variant: Variant, query: torch.Tensor, key: torch.Tensor) -> float:
    """Return the share of (query, key) pairs that the variant attends to."""
    pattern = variant.pattern
    if isinstance(pattern, sa.BlockTopK):
        pattern = sa.BlockSparse(sa.select_blocks(query, key, pattern))
    return float(pattern.density(query.shape[2], key.shape[2]))


def picture_of(variant: Variant, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return what the first head of the first passage attends to, bool (rows, keys)."""
    rows, keys = query.shape[2], key.shape[2]
    pattern = variant.pattern
    if isinstance(pattern, sa.TopK):
        score = (query[0, 0] @ key[0, 0].mT).float()
        best = score.topk(pattern.k, -1).indices
        return torch.zeros(rows, keys, dtype=torch.bool, device=key.device).scatter(1, best, True)
    if isinstance(pattern, sa.BlockTopK):
        pattern = sa.BlockSparse(sa.select_blocks(query, key, pattern))
    mask = pattern.mask(rows, keys)
    return mask if mask.dim() == 2 else mask[0, 0]


def measure(
    calls: dict[str, Call], results: list[Result], timer: Timer, step: Callable[[], None]
) -> float:
    """Fill in time and peak memory; return SDPA's time, which is under the name ``sdpa``."""
    for result in results:
        result.peak = peak_bytes(calls[result.variant.name], timer.device)
        step()
    times = interleaved(timer.samples(calls, 5.0), rounds=3)
    for result in results:
        result.ms = statistics.median(times[result.variant.name])
    return statistics.median(times["sdpa"])


def in_the_model(
    encoder: minilm.MiniLM, text: list[minilm.Passage], timer: Timer, step: Callable[[str], None]
) -> tuple[list[Result], float]:
    """Part 1: every variant swapped into the model, beside the model's own dense attention."""
    queries = [p.query for p in text]
    bodies = [p.text for p in text]
    dense_model = encoder.load("demo_recorder")
    dense = encoder.embed(dense_model, bodies, PASSAGE_TOKENS)
    query, key, value = encoder.recorder.calls[0]
    encoder.recorder.calls.clear()
    asked = encoder.embed(encoder.load(), queries, 64)
    truth = (asked @ dense.T).argmax(-1)
    step("dense")

    real = encoder.tokens(bodies[: len(query)], PASSAGE_TOKENS)["attention_mask"].sum(-1)
    bounds = torch.stack([torch.zeros_like(real), real], -1).to(torch.int32)
    bounds = bounds[:, None, None].expand(-1, 1, PASSAGE_TOKENS, 2).to(timer.device)
    padding = torch.arange(PASSAGE_TOKENS, device=timer.device) < real.to(timer.device)[:, None]
    padding = padding[:, None, None].expand(-1, 1, PASSAGE_TOKENS, -1)

    calls: dict[str, Call] = {
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=padding)
    }
    results = []
    for variant in variants(PASSAGE_TOKENS, 32, 16, timer.device):
        call = call_of(variant, query, key, value, key_bounds=bounds)
        exact = reference_attention(query, key, value, variant.pattern, key_bounds=bounds)[0]
        result = Result(variant, share_of(variant, query, key))
        result.error = (call().double() - exact).abs().max().item()
        vectors = encoder.embed(swapped(encoder, variant), bodies, PASSAGE_TOKENS)
        result.cosine = (vectors * dense).sum(-1).mean().item()
        result.agreement = ((asked @ vectors.T).argmax(-1) == truth).float().mean().item()
        result.picture = picture_of(variant, query, key)
        calls[variant.name] = call
        results.append(result)
        step(variant.name)
    sdpa = measure(calls, results, timer, lambda: step("timing"))
    return results, sdpa


def swapped(encoder: minilm.MiniLM, variant: Variant) -> Any:
    """Return the model with the variant in every layer."""
    if variant.name == "naive":
        return encoder.load("demo_naive")
    policy = sa.Policy(variant.pattern, dense_below=0)
    return sa.integrations.transformers.apply(encoder.load(), policy)


def over_a_long_text(
    encoder: minilm.MiniLM,
    text: list[minilm.Passage],
    length: int,
    timer: Timer,
    step: Callable[[str], None],
) -> tuple[list[Result], float]:
    """Part 2: every variant beside SDPA on one layer's tensors over a long text."""
    joined = " ".join(f"{p.query} {p.text}" for p in text)
    query, key, value = encoder.long_sequence(joined, length)
    step("text")
    window = max(64, length // 64)
    calls: dict[str, Call] = {"sdpa": lambda: F.scaled_dot_product_attention(query, key, value)}
    dense = calls["sdpa"]().double()
    tail = query[:, :, -CHECKED_ROWS:]
    results = []
    for variant in variants(length, window, 64, timer.device):
        call = call_of(variant, query, key, value)
        out = call().double()
        result = Result(variant, share_of(variant, query, key))
        exact = reference_attention(tail, key, value, tail_of(variant.pattern))[0]
        result.error = (out[:, :, -CHECKED_ROWS:] - exact).abs().max().item()
        result.cosine = F.cosine_similarity(out, dense, dim=-1).mean().item()
        calls[variant.name] = call
        results.append(result)
        step(variant.name)
    return results, measure(calls, results, timer, lambda: step("timing"))


def tail_of(pattern: Any) -> Any:
    """Return the pattern of the last rows alone: lists go by row, the others by position."""
    if not isinstance(pattern, sa.BlockSparse):
        return pattern
    layout = pattern.layout
    rows = CHECKED_ROWS // layout.block_q
    return sa.BlockSparse(
        sa.BlockLayout.from_mask(layout.to_mask()[:, :, -rows:], layout.block_q, layout.block_kv)
    )


def print_table(results: list[Result], sdpa: float, *, model: bool) -> None:
    """Print one part's rows."""
    kept = ("cosine to dense", "same top hit") if model else ("cosine to dense",)
    head = ["variant", "pattern", "pairs", "time ms", "vs SDPA", "peak MiB", "error", *kept]
    rows = [
        [
            "SDPA",
            "all pairs, torch's own",
            "100.0%",
            f"{sdpa:.2f}",
            "1.00x",
            "",
            "",
            *["" for _ in kept],
        ]
    ]
    for r in results:
        row = [
            r.variant.name,
            r.variant.text,
            f"{r.share:.1%}",
            f"{r.ms:.2f}",
            f"{sdpa / r.ms:.2f}x",
            f"{r.peak / 2**20:.1f}",
            f"{r.error:.1e}",
        ]
        row += [f"{r.cosine:.4f}", f"{r.agreement:.0%}"][: len(kept)]
        rows.append(row)
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    for line in (head, ["-" * w for w in widths], *rows):
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def main() -> None:
    """Run all parts and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--length", type=int, help="tokens of the long part, a multiple of 512")
    parser.add_argument("--model", help="folder of the model instead of the installed package")
    parser.add_argument("--output", default="demo.png", help="where the picture goes")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a device of this machine, got cuda")
    if options.model and not Path(options.model, "config.json").exists():
        parser.error(f"--model: expected a folder with config.json, got {options.model}")
    if not Path(options.output).parent.is_dir():
        parser.error(f"--output: expected a file in a folder that exists, got {options.output}")
    length = LONG[device.type] if options.length is None else options.length
    if length < 512 or length % 512:
        parser.error(f"--length: expected a multiple of 512, got {length}")
    began = time.monotonic()
    place = torch.cuda.get_device_name() if device.type == "cuda" else processor_name()
    place += f", torch threads: {torch.get_num_threads()}" if device.type == "cpu" else ""

    timer = Timer(device)
    text = minilm.passages()
    names = [v.name for v in variants(512, 64, 64, device)]
    with torch.no_grad(), tqdm(total=2 + 4 * len(names), file=sys.stderr) as bar:

        def step(name: str) -> None:
            bar.set_description(f"{name:>12}")
            bar.update()

        encoder = minilm.MiniLM(options.model, device, DTYPE[device.type])
        short, short_sdpa = in_the_model(encoder, text[:PASSAGES], timer, step)
        long, long_sdpa = over_a_long_text(encoder, text, length, timer, step)

    kind = str(DTYPE[device.type]).removeprefix("torch.")
    print(f"\nsparse_attn {sa.__version__} on {place}; torch {torch.__version__}, {kind}")
    print(MODEL_TEXT.format(count=PASSAGES, tokens=PASSAGE_TOKENS, batch=minilm.BATCH))
    print_table(short, short_sdpa, model=True)
    print(LONG_TEXT.format(length=length))
    print_table(long, long_sdpa, model=False)
    picture.draw(options.output, short, long, long_sdpa, length, f"{place}, {kind}")
    print(f"\nPicture: {options.output}.")
    advised.advise(began + SECONDS - time.monotonic(), device, options.output)
    print(f"Done in {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()

"""Quality of every kind of pattern on a real model: ``make quality``.

SmolLM2-135M-Instruct reads two texts that nothing was tuned on; each policy's output stands beside
dense attention's. Writes a table, JSON and the picture (quality over pairs) into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import sparse_attn as sa

from . import real_model
from .machine import describe, slug
from .store import RESULTS

LENGTH = {"cpu": 2048, "cuda": 8192}
TEXTS = ("pydoc", "reference")
LOCAL_BLOCKS = 4


def policies(length: int) -> dict[str, sa.Policy | sa.Pattern]:
    """Return what is judged, by name; windows and counts go with the length."""
    window, few = length // 8, length // 32
    chosen: dict[str, sa.Pattern | None] = {
        f"band {window}, no sinks": sa.Band((window - 1, 0)),
        f"band {window}, 4 sinks": sa.Band((window - 1, 0), sinks=4),
        f"band {2 * window}, 4 sinks": sa.Band((2 * window - 1, 0), sinks=4),
        f"dilated {window // 2} by 2, 4 sinks": sa.Dilated((window // 2 - 1, 0), 2, sinks=4),
        f"strided {window}, every 16th": sa.Strided(window, 16),
        f"top-k {few}": sa.TopK(few),
        f"top-k {2 * few}": sa.TopK(2 * few),
        "block top-k, its defaults": sa.BlockTopK(),
    }
    for selector in ("mean", "antidiagonal", "minmax", "vertical_slash"):
        for share in (0.2, 0.4):
            name = f"blocks of 64, {selector}, {share:.0%}"
            chosen[name] = _blocks(selector=selector, budget_share=share)
    for selector in ("antidiagonal", "mixed"):
        for mass in (0.9, 0.95):
            name = f"blocks of 64, {selector}, mass {mass:.2f}"
            chosen[name] = _blocks(selector=selector, mass=mass)
    return {name: pattern for name, pattern in chosen.items() if pattern is not None}


def _blocks(**choice: Any) -> sa.Pattern | None:
    """Return a block top-k with local blocks; None where this version does not serve it."""
    query = torch.zeros(1, 1, 256, 64)
    try:
        pattern = sa.BlockTopK(64, local_blocks=LOCAL_BLOCKS, **choice)
        sa.select_blocks(query, query, pattern, is_causal=True)
    except (NotImplementedError, ValueError):
        return None
    return pattern


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 where the model cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--length", type=int, help="tokens of each text (2048; 8192 on a GPU)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the one at hand")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the model (bfloat16 on a GPU)"
    )
    parser.add_argument("--model", type=Path, help="a GGUF file instead of the installed one")
    parser.add_argument(
        "--advise", type=float, nargs="*", default=[], metavar="KEEP", help="also what advise finds"
    )
    parser.add_argument("--minutes", type=float, help="of each search")
    parser.add_argument("--only", default="", help="policies with this in their names")
    parser.add_argument(
        "--untimed", action="store_true", help="leave times out: on a machine that others use"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    file = options.model or real_model.find()
    if file is None:
        print(f"quality: expected the package {real_model.PACKAGE}, got none", file=sys.stderr)
        return 1
    length = options.length or LENGTH[device.type]
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model, tokenizer = real_model.load(file, device, dtype)
    judged = {name: p for name, p in policies(length).items() if options.only in name}
    path = options.output / f"quality-{slug(device)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    for keep in options.advise:
        advice = sa.advise(
            model,
            real_model.tokens(tokenizer, "calibration", length),
            keep,
            validate=real_model.tokens(tokenizer, "probe", length),
            minutes=options.minutes,
        )
        print(advice, flush=True)
        advice.save(path.with_name(f"{path.name}-advice-{keep}.json"))
        advice.report(path.with_name(f"{path.name}-advice-{keep}.html"))
        judged[f"advised, keep {keep}"] = advice.policy
    found: dict[str, sa.quality.ModelQuality] = {}
    for name in TEXTS:
        ids = real_model.tokens(tokenizer, name, length)
        found[name] = sa.quality.model(model, ids, judged, timed=not options.untimed)
        print(f"\n{name}, {length} tokens\n{found[name]}", flush=True)
    write(path, found, length, device, judged, str(model.dtype).removeprefix("torch."))
    return 0


def write(
    path: Path,
    found: dict[str, sa.quality.ModelQuality],
    length: int,
    device: torch.device,
    judged: Mapping[str, sa.Policy | sa.Pattern],
    dtype: str,
) -> None:
    """Write JSON, picture and page."""
    from matplotlib import pyplot

    machine = describe(device)
    texts = {name: quality.to_dict() for name, quality in found.items()}
    held = {
        "model": real_model.NAME,
        "length": length,
        "dtype": dtype,
        "machine": machine,
        "policies": {name: str(policy) for name, policy in judged.items()},
        "texts": texts,
    }
    path.with_suffix(".json").write_text(json.dumps(held, indent=1) + "\n")
    figure, axes = pyplot.subplots(1, len(found), figsize=(18, 6), layout="constrained")
    for ax, (name, quality) in zip(axes, found.items(), strict=True):
        quality.plot(ax)
        ax.set_title(f"{real_model.NAME}, {name}, {length} tokens")
    figure.savefig(path.with_suffix(".png"), dpi=110)
    place = machine.get("gpu", machine["processor"])
    tables = "\n\n".join(f"## {name}\n\n```\n{found[name]}\n```" for name in found)
    path.with_suffix(".md").write_text(
        f"# Quality of patterns on {real_model.NAME}\n\n"
        f"{length} tokens of each text, {dtype}; {place}, torch {machine['torch']}, "
        f"{machine['date']}. Dense is the model's own attention; pairs are of the causal ones; "
        "KL and top-1 are over all positions. Seconds, where they were taken, are of one forward "
        f"each: no benchmark of speed.{_forced(length)}\n\n"
        f"![quality over pairs]({path.with_suffix('.png').name})\n\n{tables}\n"
    )


def _forced(length: int) -> str:
    """Say what the forced blocks of 64 are of the causal pairs, where that is much."""
    blocks = -(-length // 64)
    query = torch.zeros(1, 1, length, 16)
    pattern = sa.BlockTopK(64, budget_blocks=1, local_blocks=LOCAL_BLOCKS)
    share = float(sa.quality.compare(query, query, query, pattern, is_causal=True).pairs)
    if share < 0.2:
        return ""
    return (
        f" Blocks of 64 always keep the first and {LOCAL_BLOCKS} local ones: at {blocks} blocks "
        f"these are {share:.0%} of the pairs, whatever the budget."
    )


if __name__ == "__main__":
    sys.exit(main())

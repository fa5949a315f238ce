"""Quality of every kind of pattern on a real model: ``make quality``.

SmolLM2-135M-Instruct reads four texts that nothing was tuned on; each policy's output stands beside
dense attention's. In bfloat16 rounding alone moves tokens, so figures are of float32, and on a GPU
of bfloat16 too, beside another dense kernel's. Writes tables, JSON and the picture (quality over
pairs) into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import sparse_attn as sa

from . import real_model
from .machine import describe, slug
from .store import RESULTS

LENGTH = {"cpu": 2048, "cuda": 8192}
TEXTS = ("pydoc", "reference", "language", "torch")
DTYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}
LOCAL_BLOCKS = 4
ADVISED = "advised, keep "
DEFAULTS = "block top-k, its defaults"
Found = dict[str, sa.quality.ModelQuality]  # by text


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
        DEFAULTS: sa.BlockTopK(),
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
        "--dtype",
        choices=("float32", "bfloat16"),
        nargs="+",
        help="of the model (float32; bfloat16 too on a GPU); the search runs in the first",
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
    dtypes = options.dtype or DTYPES[device.type]
    model, tokenizer = real_model.load(file, device, getattr(torch, dtypes[0]))
    judged = {name: p for name, p in policies(length).items() if options.only in name}
    path = options.output / f"quality-{slug(device)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:  # a search goes on from what the one before measured
        for keep in options.advise:
            advice = sa.advise(
                model,
                real_model.tokens(tokenizer, "calibration", length),
                keep,
                validate=real_model.tokens(tokenizer, "probe", length),
                minutes=options.minutes,
                resume=Path(folder) / "search.json",
            )
            print(advice, flush=True)
            advice.save(path.with_name(f"{path.name}-advice-{keep}.json"))
            advice.report(path.with_name(f"{path.name}-advice-{keep}.html"))
            judged[f"{ADVISED}{keep}"] = advice.policy
    texts = {name: real_model.tokens(tokenizer, name, length) for name in TEXTS}
    found: dict[str, Found] = {}
    for dtype in dtypes:
        model.to(getattr(torch, dtype))
        own = judged if dtype == dtypes[0] else rounded(judged)
        found[dtype] = {}
        for name, ids in texts.items():
            kept = sa.quality.model(model, ids, own, timed=not options.untimed)
            found[dtype][name] = kept
            print(f"\n{name}, {length} tokens, {dtype}\n{kept}", flush=True)
    write(path, found, length, device, judged)
    return 0


def rounded(judged: Mapping[str, sa.Policy | sa.Pattern]) -> dict[str, sa.Policy | sa.Pattern]:
    """Return what is judged in another dtype too: what rounding alone moves, and what is served."""
    served = {n: p for n, p in judged.items() if n == DEFAULTS or n.startswith(ADVISED)}
    return {"dense, other kernels": sa.Full(), **served}


def write(
    path: Path,
    found: Mapping[str, Found],
    length: int,
    device: torch.device,
    judged: Mapping[str, sa.Policy | sa.Pattern],
) -> None:
    """Write JSON, picture and page of what was found by dtype and text."""
    from matplotlib import pyplot

    machine = describe(device)
    held = {
        "model": real_model.NAME,
        "length": length,
        "machine": machine,
        "policies": {name: str(policy) for name, policy in judged.items()},
        "texts": {
            dtype: {name: quality.to_dict() for name, quality in of.items()}
            for dtype, of in found.items()
        },
    }
    path.with_suffix(".json").write_text(json.dumps(held, indent=1) + "\n")
    first, texts = next(iter(found.items()))
    figure, axes = pyplot.subplots(2, 2, figsize=(18, 12), layout="constrained")
    for ax, (name, quality) in zip(axes.flat, texts.items(), strict=True):
        quality.plot(ax)
        ax.set_title(f"{real_model.NAME}, {name}, {length} tokens, {first}")
    figure.savefig(path.with_suffix(".png"), dpi=110)
    pyplot.close(figure)
    place = machine.get("gpu", machine["processor"])
    tables = "\n\n".join(
        f"## {name}, {dtype}\n\n```\n{quality}\n```"
        for dtype, of in found.items()
        for name, quality in of.items()
    )
    path.with_suffix(".md").write_text(
        f"# Quality of patterns on {real_model.NAME}\n\n"
        f"{length} tokens of each text; {place}, torch {machine['torch']}, {machine['date']}. "
        "Dense is the model's own attention in the same dtype; pairs are of the causal ones; KL "
        "and top-1 are over all positions. Seconds, where they were taken, are of one forward "
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

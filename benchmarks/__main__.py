"""Command line of the benchmarks.

``python -m benchmarks [suite] [--minutes M]`` runs a suite on the GPU, or on the CPU where there is
none, prints a table, and writes JSON, Markdown and plots into benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sparse_attn as sa

from . import report, suites
from .bars import BARS, judge
from .cases import Group
from .crossover import crossovers
from .machine import ceilings, describe, slug
from .memory import reserved_over_calls
from .runner import Runner
from .store import RESULTS, Run, save
from .timing import Timer

MIXED_LENGTHS = {"cuda": (128, 1000, 2048, 3333, 4096, 8192), "cpu": (64, 100, 256, 333, 512)}


def main(arguments: list[str] | None = None) -> int:
    """Run one suite; return 0, or 1 when a result was wrong."""
    options = _options(arguments)
    if options.list:
        for name in suites.NAMES:
            print(name)
        return 0
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.suite in suites.NEED_CUDA and device.type != "cuda":
        print(f"the {options.suite} suite needs a GPU", file=sys.stderr)
        return 2
    groups = suites.groups_of(options.suite, device.type)
    groups = [group for group in groups if options.only in group.name]
    with torch.no_grad():
        run = measure(options, device, groups)
    path = Path(options.output or RESULTS) / f"{options.suite}-{slug(device)}.json"
    save(run, path)
    report.write(run, path)
    print(report.table(run))
    print(f"\n{path.with_suffix('.md')}")
    return int(any(report.is_wrong(row) for result in run.results for row in result.rows))


def measure(options: argparse.Namespace, device: torch.device, groups: list[Group]) -> Run:
    """Run the groups and everything that is measured around them."""
    began = time.monotonic()
    timer = Timer(device)
    found = ceilings(timer)
    runner = Runner(
        device,
        found,
        rounds=options.rounds,
        milliseconds=options.milliseconds,
        minutes=options.minutes,
        say=lambda line: print(line, flush=True),
    )
    results = runner.run(groups)
    again = ceilings(timer)
    found = {name: (found[name] + again[name]) / 2 for name in found}
    machine = describe(device)
    run = Run(options.suite, machine, found, options.rounds, results, [])
    run.verdicts = judge(BARS, results, found, run.device_name)
    if options.suite == "report":
        run.crossovers = crossovers(results, run.noise())
        if not runner.out_of_time():
            run.reserved = reserved_over_calls(
                _band_call(device), MIXED_LENGTHS[device.type], device
            )
    run.seconds = time.monotonic() - began
    return run


def _band_call(device: torch.device) -> Callable[[int], object]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def call(length: int) -> object:
        query, key, value = torch.randn(3, 1, 4, length, 64, device=device, dtype=dtype)
        sa.block_topk_attention(query, key, value, block_size=64, budget=0.25, is_causal=True)
        return sa.band_attention(query, key, value, (63, 0), sinks=4, is_causal=True)

    return call


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="?", default="report", choices=suites.NAMES)
    parser.add_argument("--minutes", type=float, default=10.0, help="time budget of the groups")
    parser.add_argument("--rounds", type=int, default=7, help="shuffled rounds of every group")
    parser.add_argument(
        "--milliseconds",
        type=float,
        default=20.0,
        help="how long a call is repeated for one figure",
    )
    parser.add_argument("--only", default="", help="run the groups with this in their names")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the one at hand")
    parser.add_argument("--output", help="folder for the results")
    parser.add_argument("--list", action="store_true", help="print the suites' names")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

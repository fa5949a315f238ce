"""Command line of the benchmarks.

``python -m benchmarks [suite ...] [--minutes M]`` runs suites on the GPU, or on the CPU where
there is none, prints a table, and writes JSON, Markdown and plots into benchmarks/results. The
suites share the minutes; FlexAttention's kernels are compiled first, side by side.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sparse_attn as sa

from . import report, suites, summary
from .bars import judge
from .budget import Budget
from .cases import Case, Group, tiny
from .crossover import crossovers
from .floors import BARS
from .machine import ceilings, describe, file_name, slug
from .memory import reserved_over_calls
from .peers import PEERS
from .precompile import compiled_cases, precompile
from .runner import GroupResult, Runner, is_wrong, progress
from .store import RESULTS, Run, Store
from .timing import Timer

MIXED_LENGTHS = {"cuda": (128, 1000, 2048, 3333, 4096, 8192), "cpu": (64, 100, 256, 333, 512)}
COMPILE_SHARE = 0.25  # of the budget, at most
RESERVED_SHARE = 0.2  # of the report's
SAVE_EVERY_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Run the suites; return 0, or 1 when a result was wrong."""
    options = _options(arguments)
    if options.list:
        for name in suites.NAMES:
            print(name)
        return 0
    device, groups = torch.device(options.device), options.groups
    budget = Budget(60 * options.minutes)
    folder = Path(options.output or RESULTS)
    left_out: dict[tuple[str, Case], str] = {}
    wrong = False
    gc.freeze()  # what is imported stays: groups free their tensors by a collection each
    with torch.no_grad():
        if options.compile != "never" and device.type == "cuda":
            cases = compiled_cases(group for suite in groups.values() for group in suite)
            cases = [(via, case) for via, case in cases if via not in options.without]
            part = 1.0 if options.compile == "only" else COMPILE_SHARE
            left_out = precompile(cases, device, Budget(part * budget.seconds), _say)
        if options.compile == "only":
            return 0
        found = ceilings(Timer(device))
        waiting = {suite: suites.WEIGHTS[suite] for suite in groups}
        for suite in groups:
            share = budget.share(suite, waiting)
            del waiting[suite]
            run = measure(options, suite, device, groups[suite], folder, share, left_out, found)
            wrong |= any(is_wrong(row) for result in run.results for row in result.rows)
    if not options.tiny:
        _say(summary.write(folder, slug(device)))
    return int(wrong)


def measure(
    options: argparse.Namespace,
    suite: str,
    device: torch.device,
    groups: list[Group],
    folder: Path,
    budget: Budget,
    left_out: dict[tuple[str, Case], str],
    found: dict[str, float],
) -> Run:
    """Run one suite's groups and everything that is measured around them, writing as it goes."""
    part = f"-only-{file_name(options.only)}" if options.only else ""  # beside the whole suite's
    part += "-tiny" if options.tiny else ""
    bars = () if options.tiny else BARS  # small cases say nothing of a floor
    path = folder / f"{suite}-{slug(device)}{part}.json"
    machine = describe(device)
    store = Store(path, machine["digests"], resume=options.resume)
    run = Run(suite, machine, found, options.rounds, [], [])
    if suite == "report":
        run.reserved = reserved_over_calls(
            _band_call(device),
            MIXED_LENGTHS[device.type],
            device,
            seconds=RESERVED_SHARE * budget.seconds,
        )
    runner = Runner(
        device,
        run.ceilings,
        rounds=options.rounds,
        milliseconds=options.milliseconds,
        budget=budget,
        left_out=left_out,
        without=options.without,
    )
    saved = time.monotonic()
    for group in groups:
        if suite == "random" and not budget.reaches():
            break  # there would be more of them in any time
        result: GroupResult = store.finished.get(group.name) or runner.run(group)
        run.results.append(result)
        run.seconds = time.monotonic() - budget.began
        _say(progress(result))
        if time.monotonic() > saved + SAVE_EVERY_S:
            run.verdicts = judge(bars, run.results, run.ceilings, run.device_name)
            store.save(run)
            saved = time.monotonic()
    run.verdicts = judge(bars, run.results, run.ceilings, run.device_name)
    if suite == "report" and not options.tiny:
        run.crossovers = crossovers(run.results, run.noise())
    run.seconds = time.monotonic() - budget.began
    store.save(run)
    report.write(run, path)
    _say(report.table(run))
    _say(f"\n{path.with_suffix('.md')}")
    return run


def _groups(suite: str, options: argparse.Namespace) -> list[Group]:
    found = suites.groups_of(suite, options.device, options.seed, options.calls)
    found = [group for group in found if options.only in group.name]
    return [tiny(group) for group in found] if options.tiny else found


def _say(line: str) -> None:
    print(line, flush=True)


def _band_call(device: torch.device) -> Callable[[int], object]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def call(length: int) -> object:
        query, key, value = torch.randn(3, 1, 4, length, 64, device=device, dtype=dtype)
        sa.block_topk_attention(query, key, value, block_size=64, mass=0.9, is_causal=True)
        return sa.band_attention(query, key, value, (63, 0), sinks=4, is_causal=True)

    return call


def _at_least(least: int, kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return what reads an option's number, and refuses one that is less or has no end."""
    expected = f"expected a {'whole ' * (kind is int)}number of at least {least}"

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{expected}, got {text}")
        return number

    return read


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help="default: report")
    parser.add_argument(
        "--minutes", type=_at_least(0, float), default=10.0, help="time budget of all suites"
    )
    parser.add_argument(
        "--rounds", type=_at_least(1, int), default=7, help="shuffled rounds of every group"
    )
    parser.add_argument(
        "--milliseconds",
        type=_at_least(0, float),
        default=20.0,
        help="how long a call is repeated for one figure",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the suite random")
    parser.add_argument(
        "--calls", type=_at_least(1, int), default=1000, help="of the suite random, at most"
    )
    parser.add_argument(
        "--only",
        default="",
        help="run the groups with this in their names, into files of their own",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="every case small, into files of their own: shows that the suites run",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the one at hand")
    parser.add_argument("--output", help="folder for the results")
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished groups of a run on the same tree"
    )
    parser.add_argument(
        "--compile",
        choices=("first", "only", "never"),
        default="first",
        help="FlexAttention's kernels: before the run, and nothing else, or where they are met",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=PEERS,
        metavar="PEER",
        help="leave out, flex for instance",
    )
    parser.add_argument("--list", action="store_true", help="print the suites' names")
    options = parser.parse_args(arguments)
    options.suites = options.suites or ["report"]
    unknown = [suite for suite in options.suites if suite not in suites.NAMES]
    if unknown:
        parser.error(f"expected suites among {', '.join(suites.NAMES)}, got {unknown[0]}")
    at_hand = "cuda" if torch.cuda.is_available() else "cpu"
    options.device = options.device or at_hand
    if options.device == "cuda" and at_hand == "cpu":
        parser.error("expected a GPU for --device cuda, got none")
    for suite in options.suites:
        if suite in suites.NEED_CUDA and options.device != "cuda" and not options.tiny:
            parser.error(f"expected a GPU or --tiny for the suite {suite}, got the CPU")
    options.groups = {s: groups for s in options.suites if (groups := _groups(s, options))}
    if not options.groups:
        parser.error(f"expected --only to be in the name of a group, got {options.only}")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Run the test suite on the GPU and record it in benchmarks/results/gpu_suite.json.

The record holds where it ran (GPU, driver, torch), what came out (pytest's counts, those of each
engine, every failure, how often each engine was skipped for which reason), how many random cases
each engine ran by dtype and head dim, what compute-sanitizer says on the tests marked
``sanitizer``, the libraries' hashes and the digests of the sources, so that ``make gpu-evidence``
can tell whose run it is. A tool that does not run on the machine is recorded as not available,
never as passed.

``--part tests``, ``--part fuzz``, ``--part sanitizers``, ``--part devices`` (the tests marked
``two_devices``, on a machine with two GPUs) and ``--part older`` (older_code.py: kernels of older
GPUs) run one part; the others are kept from the record when it belongs to this tree. Without
``--part`` the first three run. A part is recorded when it has ended, whatever becomes of the next.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_attn.capability import ENGINES

from . import fuzz, older_code, sanitizers
from .digests import ROOT, evidence_digests, library_hashes
from .gpu_evidence import RECORD
from .gpus import driver_version, visible_gpus

#: Folders of tests in pieces by engine, in as many shares of their files, and by file; those that
#: take longest come first. ``tools`` knows no device.
BY_ENGINE = {"semantics": 6, "kernels": 2, "serving": 1}
BY_FILE = ("torch", "models", "quality")
#: Pieces that run on a GPU at a time: more only wait for each other there.
PIECES_OF_GPU = 8
#: Seconds after which a piece of the suite counts as failed.
SECONDS = float(os.environ.get("SPARSE_ATTN_SUITE_SECONDS", "900"))
PARTS = ("all", "tests", "fuzz", "sanitizers", "devices", "older")


class Recorder:
    """Pytest plugin: counts outcomes in all and by engine, keeps failures and reasons of skips."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.engines: dict[str, Counter[str]] = {}
        self.skips: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a test."""
        if hasattr(report, "wasxfail"):
            if report.when == "call":
                self._count(report, "xfailed" if report.skipped else "xpassed")
        elif report.skipped:
            self._skip(report)
        elif report.failed:
            self._count(report, "failed" if report.when == "call" else "errors")
            self.failures.append(report.nodeid)
        elif report.when == "call":
            self._count(report, "passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count what kept a file from being collected."""
        if report.failed:
            self._count(report, "errors")
            self.failures.append(report.nodeid)
        elif report.skipped:
            self._skip(report)

    def _count(self, report: pytest.TestReport | pytest.CollectReport, outcome: str) -> str:
        """Count an outcome and return the engine that the test names (tests/conftest.py) or ""."""
        engine = str(dict(getattr(report, "user_properties", ())).get("engine", ""))
        self.counts[outcome] += 1
        if engine:
            self.engines.setdefault(engine, Counter())[outcome] += 1
        return engine

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        self.skips[self._count(report, "skipped"), str(reason).removeprefix("Skipped: ")] += 1

    def found(self) -> dict[str, object]:
        """Return what was counted, for the record."""
        return counted(self.counts, self.engines, self.failures, self.skips)


def counted(
    counts: Mapping[str, int],
    engines: Mapping[str, Mapping[str, int]],
    failures: list[str],
    skips: Counter[tuple[str, str]],
) -> dict[str, object]:
    """Return what was counted, in all and by engine, as the record has it."""
    return {
        "counts": dict(counts),
        "engines": {engine: dict(own) for engine, own in engines.items()},
        "failures": failures,
        "skips": [
            {"engine": engine, "reason": reason, "count": count}
            for (engine, reason), count in skips.most_common()
        ],
    }


def run_tests(extra: list[str]) -> dict[str, object]:
    """Run pytest on the GPU with these arguments and return what came out."""
    recorder = Recorder()
    start = time.monotonic()
    arguments = ["--device", "cuda", "--continue-on-collection-errors", *extra]
    status = pytest.main(arguments, plugins=[recorder])
    return {
        "exit_status": int(status),
        "seconds": round(time.monotonic() - start, 1),
        **recorder.found(),
    }


def run_suite(extra: list[str]) -> dict[str, object]:
    """Run the suite, its pieces side by side: most of their time is the CPU's."""
    start = time.monotonic()
    gpus = visible_gpus() * PIECES_OF_GPU
    with ThreadPoolExecutor(len(gpus)) as pool:
        runs = list(pool.map(lambda piece: run_piece([*piece, *extra], gpus), suite_pieces()))
    counts: Counter[str] = Counter()
    engines: dict[str, Counter[str]] = {}
    skips: Counter[tuple[str, str]] = Counter()
    for run in runs:
        counts.update(run["counts"])
        for name, own in run["engines"].items():
            engines.setdefault(name, Counter()).update(own)
        for skip in run["skips"]:
            skips[skip["engine"], skip["reason"]] += skip["count"]
    failures = [failure for run in runs for failure in run["failures"]]
    return {
        "exit_status": max(run["exit_status"] for run in runs),
        "seconds": round(time.monotonic() - start, 1),
        **counted(counts, engines, failures, skips),
    }


def suite_pieces() -> list[list[str]]:
    """Return the arguments of each piece of the suite, those that take longest first."""

    def files_of(folder: str) -> list[str]:
        return [
            str(f.relative_to(ROOT)) for f in sorted((ROOT / "tests" / folder).glob("test_*.py"))
        ]

    pieces = []
    for folder, shares in BY_ENGINE.items():
        for share in range(shares):
            files = files_of(folder)[share::shares]
            pieces += [[*files, "--engine", name] for name in ENGINES["cuda"]]
    return pieces + [[file] for folder in BY_FILE for file in files_of(folder)]


def run_piece(arguments: list[str], gpus: list[str]) -> dict[str, Any]:
    """Run a piece of the suite in a process of its own; one that does not end has failed.

    It takes one of ``gpus`` and gives it back.
    """
    gpu = gpus.pop(0)
    try:
        # As tests/conftest.py says, but before torch is imported: threads that spin while they wait
        # make the references of pieces that run side by side five times slower.
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}
        return run_process(arguments, passive | os.environ | {"CUDA_VISIBLE_DEVICES": gpu})
    finally:
        gpus.append(gpu)


def run_process(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run pytest in a process of its own and return what came out."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "found.json"
        command = [sys.executable, "-m", "scripts.run_gpu_suite", "--piece", str(report)]
        ended = "it ended without a report"
        try:
            subprocess.run(
                [*command, *arguments], cwd=ROOT, timeout=SECONDS, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            ended = f"it took more than {SECONDS:g} s"
        if report.exists():
            return dict(json.loads(report.read_text()))
    failure = f"{' '.join(arguments)}: {ended}"
    return {"exit_status": 1, "counts": {}, "engines": {}, "skips": [], "failures": [failure]}


def place() -> dict[str, object]:
    """Return where and when this runs."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def run_parts(part: str, extra: list[str]) -> Iterator[dict[str, Any]]:
    """Run the parts asked for, one after the other, and give what each adds to the record."""
    if part == "devices":
        yield {"two_devices": place() | run_tests(["tests", "-m", "two_devices", *extra])}
    if part == "older":
        yield {"older": {level: place() | run for level, run in older_code.run(extra).items()}}
    here = place() | {"libraries": library_hashes()}
    if part in ("all", "tests"):
        yield here | {"tests": run_suite(extra)}
    if part in ("all", "fuzz"):
        yield here | {"fuzz": fuzz.run(extra)}
    if part in ("all", "sanitizers"):
        yield here | {"sanitizers": sanitizers.run()}


def recorded(found: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """Add to the record what a part found, and return it all; of another tree it starts over."""
    # Read only now: parts may run side by side.
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if record.get("digests") != digests:
        record = {"digests": digests, "tests": {"exit_status": 0, "counts": {}}}
        record["sanitizers"] = {tool: {"status": "not run"} for tool in sanitizers.TOOLS}
    record |= found
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    return record


def main() -> int:
    """Run the parts asked for, write the record, and return 0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="all")
    parser.add_argument("--piece", type=Path, help="run pytest alone and write what came out here")
    options, extra = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("This suite needs a GPU: torch.cuda.is_available() is False.", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    if options.piece is not None:
        options.piece.write_text(json.dumps(run_tests(extra)))
        return 0
    digests = evidence_digests()
    record: dict[str, Any] = {}
    for found in run_parts(options.part, extra):
        record = recorded(found, digests)
    print(json.dumps(record["sanitizers"], indent=2))
    failed = any(run["status"] == "failed" for run in record["sanitizers"].values())
    tests = [record["tests"], record.get("two_devices", {"exit_status": 0})]
    tests += [record.get("fuzz", {"exit_status": 0}), *record.get("older", {}).values()]
    return max(run["exit_status"] for run in tests) or int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Random cases by the thousand on the GPU: the properties of attention and of block selection.

Every engine and head dim, and every selector, runs in a process of its own, side by side on all
GPUs: most of the time is the CPU's. Each dtype has so many seconds there, Hopper's more than
others, so that the part ends on any machine. The record says how many cases ran for each engine,
dtype and head dim, and under "selection" for each dtype and selector.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sparse_attn.capability import ENGINES

from .digests import ROOT
from .gpus import visible_gpus
from .older_code import outcomes

TESTS = ROOT / "tests" / "semantics"
DTYPES = ("fp32", "fp16", "bf16")
HEAD_DIMS = (8, 40, 64, 72, 96, 112, 128, 160, 192, 224, 256)
#: What the record names beside the engines.
SELECTION = "selection"
SELECTORS = ("mixed", "mean", "antidiagonal", "minmax", "vertical_slash", "scores")
#: Cases of every dtype and head dim, and the seconds after which fewer must do.
EXAMPLES = 2000
SECONDS = float(os.environ.get("SPARSE_ATTN_FUZZ_SECONDS", "40"))
#: Times as many for the engine with the most kernels, so that each of them meets thousands.
LONGER = {"hopper": 4}
#: Seconds in which a process starts and ends its last cases; one that takes longer has failed.
SLACK = 180.0


def run(extra: Sequence[str] = (), device: str = "cuda") -> dict[str, Any]:
    """Run the cases of every engine and return what came out, by engine."""
    pairs = [(engine, str(head_dim)) for engine in ENGINES[device] for head_dim in HEAD_DIMS]
    pairs += [(SELECTION, selector) for selector in SELECTORS]
    gpus = visible_gpus() or [""]
    start = time.monotonic()
    with ThreadPoolExecutor(min(len(pairs), os.cpu_count() or 1)) as pool:
        jobs = [
            pool.submit(_run_one, kind, of, gpus[index % len(gpus)], extra, device)
            for index, (kind, of) in enumerate(pairs)
        ]
        runs = [job.result() for job in jobs]
    found: dict[str, Any] = {
        "exit_status": max(one["exit_status"] for one in runs),
        "seconds": round(time.monotonic() - start, 1),
        "seconds_of_each": {kind: seconds_of(kind) for kind in (*ENGINES[device], SELECTION)},
        "failures": [failure for one in runs for failure in one["failures"]],
        "cases": {kind: {} for kind in (*ENGINES[device], SELECTION)},
    }
    for (kind, of), one in zip(pairs, runs, strict=True):
        for dtype, cases in one["cases"].items():
            found["cases"][kind].setdefault(dtype, {})[of] = cases
    return found


def seconds_of(kind: str) -> float:
    """Return the seconds of a dtype and head dim of an engine, or of a selector."""
    return SECONDS * LONGER.get(kind, 1)


def _nodes(kind: str, of: str) -> list[str]:
    """Return the tests of an engine's head dim, or of a selector, and what else pytest needs."""
    if kind == SELECTION:
        return [f"{TESTS}/test_selection_fuzz.py::test_selection[{dtype}-{of}]" for dtype in DTYPES]
    nodes = [f"{TESTS}/test_fuzz.py::test_fuzz[{kind}-{dtype}-{of}]" for dtype in DTYPES]
    return [*nodes, "--engine", kind]


def _run_one(kind: str, of: str, gpu: str, extra: Sequence[str], device: str) -> dict[str, Any]:
    """Run the cases of one engine and head dim, or of one selector."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *_nodes(kind, of),
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
        ]
        command += ["--device", device]
        command += [f"--fuzz-examples={EXAMPLES}", f"--fuzz-seconds={seconds_of(kind)}"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *extra]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        most = len(DTYPES) * seconds_of(kind) + SLACK
        status: int = pytest.ExitCode.TESTS_FAILED
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=most, env=environment).returncode
        except subprocess.TimeoutExpired:
            failure = f"{kind}, {of}: it took more than {most:g} s"
            return {"exit_status": int(status), "failures": [failure], "cases": {}}
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            return {"exit_status": 0, "failures": [], "cases": {}}
        if not report.exists():
            failure = f"{kind}, {of}: it ended without a report"
            return {"exit_status": status, "failures": [failure], "cases": {}}
        found = {"failures": outcomes(report)["failures"], "cases": cases_of(report)}
        return {"exit_status": status} | found


def cases_of(report: Path) -> dict[str, int]:
    """Return how many cases ran, by dtype, from a JUnit report of one process."""
    cases = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        ran = {item.get("name"): item.get("value") for item in case.iter("property")}.get("cases")
        if ran is not None:
            name = str(case.get("name"))
            cases[next(dtype for dtype in DTYPES if dtype in name)] = int(ran)
    return cases

"""Random cases by the thousand on every engine of the GPU: the property of test_fuzz.py, at length.

Every engine and head dim runs in a process of its own, side by side on all GPUs: most of the time
is the CPU's. Each dtype has so many seconds there, so that the part ends on any machine. The record
says how many cases ran for each engine, dtype and head dim.
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

from sparse_attn._info import engine_names

from .digests import ROOT
from .gpus import visible_gpus
from .older_code import outcomes

TEST = ROOT / "tests" / "semantics" / "test_fuzz.py"
DTYPES = ("fp32", "fp16", "bf16")
HEAD_DIMS = (8, 40, 64, 72, 96, 128, 192, 256)
#: Cases of every dtype and head dim, and the seconds after which fewer must do.
EXAMPLES = 2000
SECONDS = float(os.environ.get("SPARSE_ATTN_FUZZ_SECONDS", "40"))
#: Seconds in which a process starts and ends its last cases; one that takes longer has failed.
SLACK = 90.0


def run(extra: Sequence[str] = (), device: str = "cuda") -> dict[str, Any]:
    """Run the cases of every engine and return what came out, by engine."""
    engines = engine_names(device == "cuda")
    pairs = [(engine, head_dim) for engine in engines for head_dim in HEAD_DIMS]
    gpus = visible_gpus() or [""]
    start = time.monotonic()
    with ThreadPoolExecutor(min(len(pairs), os.cpu_count() or 1)) as pool:
        jobs = [
            pool.submit(_run_one, engine, head_dim, gpus[index % len(gpus)], extra, device)
            for index, (engine, head_dim) in enumerate(pairs)
        ]
        runs = [job.result() for job in jobs]
    found: dict[str, Any] = {
        "exit_status": max(one["exit_status"] for one in runs),
        "seconds": round(time.monotonic() - start, 1),
        "seconds_of_each": SECONDS,
        "failures": [failure for one in runs for failure in one["failures"]],
        "cases": {engine: {} for engine in engines},
    }
    for (engine, head_dim), one in zip(pairs, runs, strict=True):
        for dtype, cases in one["cases"].items():
            found["cases"][engine].setdefault(dtype, {})[str(head_dim)] = cases
    return found


def _run_one(
    engine: str, head_dim: int, gpu: str, extra: Sequence[str], device: str
) -> dict[str, Any]:
    """Run the cases of one engine and head dim."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        nodes = [f"{TEST}::test_fuzz[{engine}-{dtype}-{head_dim}]" for dtype in DTYPES]
        command = [
            sys.executable,
            "-m",
            "pytest",
            *nodes,
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
        ]
        command += ["--device", device, "--engine", engine]
        command += [f"--fuzz-examples={EXAMPLES}", f"--fuzz-seconds={SECONDS}"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *extra]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        most = len(DTYPES) * SECONDS + SLACK
        status: int = pytest.ExitCode.TESTS_FAILED
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=most, env=environment).returncode
        except subprocess.TimeoutExpired:
            failure = f"{engine}, head dim {head_dim}: it took more than {most:g} s"
            return {"exit_status": int(status), "failures": [failure], "cases": {}}
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            return {"exit_status": 0, "failures": [], "cases": {}}
        if not report.exists():
            failure = f"{engine}, head dim {head_dim}: it ended without a report"
            return {"exit_status": status, "failures": [failure], "cases": {}}
        found = {"failures": outcomes(report)["failures"], "cases": cases_of(report)}
        return {"exit_status": status} | found


def cases_of(report: Path) -> dict[str, int]:
    """Return how many cases ran, by dtype, from a JUnit report of one engine and head dim."""
    cases = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        ran = {item.get("name"): item.get("value") for item in case.iter("property")}.get("cases")
        if ran is not None:
            cases[str(case.get("name")).split("-")[1]] = int(ran)
    return cases

"""Random cases by the thousand on every engine of the GPU: the property of test_fuzz.py, at length.

Every engine and dtype runs in a process of its own, side by side: most of the time is the CPU's.
The record says how many cases ran for each engine, dtype and head dim.
"""

from __future__ import annotations

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
from .older_code import outcomes

TEST = ROOT / "tests" / "semantics" / "test_fuzz.py"
DTYPES = ("fp32", "fp16", "bf16")
#: Cases of every dtype and head dim.
EXAMPLES = {"hopper": 2000}
EXAMPLES_OF_OTHERS = 400


def run(extra: Sequence[str] = (), device: str = "cuda") -> dict[str, Any]:
    """Run the cases of every engine and return what came out, by engine."""
    engines = engine_names(device == "cuda")
    pairs = [(engine, dtype) for engine in engines for dtype in DTYPES]
    start = time.monotonic()
    with ThreadPoolExecutor(len(pairs)) as pool:
        runs = list(pool.map(lambda pair: _run_one(pair[0], pair[1], extra, device), pairs))
    found: dict[str, Any] = {
        "exit_status": max(one["exit_status"] for one in runs),
        "seconds": round(time.monotonic() - start, 1),
        "failures": [failure for one in runs for failure in one["failures"]],
        "cases": {engine: {} for engine in engines},
    }
    for (engine, dtype), one in zip(pairs, runs, strict=True):
        if one["cases"]:
            found["cases"][engine][dtype] = one["cases"]
    return found


def _run_one(engine: str, dtype: str, extra: Sequence[str], device: str) -> dict[str, Any]:
    """Run the cases of one engine and dtype."""
    examples = EXAMPLES.get(engine, EXAMPLES_OF_OTHERS)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(TEST), "-q", "-p", "no:cacheprovider"]
        command += ["--device", device, "--engine", engine, "-k", dtype]
        command += [f"--fuzz-examples={examples}", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", *extra]
        status = subprocess.run(command, cwd=ROOT).returncode
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            return {"exit_status": 0, "failures": [], "cases": {}}
        if not report.exists():
            return {"exit_status": status, "failures": [f"{engine} {dtype}"], "cases": {}}
        found = {"failures": outcomes(report)["failures"], "cases": cases_of(report)}
        return {"exit_status": status} | found


def cases_of(report: Path) -> dict[str, int]:
    """Return how many cases ran, by head dim, from a JUnit report."""
    cases = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        ran = {item.get("name"): item.get("value") for item in case.iter("property")}.get("cases")
        if ran is not None:
            cases[str(case.get("name")).rpartition("-")[2].rstrip("]")] = int(ran)
    return cases

"""Run the tests of all engines but hopper on libraries that hold code of older GPUs only.

A library with PTX of one level and nothing else is compiled for the GPU at hand by its driver,
along the paths that devices of that level take: ``75-virtual`` shows the Turing code,
``80-virtual`` the code of sm_80 on. Libraries come from ``SPARSE_ATTN_OLDER``, a folder with
``<level>/_C_cuda.so`` built elsewhere (`python -m scripts.older_code FOLDER` builds them there),
else from a build here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparse_attn import capability

from .cmake_build import build
from .digests import ROOT

LEVELS = ("75-virtual", "80-virtual")
OUTCOMES = {"failure": "failed", "error": "errors", "skipped": "skipped"}
ENGINES = ",".join(name for name in capability.ENGINES["cuda"] if name != "hopper")
STAGED = ROOT / "build" / "older"


def build_library(level: str, folder: Path) -> None:
    """Build the op libraries into `folder`, their kernels as PTX of one level."""
    folder.mkdir(parents=True, exist_ok=True)
    build(
        folder,
        targets=("_C", "_C_cuda"),
        build_dir=STAGED / f"cmake-{level}",
        options=(f"-DSPARSE_ATTN_CUDA_ARCHS={level}",),
    )


def stage(level: str) -> Path:
    """Return a folder with the package, its tests and the CUDA library of `level`."""
    tree = STAGED / level
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("sparse_attn", "tests", "benchmarks", "scripts", "docs"):  # whose code tests run
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("_C_cuda.so"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    given = os.environ.get("SPARSE_ATTN_OLDER")
    if given is None:
        build_library(level, tree / "sparse_attn")
    else:
        shutil.copy(Path(given) / level / "_C_cuda.so", tree / "sparse_attn")
    return tree


def outcomes(report: Path) -> dict[str, object]:
    """Return the counts and failures of a JUnit report."""
    counts: Counter[str] = Counter()
    failures = []
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")
        counts[outcome] += 1
        if outcome in ("failed", "errors"):
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return {"counts": dict(counts), "failures": failures}


def run_tests(tree: Path, extra: list[str]) -> dict[str, object]:
    """Run the tests of the engines that older GPUs have in a staged tree."""
    report = tree / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests",
        "--device",
        "cuda",
        "-q",
        "--engine",
        ENGINES,
        "--shared-device",  # the levels run side by side
    ]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", *extra]
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(tree)}
    status = subprocess.run(command, cwd=tree, env=environment).returncode
    library = (tree / "sparse_attn" / "_C_cuda.so").read_bytes()
    return {
        "exit_status": status,
        "seconds": round(time.monotonic() - start, 1),
        "library": hashlib.sha256(library).hexdigest(),
        **(outcomes(report) if report.exists() else {"counts": {}, "failures": []}),
    }


def run(extra: list[str]) -> dict[str, dict[str, object]]:
    """Run the tests on the library of every level, side by side."""
    trees = [stage(level) for level in LEVELS]
    with ThreadPoolExecutor() as pool:
        return dict(zip(LEVELS, pool.map(lambda tree: run_tests(tree, extra), trees), strict=True))


if __name__ == "__main__":
    for level in LEVELS:
        build_library(level, Path(sys.argv[1]).resolve() / level)

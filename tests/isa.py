"""Runs Python with the CPU loops of one instruction set: a process chooses them once."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def check_with_isa(isa, script):
    """Fail where a script fails in a process whose loops are of `isa`, or the best below it."""
    environment = {**os.environ, "SPARSE_ATTN_CPU_ISA": isa}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr

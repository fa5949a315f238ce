"""What compute-sanitizer reports on right programs: the limits of a tool, beside its findings.

``tests/cuda/sanitizer_limits.cu`` holds the programs, each with a twin that says the same in a way
the tool understands. The record says whether the limit showed on the machine, in the same run; it
changes nothing in a tool's verdict.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .digests import ROOT

SOURCE = ROOT / "tests" / "cuda" / "sanitizer_limits.cu"
SECONDS = 60

Findings = Sequence[dict[str, Any]]


class Limit(NamedTuple):
    """Something a tool does not understand."""

    reported: str  # the kernel of a right program that the tool reports
    silent: str  # its twin, which the tool does not report
    why: str


LIMITS = {
    "racecheck": Limit(
        "one_lane_arrives",
        "every_lane_arrives",
        "an arrival on an mbarrier counts for the arriving lane alone, though __syncwarp stands "
        "between the other lanes' accesses and it",
    ),
    "initcheck": Limit(
        "reads_bulk_copied", "reads_stored", "what bulk copies (TMA) store is not seen as written"
    ),
}


def examine(program: str, read: Callable[[str], Findings]) -> dict[str, dict[str, Any]]:
    """Build the right programs and return what each tool of ``LIMITS`` reports on them."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return {tool: {"status": "not run", "why": "nvcc was not found"} for tool in LIMITS}
    with tempfile.TemporaryDirectory() as folder:
        right = Path(folder) / "right"
        try:
            build = [nvcc, "-arch=sm_90a", "-o", str(right), str(SOURCE)]
            subprocess.run(build, check=True, capture_output=True, timeout=SECONDS)
            return {tool: _report(program, tool, right, read) for tool in LIMITS}
        except (subprocess.SubprocessError, OSError) as error:
            return {tool: {"status": "not run", "why": str(error)} for tool in LIMITS}


def _report(
    program: str, tool: str, right: Path, read: Callable[[str], Findings]
) -> dict[str, Any]:
    log = right.with_suffix(f".{tool}")
    command = [program, "--tool", tool, "--show-backtrace", "no", "--log-file", str(log)]
    done = subprocess.run(
        [*command, str(right)], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    findings = read(log.read_text() if log.exists() else "")
    limit = LIMITS[tool]
    places = " ".join(finding["at"] for finding in findings)
    shown = limit.reported in places and limit.silent not in places
    return {
        "status": "shown" if shown and done.stdout.strip() == "right" else "not shown",
        "limit": limit.why,
        "program": done.stdout.strip(),
        "findings": list(findings),
    }

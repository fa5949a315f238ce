"""What compute-sanitizer reports on right programs, and which findings of a run that explains.

``tests/cuda/sanitizer_limits.cu`` holds the programs. A finding is explained only where the tool,
on the same machine in the same run, reports the same of the small program that is right and not of
its twin; the finding stays in the record, and the tool is recorded as ``explained``, not as passed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .digests import ROOT

SOURCE = ROOT / "tests" / "cuda" / "sanitizer_limits.cu"
SECONDS = 60

Findings = Sequence[Mapping[str, Any]]


class Limit(NamedTuple):
    """Something a tool does not understand: who shows it, who shows that it is that, and where."""

    reported: str  # the kernel of the right program that the tool reports
    silent: str  # its twin, which the tool does not report
    places: tuple[str, ...]  # of the package's code, one for each side of a finding
    why: str


LIMITS = {
    "racecheck": Limit(
        "one_lane_arrives",
        "every_lane_arrives",
        ("::boxed_columns", "::describe"),
        "lanes of a warp write, __syncwarp orders them before one lane's arrival on an mbarrier; "
        "the tool takes the arrival for that lane's alone",
    ),
    "initcheck": Limit(
        "reads_bulk_copied", "reads_stored", (), "the tool does not see what bulk copies store"
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
        "program": done.stdout.strip(),
        "findings": list(findings),
    }


def explanation(tool: str, run: Mapping[str, Any], shown: Mapping[str, Any]) -> str:
    """Return why the findings of a run are the tool's limit, nothing when that is not shown."""
    limit = LIMITS.get(tool)
    findings = run.get("findings", ())
    if limit is None or shown.get("status") != "shown" or not findings:
        return ""
    if run["findings_not_listed"] or not all(_is_clean(text) for text in run["tests"].values()):
        return ""
    sides = [side for finding in findings for side in finding["at"].split(" / ")]
    explained = all(any(place in side for place in limit.places) for side in sides)
    return limit.why if explained else ""


def _is_clean(tests: str) -> bool:
    return "passed" in tests and "failed" not in tests and "error" not in tests

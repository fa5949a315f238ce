"""What compute-sanitizer says about the tests marked ``sanitizer``: a summary and every finding.

Each tool runs once for every engine, all side by side: most of their time is the CPU's. The record
keeps, for a tool, the errors it counted and the distinct pairs of message and place in the code
with their numbers, so that a reader sees what was found and where. ``not available`` is a tool that
does not run on the machine; it is never recorded as passed.

What a tool does not understand is shown on right programs (sanitizer_limits.py). initcheck does not
see what bulk copies (TMA) store; its runs therefore hand every call an output filled with NaN
(``--filled-outputs``), which the tool has seen written; an element that no engine writes stays NaN
and fails the test.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sparse_attn import capability

from . import sanitizer_limits
from .digests import ROOT

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ENGINES = capability.ENGINES["cuda"]
SECONDS = 400
PRINTED = 5000
LISTED = 40

UNSUPPORTED = ("Device not supported", "Unable to find", "not supported on this")
#: How tests are marked: all cases of one, or those that tests/ragged.py's `watched` names.
_MARKS = re.compile(r"mark\.sanitizer|\bwatched\(")
_BANNERS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Target application")
_CLOSING = re.compile(r"\d+ (passed|failed|skipped|deselected)\b.* in \d")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?\b(?! were)")


def run(tools: Sequence[str] = TOOLS) -> dict[str, dict[str, Any]]:
    """Run the tools and return what each found, by tool."""
    pairs = [(tool, engine) for tool in tools for engine in ENGINES]
    with ThreadPoolExecutor(len(pairs)) as pool:
        runs = dict(zip(pairs, pool.map(lambda pair: _run_one(*pair), pairs), strict=True))
    found = {tool: merged([runs[tool, engine] for engine in ENGINES]) for tool in tools}
    program = _program()
    shown = sanitizer_limits.examine(program, findings) if program else {}
    for tool, limit in shown.items():
        if tool in found:
            found[tool]["limit"] = limit
    return found


def _program() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def _files() -> list[str]:
    """Return the files with marked tests: collecting all takes longer than running these."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if _MARKS.search(file.read_text())]


def _run_one(tool: str, engine: str) -> dict[str, Any]:
    """Run one engine's tests under one tool."""
    program = _program()
    if program is None:
        return {"status": "not available", "why": "compute-sanitizer was not found"}
    # Without torch's cache every tensor is an allocation of its own, whose bounds the tool knows.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [program, "--tool", tool, "--print-limit", str(PRINTED), "--show-backtrace", "no"]
        command += ["--log-file", str(log), "--error-exitcode", "99"]
        command += [sys.executable, "-m", "pytest", *_files(), "--device", "cuda", "-q", "-m"]
        command += ["sanitizer", "-p", "no:cacheprovider", "--engine", engine]
        command += ["--filled-outputs"] if tool == "initcheck" else []
        with (Path(folder) / "tests").open("w+") as tests:
            status = _within(SECONDS, command, cwd=ROOT, env=env, stdout=tests, stderr=tests)
            tests.seek(0)
            found = read(log.read_text() if log.exists() else "", tests.read(), status)
    return found | {"engine": engine, "seconds": round(time.monotonic() - start, 1)}


def _within(seconds: float, command: list[str], **settings: Any) -> int | None:
    """Run a command and return its status, None when it had to be ended, its children with it."""
    process = subprocess.Popen(command, start_new_session=True, **settings)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def read(log: str, tests: str, exit_status: int | None) -> dict[str, Any]:
    """Return what one run found, from the tool's log, the tests' output and the exit status.

    The exit status is None for a run that was ended after ``SECONDS``.
    """
    if unsupported := [line for line in log.splitlines() if any(w in line for w in UNSUPPORTED)]:
        return {"status": "not available", "why": unsupported[0].strip("= ")}
    closing = [line for line in tests.splitlines() if _CLOSING.search(line)]
    summaries = [int(number) for number in _SUMMARY.findall(log)]
    run: dict[str, Any] = {
        "tests": closing[-1].strip("= ") if closing else "none",
        "errors": sum(summaries),
        "findings": findings(log),
    }
    if exit_status == 0 and summaries and not run["errors"] and not run["findings"]:
        return run | {"status": "passed"}
    why = f"no end within {SECONDS} s" if exit_status is None else f"exit status {exit_status}"
    return run | {"status": "failed", "why": " | ".join([why, *tests.splitlines()[-3:]])}


def findings(log: str) -> list[dict[str, Any]]:
    """Return the distinct reports of a log, most frequent first, as message, place and count."""
    counts: Counter[tuple[str, str]] = Counter()
    message, places = "", []
    for line in [*log.splitlines(), "========="]:
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========")
        if text.startswith("     "):
            head, at, place = text.strip().partition("at ")
            if at and head in ("", "and Read access ", "and Write access "):
                message += f" {head}".rstrip()
                places.append(_place(place))
            continue
        if message:
            counts[message, " / ".join(places)] += 1
        message, places = "", []
        if text.strip() and not any(banner in text for banner in _BANNERS):
            message, at, place = text.strip().partition(" at ")
            places = [_place(place)] if at else []
    return [
        {"message": message, "at": place, "count": count}
        for (message, place), count in counts.most_common()
    ]


def _place(text: str) -> str:
    """Return a kernel and the offset in it, without arguments, files and numbers of hazards."""
    name, plus, rest = text.partition("+0x")
    offset = re.match(r"[0-9a-f]+", rest)
    depth, end = 0, len(name)
    while name.endswith(")") and end and (depth or end == len(name)):
        end -= 1
        depth += (name[end] == ")") - (name[end] == "(")
    return name[:end] + (plus + offset.group() if offset else "")


def merged(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the runs of one tool as one: failed if one failed, passed if all passed."""
    runs = list(runs)
    states = {run["status"] for run in runs}
    status = next(s for s in ("failed", "not available", "passed") if s in states)
    found = [finding | {"engine": r["engine"]} for r in runs for finding in r.get("findings", ())]
    return {
        "status": status,
        "seconds": max(run.get("seconds", 0.0) for run in runs),
        "errors": sum(run.get("errors", 0) for run in runs),
        "tests": {run["engine"]: run["tests"] for run in runs if "tests" in run},
        "why": [run["why"] for run in runs if "why" in run],
        "findings": sorted(found, key=lambda finding: -finding["count"])[:LISTED],
        "findings_not_listed": max(0, len(found) - LISTED),
    }

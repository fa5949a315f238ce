"""Say in one line whether the recorded GPU run belongs to this tree.

Needs nothing but Python. The record is written by ``make test-gpu`` (scripts/run_gpu_suite.py); it
belongs to the tree when the digests of device sources, Python package and tests are the tree's own.
"""

from __future__ import annotations

import json

from .digests import ROOT, evidence_digests

RECORD = ROOT / "benchmarks" / "results" / "gpu_suite.json"


def verdict() -> str:
    """Return the line."""
    if not RECORD.exists():
        return f"GPU evidence: none recorded ({RECORD.relative_to(ROOT)} is missing)"
    record = json.loads(RECORD.read_text())
    counts = ", ".join(f"{n} {outcome}" for outcome, n in record["tests"]["counts"].items())
    tools = ", ".join(f"{tool} {run['status']}" for tool, run in record["sanitizers"].items())
    run = f"{record.get('date')}, {record.get('gpu')}, torch {record.get('torch')}: "
    run += f"{counts or 'tests not run'}; {tools}"
    if two := record.get("two_devices"):
        run += f"; two devices: {two['counts'].get('passed', 0)} passed"
    digests = evidence_digests()
    differing = [name for name in digests if digests[name] != record["digests"].get(name)]
    if differing:
        return f"GPU evidence: NOT of this tree, differing in {', '.join(differing)} ({run})"
    return f"GPU evidence: of this tree ({run})"


if __name__ == "__main__":
    print(verdict())

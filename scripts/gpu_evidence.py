"""Say in one line whether the recorded GPU run belongs to this tree.

Needs nothing but Python. The record is written by ``make test-gpu`` (scripts/run_gpu_suite.py); it
belongs to the tree when the digests of device sources, Python package and tests are the tree's own.
"""

from __future__ import annotations

import json
from typing import Any

from .digests import ROOT, evidence_digests

RECORD = ROOT / "benchmarks" / "results" / "gpu_suite.json"


def verdict() -> str:
    """Return the line."""
    if not RECORD.exists():
        return f"GPU evidence: none recorded ({RECORD.relative_to(ROOT)} is missing)"
    record = json.loads(RECORD.read_text())
    digests = evidence_digests()
    differing = [name for name in digests if digests[name] != record["digests"].get(name)]
    of = f"NOT of this tree, differing in {', '.join(differing)}" if differing else "of this tree"
    return f"GPU evidence: {of} ({_described(record)})"


def _described(record: dict[str, Any]) -> str:
    """Say when and where the parts ran, what they counted, and what failed."""
    counts = ", ".join(f"{n} {outcome}" for outcome, n in record["tests"]["counts"].items())
    tools = ", ".join(f"{tool} {run['status']}" for tool, run in record["sanitizers"].items())
    said = [counts or "tests not run", tools]
    parts = {"two devices": record.get("two_devices")}
    parts |= {f"code for {name}": part for name, part in record.get("older", {}).items()}
    for name, part in parts.items():
        said.append(
            f"{name} {part['counts'].get('passed', 0)} passed" if part else f"{name} not run"
        )
    fuzz = record.get("fuzz", {"cases": {}})
    cases = [n for kinds in fuzz["cases"].values() for of in kinds.values() for n in of.values()]
    said.append(f"{sum(cases)} random cases")
    for run in (record["tests"], *parts.values(), fuzz):
        said += [f"failed: {failure}" for failure in (run or {}).get("failures", ())]
    place = f"{record.get('date')}, {record.get('gpu')}, torch {record.get('torch')}"
    return f"{place}: {'; '.join(said)}"


if __name__ == "__main__":
    print(verdict())

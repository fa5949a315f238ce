"""The result file: JSON with the machine, the ceilings, every row, its rounds, and the verdicts.

A full run on the same tree does not erase the one before it: its verdicts are kept in
``earlier_runs``, so that a run is not chosen for being the best.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .bars import Verdict
from .crossover import Crossover
from .runner import GroupResult

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Run:
    """Everything that a run found."""

    suite: str
    machine: dict[str, Any]
    ceilings: dict[str, float]
    rounds: int
    results: list[GroupResult]
    verdicts: list[Verdict]
    crossovers: list[Crossover] = field(default_factory=list)
    reserved: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def device_name(self) -> str:
        """The GPU, or the processor."""
        return str(self.machine.get("gpu", self.machine["processor"]))

    def noise(self) -> float:
        """Return the difference between two timings of the same case, the median of the groups."""
        return statistics.median([r.noise for r in self.results] or [0.0])


def save(run: Run, path: Path) -> None:
    """Write the run, keeping the verdicts of earlier runs on the same tree."""
    content = asdict(run)
    content["verdicts"] = _verdicts(run.verdicts)
    content["earlier_runs"] = []
    if path.exists():
        old = json.loads(path.read_text())
        if old["machine"]["digests"] == run.machine["digests"]:
            kept = {"date": old["machine"]["date"], "verdicts": old["verdicts"]}
            content["earlier_runs"] = [*old["earlier_runs"], kept]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(content), indent=1) + "\n")


def _verdicts(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [asdict(v.bar) | {"figure": v.figure, "held": v.held, "why": v.why} for v in verdicts]


def _rounded(value: Any) -> Any:
    """Cut floats to six digits, and make keys strings."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value

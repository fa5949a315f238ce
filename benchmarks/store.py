"""The result file: JSON with the machine, the ceilings, every row, its rounds, and the verdicts.

It is written every few groups: a run that is cut off leaves what it had, and can be resumed. A
full run on the same tree does not erase the one before it: its verdicts are kept in
``earlier_runs``, so that a run is not chosen for being the best.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .bars import Bar, Verdict
from .crossover import Crossover
from .runner import GroupResult, Row

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


class Store:
    """One suite's file; what stood in it when the run began is the run before."""

    def __init__(self, path: Path, digests: object, *, resume: bool = False) -> None:
        self.path = path
        old = json.loads(path.read_text()) if path.exists() else None
        same_tree = old is not None and old["machine"]["digests"] == digests
        self.earlier: list[dict[str, Any]] = list(old["earlier_runs"]) if old and same_tree else []
        self.finished: dict[str, GroupResult] = {}
        if old and same_tree and resume:
            found = [_group(result) for result in old["results"]]
            self.finished = {result.name: result for result in found if result.complete}
        elif old and same_tree:
            self.earlier.append({"date": old["machine"]["date"], "verdicts": old["verdicts"]})

    def save(self, run: Run) -> None:
        """Write the run; a reader never meets half a file."""
        content = asdict(run) | {"verdicts": _verdicts(run.verdicts), "earlier_runs": self.earlier}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(_rounded(content), indent=1) + "\n")
        fresh.replace(self.path)


def load(path: Path) -> Run:
    """Read a run back, its crossovers aside."""
    found = json.loads(path.read_text())
    verdicts = []
    for entry in found["verdicts"]:
        outcome = [entry.pop(name) for name in ("figure", "held", "why")]
        verdicts.append(Verdict(Bar(**entry), *outcome))
    return Run(
        found["suite"],
        found["machine"],
        found["ceilings"],
        found["rounds"],
        [_group(result) for result in found["results"]],
        verdicts,
        reserved=found["reserved"],
        seconds=found["seconds"],
    )


def _group(found: dict[str, Any]) -> GroupResult:
    return GroupResult(**found | {"rows": [Row(**row) for row in found["rows"]]})


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

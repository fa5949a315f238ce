"""A time budget: a run ends when it is spent, and what was not reached says so.

The suites of one run share a budget by weight; what one leaves over, the next ones have.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

NOT_RUN = "not run: time"
LEFT_OUT = "not run: left out of this command"


@dataclass(frozen=True)
class Budget:
    """Seconds from ``began`` on, on the monotonic clock."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the seconds that are left; negative when overspent."""
        return self.began + self.seconds - time.monotonic()

    def share(self, name: str, weights: Mapping[str, float]) -> Budget:
        """Return what ``name`` may spend of the rest, beside the others of ``weights``."""
        return Budget(max(0.0, self.left()) * weights[name] / sum(weights.values()))

    def reaches(self, seconds: float = 0.0) -> bool:
        """Whether that many seconds are left."""
        return self.left() > seconds

    def refusal(self, needed: float = 0.0) -> str:
        """Return the sentence of what the budget no longer reaches."""
        need = f" and this needs about {needed:.0f} s" if needed else ""
        return f"{NOT_RUN} ({max(0.0, self.left()):.0f} of {self.seconds:.0f} s are left{need})"

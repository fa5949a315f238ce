"""The time of a search: what is left of it, and when a stage has to stop.

Forwards of the model are timed, so that the estimate counts forwards and not steps: the first,
which warms up, and every judged one. Time for the validation and the model's times is kept free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

__all__ = ["TIMED", "Clock"]

_Found = TypeVar("_Found")

#: Forwards for the times of dense attention and the policy at a length.
TIMED = 8
#: Forwards after the search: dense and two choices on other text, and those for times.
AFTER = 3 + TIMED


class Clock:
    """Counts what a search has done and has to do.

    Parameters
    ----------
    minutes : float, optional
        How long the search may take, about.
    layers : int
        Layers whose local errors are measured, over all inputs.
    evaluations : int
        Choices that the search judges at most.
    """

    def __init__(self, minutes: float | None, layers: int, evaluations: int) -> None:
        self.began = time.monotonic()
        self.minutes = minutes
        self.layers, self.evaluations = layers, evaluations
        self.after = AFTER  # forwards that follow the search
        self.forward = 0.0  # seconds of a judged choice
        self._forwards: list[float] = []
        self._measured, self._measuring = 0, self.began

    def time_forward(self, run: Callable[[], _Found]) -> _Found:
        """Run the model once, and take its time; `forward` is the median of all."""
        began = time.monotonic()
        found = run()
        now = time.monotonic()
        if not self._forwards:
            self._measuring = now
        self._forwards.append(now - began)
        self.forward = median(self._forwards)
        return found

    def measured(self, layers: int) -> None:
        """Note that the local errors of this many layers are known."""
        self._measured += layers

    def evaluated(self) -> None:
        """Note that a choice was judged."""
        self._measured = self.layers
        self.evaluations = max(0, self.evaluations - 1)

    def validated(self) -> None:
        """Note that a choice was judged on other text."""
        self.after = max(TIMED, self.after - 1)

    def left(self) -> float:
        """Return the seconds that the search and what follows it still take, as far as known."""
        now = time.monotonic()
        unmeasured = max(0, self.layers - self._measured)
        each = (now - self._measuring) / self._measured if self._measured else self.forward
        searching = unmeasured * each + self.evaluations * self.forward
        if self.minutes is not None:
            searching = min(searching, max(0.0, self._end(1.0) - now))
        return searching + self.after * self.forward

    def out_of_time(self, share: float) -> Callable[[], bool]:
        """Return what says whether this share of the minutes is over."""
        return lambda: not self.has_time_for(0, share)

    def has_time_for(self, forwards: int, share: float) -> bool:
        """Whether so many forwards end before this share of the minutes is over."""
        if self.minutes is None:
            return True
        return time.monotonic() + forwards * self.forward < self._end(share)

    def _end(self, share: float) -> float:
        """Return when this share of the time for searching is over."""
        assert self.minutes is not None
        return self.began + (60 * self.minutes - AFTER * self.forward) * share

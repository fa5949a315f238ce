"""How calls are timed: warm-up, shuffled interleaved rounds, medians.

On CUDA each call stands between two events, behind a read of a large buffer that takes the L2 cache
(a read, because lines that were written would go back to memory at the call's expense). It also
keeps the device busy while the host prepares the call, so the host's own time is not measured. On
the CPU it is the wall clock around the call.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]

FLUSH_BYTES = 1 << 30
WARM_UP_CALLS = 3
LONGEST_BATCH = 50


@dataclass(frozen=True)
class Repeats:
    """How often a call is repeated for one figure, and the seconds that takes."""

    number: int
    seconds: float


class Timer:
    """Times single calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.ones(FLUSH_BYTES // 4, device=device)

    def milliseconds(self, call: Call, repeats: int) -> float:
        """Return the median of ``repeats`` calls, in milliseconds."""
        if self._flush is None:
            return statistics.median(_wall(call) for _ in range(repeats))
        events = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.sum()
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(begin.elapsed_time(end) for begin, end in events)

    def repeats_for(self, call: Call, milliseconds: float) -> Repeats:
        """Warm the call up, and return how many fill ``milliseconds``."""
        once = self.milliseconds(call, 1)
        if once < 10 * milliseconds:
            once = self.milliseconds(call, WARM_UP_CALLS)
        number = max(1, min(LONGEST_BATCH, round(milliseconds / max(once, 1e-3))))
        return Repeats(number, number * once / 1e3)

    def repeats(self, calls: Mapping[str, Call], milliseconds: float) -> dict[str, Repeats]:
        """Return ``repeats_for`` of every call."""
        return {name: self.repeats_for(call, milliseconds) for name, call in calls.items()}


def interleaved(
    calls: Mapping[str, Call],
    repeats: Mapping[str, Repeats],
    timer: Timer,
    rounds: int,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Time every call once a round, the order shuffled in each round.

    Parameters
    ----------
    calls
        What to time, by name.
    repeats
        How often each is repeated for one figure.
    timer
        The device's timer.
    rounds
        How many figures each call gets.
    seed
        Of the shuffles.

    Returns
    -------
    dict
        A list of ``rounds`` times in milliseconds for each name.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(timer.milliseconds(calls[name], repeats[name].number))
    return times


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def _wall(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3

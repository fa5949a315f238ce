"""How calls are timed: warm-up, shuffled interleaved rounds, medians. There are three methods.

``single``: on CUDA each call stands between two events, after a read of a large buffer that takes
the L2 cache (a read, because lines that were written would go back to memory at the call's
expense). It also keeps the device busy while the host prepares the call, so the host's own time is
not measured. ``burst``: calls back to back, replayed from a CUDA graph where they can be captured:
a sustained load, as a model makes it. ``host``: the wall clock of calls that nobody waits for, on
inputs so small that the device is always ahead. On the CPU all three are the wall clock around the
call.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

Call = Callable[[], object]

FLUSH_BYTES = 1 << 30
WARM_UP_CALLS = 3
LONGEST_BATCH = 50
LONGEST_BURST = 200


@dataclass(frozen=True)
class Sample:
    """A call made ready: ``take`` gives one figure in milliseconds, and needs ``seconds``."""

    take: Callable[[], float]
    seconds: float
    captured: bool = True  # a burst that could not be captured consists of plain calls


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.ones(FLUSH_BYTES // 4, device=device)

    def milliseconds(self, call: Call, repeats: int) -> float:
        """Return the median of ``repeats`` single calls, in milliseconds."""
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

    def samples(
        self, calls: Mapping[str, Call], milliseconds: float, method: str = "single"
    ) -> dict[str, Sample]:
        """Return ``sample`` of every call."""
        return {name: self.sample(call, milliseconds, method) for name, call in calls.items()}

    def sample(self, call: Call, milliseconds: float, method: str = "single") -> Sample:
        """Warm the call up, and make it ready to be timed for about ``milliseconds`` a figure."""
        once = self.milliseconds(call, 1)
        if once < 10 * milliseconds:
            once = self.milliseconds(call, WARM_UP_CALLS)
        most = LONGEST_BATCH if method == "single" else LONGEST_BURST
        number = max(1, min(most, round(milliseconds / max(once, 1e-3))))
        seconds = number * once / 1e3
        if self._flush is None or method == "single":
            return Sample(lambda: self.milliseconds(call, number), seconds)
        if method == "host":
            return Sample(lambda: self._host(call, number), seconds)
        graph = _graph(call, number)
        if graph is None:
            calls = partial(_repeat, call, number)
            return Sample(lambda: self._between(calls, number), seconds, captured=False)
        graph.replay()
        return Sample(lambda: self._between(graph.replay, number), seconds)

    def _between(self, work: Call, number: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / number

    def _host(self, call: Call, number: int) -> float:
        torch.cuda.synchronize(self.device)
        took = _wall(lambda: _repeat(call, number))
        torch.cuda.synchronize(self.device)
        return took / number


def interleaved(
    samples: Mapping[str, Sample], rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Take every sample once a round, the order shuffled in each round.

    Parameters
    ----------
    samples
        What to time, by name.
    rounds
        How many figures each gets.
    seed
        Of the shuffles.

    Returns
    -------
    dict
        A list of ``rounds`` times in milliseconds for each name.
    """
    times: dict[str, list[float]] = {name: [] for name in samples}
    order = list(samples)
    shuffle = random.Random(seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(samples[name].take())
    return times


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def _graph(call: Call, number: int) -> torch.cuda.CUDAGraph | None:
    """Capture ``number`` calls in a row; None where the call cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The CUDA Graph is empty")
            with torch.cuda.graph(graph):
                _repeat(call, number)
    except Exception:
        torch.cuda.synchronize()
        return None
    return graph


def _repeat(call: Call, number: int) -> None:
    for _ in range(number):
        call()


def _wall(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3

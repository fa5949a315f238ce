"""Memory that a call takes beyond its inputs, and memory that stays reserved after many calls."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .timing import Call


def peak_bytes(call: Call, device: torch.device) -> int:
    """Return the most bytes that were allocated at one time during the call, output included.

    On CUDA from the allocator's counters; on the CPU from the profiler's memory events, which see
    every tensor allocation, those of the worker threads included.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with (
        _quiet_stderr(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    steps = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    now = peak = 0
    for _, step in sorted(steps, key=lambda event: event[0]):
        now += step
        peak = max(peak, now)
    return peak


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keep the profiler's own notes, which native code writes, off the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def reserved_bytes(device: torch.device) -> int:
    """Return what the process holds: the allocator's reserve on CUDA, else the residence."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_over_calls(
    call_of_length: Callable[[int], object],
    lengths: Sequence[int],
    device: torch.device,
    calls: int = 1000,
    seconds: float = 60.0,
) -> dict[str, object]:
    """Run ``calls`` calls of mixed lengths, and report how the reserve grew after a first pass.

    Ends after ``seconds`` at the latest; the number of calls made is in the result.

    The first pass over all lengths, longest first, sets the reserve; the rest must not add to it.
    What earlier work left in torch's cache is given back before, so that nothing hides in it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for length in sorted(lengths, reverse=True):
        call_of_length(length)
    first = reserved_bytes(device)
    order = random.Random(0)
    ends, made = time.monotonic() + seconds, 0
    while made < calls and time.monotonic() < ends:
        call_of_length(order.choice(lengths))
        made += 1
    last = reserved_bytes(device)
    return {
        "calls": made,
        "lengths": list(lengths),
        "first_pass_bytes": first,
        "last_bytes": last,
        "grew_bytes": last - first,
    }

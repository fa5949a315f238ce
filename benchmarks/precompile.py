"""Kernels that peers compile, compiled for all groups at once by processes side by side.

A compile takes tens of seconds of one core. The processes leave their kernels in torch's cache on
disk, where the run that times finds them; a case whose compile does not end in time is reported
as not run. Nothing is timed while they work.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .budget import NOT_RUN, Budget
from .cases import Case, Group
from .floors import BARS
from .inputs import Inputs
from .peers import COMPILED, contender

WORKERS = 12
# Where flash-attn 4 is found, it leaves its kernels on disk as torch does; read on its import.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

Compiled = tuple[str, Case]  # who compiles, and what


def compiled_cases(groups: Iterable[Group]) -> list[Compiled]:
    """Return what peers compile, each case once, those that a floor needs first."""
    vias = {*COMPILED} | ({"fa4"} if importlib.util.find_spec("flash_attn") else set())
    needed = {bar.group for bar in BARS if bar.against.startswith("flex")}
    entries = [(g.name in needed, e) for g in groups for e in g.entries if e.via in vias]
    first = [(e.via, e.case) for is_needed, e in entries if is_needed]
    return list(dict.fromkeys([*first, *((e.via, e.case) for _, e in entries)]))


def precompile(
    cases: Sequence[Compiled], device: torch.device, budget: Budget, say: Callable[[str], None]
) -> dict[Compiled, str]:
    """Compile the cases; return a sentence for each one that did not end within the budget."""
    if not cases:
        return {}
    context = multiprocessing.get_context("spawn")
    waiting, ended = context.Queue(), context.Queue()
    for case in cases:
        waiting.put(case)
    number = min(len(cases), WORKERS, max(1, (os.cpu_count() or 2) - 2))
    workers = [
        context.Process(target=_work, args=(waiting, ended, str(device)), daemon=True)
        for _ in range(number)
    ]
    for worker in workers:
        worker.start()
    open_cases = dict.fromkeys(cases)
    while open_cases and budget.reaches():
        try:
            case, outcome = ended.get(timeout=0.2)
            del open_cases[case]
            via, problem = case
            spent = budget.seconds - budget.left()
            say(f"[{spent:5.1f} s] compile {via}, {problem.label}: {outcome}")
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()
    took = budget.seconds - budget.left()
    say(f"[{took:5.1f} s] {len(cases) - len(open_cases)} of {len(cases)} cases of peers tried")
    why = f"{NOT_RUN} (its compile did not end within {budget.seconds:.0f} s)"
    return dict.fromkeys(open_cases, why)


def _work(waiting: Any, ended: Any, device: str) -> None:
    """Compile cases until none waits; a case that fails is left to the run, which says why."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    with torch.no_grad():
        while True:
            try:
                case = waiting.get(timeout=0.5)
            except queue.Empty:
                return
            began = time.monotonic()
            try:
                via, problem = case
                contender(via, problem, Inputs(problem, torch.device(device))).call()
                outcome = f"{time.monotonic() - began:.1f} s"
            except Exception as error:
                outcome = type(error).__name__
            ended.put((case, outcome))

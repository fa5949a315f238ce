"""From which length on a pattern is faster than dense attention on a device.

Measured once, on random tensors, for patterns whose keys do not depend on the data; kept for the
device in a small file, ``crossovers.json`` in ``SPARSE_ATTN_CACHE`` or in the user's cache folder.
"""

from __future__ import annotations

import json
import os
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..functional import sparse_attention
from ..patterns import Band, Dilated, Full, Pattern, Strided, TopK
from ._times import RUNS, stopwatch

__all__ = ["cache_file", "crossover"]

#: Lengths that are tried, doubling; a CPU stops where dense attention takes seconds.
FIRST, LAST = 128, {"cpu": 4096, "cuda": 32768}


def cache_file() -> Path:
    """Return the file that keeps what was measured."""
    folder = os.environ.get("SPARSE_ATTN_CACHE")
    if folder is None:
        usual = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(usual) / "sparse_attn")
    return Path(folder) / "crossovers.json"


def crossover(pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> int | None:
    """Return the least tried length from which on `pattern` is faster, causal; None beyond all.

    Parameters
    ----------
    pattern : Pattern
    query, key : Tensor
        ``(B, Hq, Sq, D)`` and ``(B, Hkv, Skv, D)``: heads, head dim, dtype and device count.

    Raises
    ------
    NotImplementedError
        A pattern that depends on the data, or that holds a layout of one length.
    """
    alone = isinstance(pattern, (Band, Dilated, Strided))
    if not (alone or (isinstance(pattern, TopK) and pattern.inside is None)):
        name = type(pattern).__name__
        raise NotImplementedError(f"sparse_attn.crossover: not served: {name} without its data")
    name = _name(pattern, query, key)
    kept = _read()
    if name not in kept:
        kept[name] = _measured(pattern, query, key)
        _write(kept)
    found = kept[name]
    return None if found is None else int(found)


def _name(pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> str:
    """Name everything that the time depends on."""
    from .. import __version__

    device = query.device
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{_processor()}, {torch.get_num_threads()} threads"
    heads = f"{query.shape[1]}/{key.shape[1]} heads of {query.shape[3]}"
    return f"{__version__} | {place} | {query.dtype} | {heads} | {pattern!r}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def _measured(pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> int | None:
    """Time both at doubling lengths, until the pattern was faster twice in a row."""
    faster: list[int] = []
    length, last = FIRST, LAST.get(query.device.type, LAST["cpu"])
    while length <= last and len(faster) < 2:
        tensors = [
            torch.randn(1, like.shape[1], length, like.shape[3], device=like.device).to(like.dtype)
            for like in (query, key, key)
        ]
        dense, own = (_seconds(tensors, timed) for timed in (Full(), pattern))
        faster = [*faster, length] if own < dense else []
        length *= 2
    return faster[0] if faster else None


def _seconds(tensors: list[torch.Tensor], pattern: Pattern) -> float:
    query, key, value = tensors

    def call() -> float:
        began = stopwatch()
        sparse_attention(query, key, value, pattern, is_causal=True)
        return stopwatch() - began

    call()
    return statistics.median(call() for _ in range(RUNS))


def _read() -> dict[str, Any]:
    """Return what the file holds; one that cannot be read is begun anew."""
    try:
        held = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _write(held: dict[str, Any]) -> None:
    """Keep what was measured; a folder that cannot be written keeps nothing."""
    path = cache_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(held, indent=1), encoding="utf-8")
        beside.replace(path)

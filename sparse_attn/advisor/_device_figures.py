"""Figures of a device that are measured once and kept: ``crossovers.json``.

The file is in ``SPARSE_ATTN_CACHE`` or in the user's cache folder. Used by `crossover` and the time
model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["cache_file", "kept_figure", "place_of"]


def cache_file() -> Path:
    """Return the file that keeps what was measured."""
    folder = os.environ.get("SPARSE_ATTN_CACHE")
    if not folder:
        usual = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(usual) / "sparse_attn")
    return Path(folder) / "crossovers.json"


def kept_figure(name: str, measure: Callable[[], Any]) -> Any:
    """Return the figure of this name, measured where the file does not have it."""
    kept = _read()
    if name not in kept:
        kept[name] = measure()
        _write(kept)
    return kept[name]


def place_of(query: torch.Tensor, key: torch.Tensor) -> str:
    """Name everything that a time depends on beside the pattern and the length."""
    from .. import __version__

    device = query.device
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{_processor()}, {torch.get_num_threads()} threads"
    heads = f"{query.shape[1]}/{key.shape[1]} heads of {query.shape[3]}"
    return f"{__version__} | {place} | {query.dtype} | {heads}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def _read() -> dict[str, Any]:
    """Return what the file holds; one that cannot be read is begun again."""
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

"""What the benchmark ran on, and what it can do: the ceilings of arithmetic and memory."""

from __future__ import annotations

import datetime
import platform
import re
from pathlib import Path

import torch

import sparse_attn as sa
from scripts.digests import evidence_digests, library_hashes
from scripts.gpus import driver_version

from .timing import Timer

READ_BYTES = 2 << 30
L2_RESIDENT_BYTES = 16 << 20
L2_PASSES = 64


def describe(device: torch.device) -> dict[str, object]:
    """Return the machine, the software and the digests of the tree."""
    facts: dict[str, object] = {
        "device": device.type,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "package": sa.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "digests": evidence_digests(),
        "libraries": library_hashes(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["driver"] = driver_version()
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def slug(device: torch.device) -> str:
    """Return the machine's name for a file's name."""
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu " + processor_name()
    )
    return file_name(name)


def file_name(text: str) -> str:
    """Return a text as a part of a file's name.

    >>> file_name("call 12 of")
    'call-12-of'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def processor_name() -> str:
    """Return the processor's model."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def ceilings(timer: Timer) -> dict[str, float]:
    """Measure the matrix product and the read-only sum, by dtype where it matters.

    Returns
    -------
    dict
        ``tflops/<dtype>``, and on CUDA ``read_tb_s`` (memory) and ``l2_read_tb_s`` (a buffer that
        fits the L2 cache, summed many times in one call).
    """
    found: dict[str, float] = {}
    cuda = timer.device.type == "cuda"
    sizes = {"bfloat16": 8192, "float16": 8192, "float32": 4096} if cuda else {"float32": 2048}
    for dtype, size in sizes.items():
        shape = (size, size)
        a, b = (torch.randn(shape, device=timer.device).to(getattr(torch, dtype)) for _ in range(2))
        ms = _best(timer, lambda a=a, b=b: a @ b)
        found[f"tflops/{dtype}"] = 2 * size**3 / ms / 1e9
    if not cuda:
        found["tflops/bfloat16"] = found["tflops/float16"] = found["tflops/float32"]
        return found
    large = torch.randn(READ_BYTES // 4, device=timer.device)
    found["read_tb_s"] = READ_BYTES / _best(timer, large.sum) / 1e9
    small = large[: L2_RESIDENT_BYTES // 4].expand(L2_PASSES, -1)
    ms = _best(timer, lambda: small.sum(dim=1))
    found["l2_read_tb_s"] = L2_PASSES * L2_RESIDENT_BYTES / ms / 1e9
    return found


def _best(timer: Timer, call: object) -> float:
    assert callable(call)
    timer.milliseconds(call, 3)
    return min(timer.milliseconds(call, 5) for _ in range(3))

"""The GPUs that a run may hand to its processes, and their driver."""

from __future__ import annotations

import os
import subprocess

import torch


def visible_gpus() -> list[str]:
    """Return what to set CUDA_VISIBLE_DEVICES to, for each GPU that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]


def driver_version() -> str:
    """Return the driver's version, or ``unknown``."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"

"""The GPUs that a run may hand to its processes."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> list[str]:
    """Return what to set CUDA_VISIBLE_DEVICES to, for each GPU that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]

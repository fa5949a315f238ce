"""Opens the op libraries beside this file: ``_C`` always, ``_C_cuda`` when torch has CUDA.

``_C`` holds the schemas and the CPU engines, so nothing works without it: the import fails with the
reason and the fix. A missing CUDA library only matters to calls with CUDA tensors; its reason is
kept in ``cuda_error`` for them. Neither library needs a GPU to be opened.
"""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["cuda_error", "load"]

FOLDER = Path(__file__).resolve().parent

#: Why the CUDA library is not there; None when it is.
cuda_error: str | None = None


def _open(name: str) -> str | None:
    """Open a library; return the reason when that fails."""
    path = FOLDER / f"{name}.so"
    if not path.exists():
        return f"{path.name} was not built"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path.name} does not load: {error}"
    return None


def load() -> None:
    """Open what this torch can use.

    Raises
    ------
    ImportError
        When the library of the schemas and CPU engines is missing or does not load.
    """
    global cuda_error
    reason = _open("_C")
    if reason is not None:
        raise ImportError(f"sparse_attn: {reason}; build it with `pip install -e .` in its folder")
    if torch.version.cuda is None:
        cuda_error = f"torch {torch.__version__} has no CUDA; install a CUDA build of torch"
        return
    reason = _open("_C_cuda")
    if reason is not None:
        cuda_error = f"{reason}; install the CUDA toolkit and rebuild with `pip install -e .`"

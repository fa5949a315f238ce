"""Opens the op libraries: ``_C`` always, ``_C_cuda`` when torch has CUDA.

They stand beside this file. A source folder that was not built, found first by a Python that was
started in the checkout, takes those of an installed copy of the same sources.

``_C`` holds the schemas and the CPU engines, so nothing works without it: the import fails with the
reason and the fix. A missing CUDA library only matters to calls with CUDA tensors; its reason is
kept in ``cuda_error`` for them. Neither library needs a GPU to be opened.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

__all__ = ["cuda_error", "load"]

OLDEST_TORCH = (2, 10)  # as in pyproject.toml

FOLDER = Path(__file__).resolve().parent

#: Why the CUDA library is not there; None when it is.
cuda_error: str | None = None


def _installed_copy() -> tuple[Path | None, str]:
    """Return the installed copy whose libraries this folder may use, and why there is none."""
    digests = FOLDER.parent / "scripts" / "digests.py"
    if not digests.exists():
        return None, "_C.so was not built; build it with `pip install -e .` in its folder"
    reason = (
        "_C.so was not built: this is the source folder, build it with make or pip install -e ., "
        "or leave it"
    )
    for entry in sys.path:
        copy = Path(entry).resolve() / FOLDER.name
        if copy == FOLDER or not (copy / "_C.so").exists():
            continue
        if runpy.run_path(str(digests))["is_copy"](copy):
            return copy, ""
        return None, f"{reason} ({copy} was built from other sources)"
    return None, reason


def _open(folder: Path, name: str) -> str | None:
    """Open a library; return the reason when that fails."""
    path = folder / f"{name}.so"
    if not path.exists():
        return f"{path.name} was not built"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path.name} does not load: {error.__cause__ or error}"  # torch's hides the reason
    return None


def load() -> None:
    """Open what this torch can use.

    Raises
    ------
    ImportError
        When torch is older than 2.10; when the library of the schemas and CPU engines is missing or
        does not load.
    """
    global cuda_error
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"sparse_attn: expected torch >= {oldest}, got {torch.__version__}")
    folder = FOLDER
    if not (folder / "_C.so").exists():
        copy, reason = _installed_copy()
        if copy is None:
            raise ImportError(f"sparse_attn: {reason}")
        folder = copy
        sys.modules[__package__].__path__.append(str(copy))  # where the info module is
    error = _open(folder, "_C")
    if error is not None:
        raise ImportError(f"sparse_attn: {error}; build it with `pip install -e .` in its folder")
    if torch.version.cuda is None:
        cuda_error = f"torch {torch.__version__} has no CUDA; install a CUDA build of torch"
        return
    error = _open(folder, "_C_cuda")
    if error is not None:
        cuda_error = f"{error}; install the CUDA toolkit and rebuild with `pip install -e .`"

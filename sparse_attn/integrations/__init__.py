"""Sparse attention in other packages' models; each module imports its package on demand."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

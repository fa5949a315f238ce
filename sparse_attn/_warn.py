"""Warnings that a process gives once each; traced calls give none."""

from __future__ import annotations

import sys
import warnings

import torch

__all__ = ["warn_once"]

_given: set[str] = set()
_PACKAGE = __name__.partition(".")[0]


def warn_once(key: str, sentence: str) -> None:
    """Warn with `sentence`, at the line that called the package, unless that of `key` was given."""
    if torch.compiler.is_compiling() or key in _given:
        return
    _given.add(key)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__package__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)


def _is_ours(package: str | None) -> bool:
    """Whether a frame's package is this one; a script that was started has none."""
    return package is not None and package.partition(".")[0] == _PACKAGE

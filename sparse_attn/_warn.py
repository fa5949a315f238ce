"""Warnings that a process gives once each; traced calls give none."""

from __future__ import annotations

import warnings

import torch

__all__ = ["warn_once"]

_given: set[str] = set()


def warn_once(key: str, sentence: str, stacklevel: int) -> None:
    """Warn with `sentence` unless that of `key` was given; `stacklevel` counts from the caller."""
    if torch.compiler.is_compiling() or key in _given:
        return
    _given.add(key)
    warnings.warn(sentence, stacklevel=stacklevel + 1)

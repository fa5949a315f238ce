"""What a search has measured, kept in a file, so that one that was cut off goes on where it stood.

The file belongs to one model, text and list of candidates; another one's is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._checks import refuse
from ..patterns import Pattern
from ._local import Local, Unit

__all__ = ["Memory"]

#: Of what the file holds; another one's is refused.
FORMAT = 5


class Memory:
    """Local figures and judged choices, in memory and, with a path, in a file.

    Parameters
    ----------
    path : path, optional
        Read where it exists and belongs to the same search; written after every step.
    model, calls, found
        What the search is about.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None,
        model: nn.Module,
        calls: Iterable[dict[str, Any]],
        found: Mapping[str, Pattern],
    ) -> None:
        self._path = None if path is None else Path(path)
        self._held: dict[str, Any] = {"of": "", "judged": {}}
        if self._path is None:
            return
        self._held["of"] = _fingerprint(model, calls, found)
        if not self._path.parent.is_dir():
            raise refuse("advise", "resume in a folder that exists", str(path))
        if self._path.exists():
            self._held = _read(self._path, self._held["of"])
        try:
            self._write()
        except OSError as error:
            got = f"{path} ({error.strerror})"
            raise refuse("advise", "resume to name a file that can be written", got) from error

    def recall(self, local: Local) -> bool:
        """Fill in local figures that were measured before; False where there are none."""
        if "local" not in self._held:
            return False
        for layer, head, allowed, figures in self._held["local"]:
            local.allowed[layer, head] = allowed
            local.figures[layer, head] = {name: tuple(row) for name, row in figures.items()}
        local.skipped = set(self._held["skipped"])
        return True

    def keep(self, local: Local) -> None:
        """Keep local figures."""
        self._held["local"] = [
            [*unit, local.allowed[unit], figures] for unit, figures in local.figures.items()
        ]
        self._held["skipped"] = sorted(local.skipped)
        self._write()

    def judged(self, choice: Mapping[Unit, str]) -> tuple[float, float, float] | None:
        """Return what a choice kept and lost, and its margin; None where it was not judged."""
        figures = self._held["judged"].get(_key(choice))
        return None if figures is None else (figures[0], figures[1], figures[2])

    def add(self, choice: Mapping[Unit, str], figures: tuple[float, float, float]) -> None:
        """Keep what a choice kept and lost, and its margin."""
        self._held["judged"][_key(choice)] = figures
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            beside = self._path.with_name(self._path.name + ".new")
            beside.write_text(json.dumps(self._held))
            beside.replace(self._path)  # a run that is cut off leaves the old file or the new one


def _read(path: Path, fingerprint: str) -> dict[str, Any]:
    """Return what an earlier run of a search wrote; refuse others, which would be written over."""
    what, got = "resume to name a new file or that of an earlier search", str(path)
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refuse("advise", what, got) from error
    if not isinstance(held, dict) or "of" not in held:
        raise refuse("advise", what, got)
    if held["of"] != fingerprint:
        other = f"{path} of another model, other inputs or patterns, or an earlier version"
        raise refuse("advise", "resume to name a new file or that of this search", other)
    if not _is_whole(held):
        raise refuse("advise", what, f"{path}, which was changed")
    return held


def _is_whole(held: Mapping[str, Any]) -> bool:
    """Whether the figures have the shape that `Memory` writes."""
    judged, local, skipped = (held.get(name) for name in ("judged", "local", "skipped"))
    if not isinstance(judged, dict) or not all(map(_numbers(3), judged.values())):
        return False
    if local is None:
        return True
    rows = isinstance(local, list) and all(isinstance(row, list) and len(row) == 4 for row in local)
    figures = rows and local and all(isinstance(row[3], dict) for row in local)
    return (
        isinstance(skipped, list)
        and bool(figures)
        and all(_numbers(3)(row[:3]) and all(map(_numbers(4), row[3].values())) for row in local)
    )


def _numbers(count: int) -> Callable[[Any], bool]:
    """Return what says whether a value is a list of so many numbers."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(number, (int, float)) for number in value)
    )


def _key(choice: Mapping[Unit, str]) -> str:
    named = ";".join(f"{layer}.{head}={choice[layer, head]}" for layer, head in sorted(choice))
    return hashlib.sha256(named.encode()).hexdigest()


def _fingerprint(
    model: nn.Module, calls: Iterable[dict[str, Any]], found: Mapping[str, Pattern]
) -> str:
    """Return a digest of the model's class and first weights, the inputs and the candidates."""
    candidates = {name: _held(pattern) for name, pattern in found.items()}
    digest = hashlib.sha256(f"{FORMAT} {type(model).__name__} {candidates!r}".encode())
    for name, parameter in model.named_parameters():
        first = parameter.detach().flatten()[:16].float().tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {first}".encode())
    for call in calls:
        for name, value in call.items():
            held = value.tolist() if isinstance(value, torch.Tensor) else value
            digest.update(f"{name} {held}".encode())
    return digest.hexdigest()


def _held(value: Any) -> Any:
    """Return all that a pattern holds, the numbers of its tensors too, which repr leaves out."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value).__name__, {name: _held(own) for name, own in fields.items()}
    return repr(value)

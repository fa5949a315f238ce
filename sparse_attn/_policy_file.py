"""A policy as JSON: what a file holds of it, and the reading of one, each refusal a sentence.

A pattern is its class's name and all its fields, so that a file means the same when defaults
change; a file of another version is refused. Called by `Policy.save` and `Policy.load`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ._checks import check_kind, dtype_name, kind_of, refuse
from .patterns import Band, BlockTopK, Dilated, Full, Pattern, Strided, TopK

__all__ = ["FIELDS", "read", "write"]

FORMAT, VERSION = "sparse_attn policy", 1
_KINDS = {kind.__name__: kind for kind in (Band, BlockTopK, Dilated, Full, Strided, TopK)}
_Made = TypeVar("_Made")
_SAVE, _LOAD = "Policy.save", "Policy.load"


def pattern_to(pattern: Pattern) -> dict[str, Any]:
    """Return a pattern's class name and fields; refuse those that hold data of one text."""
    name = type(pattern).__name__
    if _KINDS.get(name) is not type(pattern):
        raise refuse(_SAVE, f"patterns among {', '.join(_KINDS)}", name)
    fields = {f.name: getattr(pattern, f.name) for f in dataclasses.fields(pattern) if f.init}
    return {"kind": name} | {field: _value_to(name, field, v) for field, v in fields.items()}


def _value_to(name: str, field: str, value: Any) -> Any:
    if isinstance(value, Pattern):
        return pattern_to(value)
    if isinstance(value, torch.Tensor) and field == "global_tokens":
        return {"positions": value.tolist(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, tuple):
        return list(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise refuse(_SAVE, f"{name}.{field} that a file can hold", kind_of(value))


def pattern_from(entry: Any) -> Pattern:
    """Make the pattern that `pattern_to` described."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("kind"), str):
        raise refuse(_LOAD, "a pattern with its kind", json.dumps(entry))
    fields = {name: _value_from(value) for name, value in entry.items() if name != "kind"}
    kind = _KINDS.get(entry["kind"])
    if kind is None:
        raise refuse(_LOAD, f"patterns among {', '.join(_KINDS)}", repr(entry["kind"]))
    unknown = set(fields) - {field.name for field in dataclasses.fields(kind) if field.init}
    if unknown:
        raise refuse(_LOAD, f"fields of {kind.__name__}", ", ".join(sorted(unknown)))
    try:
        made: Pattern = kind(**fields)
    except (TypeError, ValueError) as error:
        raise refuse(
            _LOAD, f"a pattern {kind.__name__}", f"one that is refused ({error})"
        ) from None
    return made


def _value_from(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _positions(value) if "positions" in value else pattern_from(value)
    return tuple(value) if isinstance(value, list) else value


def _positions(entry: Mapping[str, Any]) -> torch.Tensor:
    """Make the tensor of positions; files without its dtype have int64."""
    values, dtype = entry["positions"], entry.get("dtype", "int64")
    if dtype not in ("int32", "int64"):
        raise refuse(_LOAD, "positions of dtype int32 or int64", json.dumps(dtype))
    try:
        if isinstance(values, list) and all(type(position) is int for position in values):
            return torch.tensor(values, dtype=getattr(torch, dtype))
    except (ValueError, RuntimeError):  # beyond the dtype
        pass
    raise refuse(_LOAD, "positions, a list of ints", json.dumps(values))


def _unreachable(owner: str, what: str, path: object, error: OSError) -> OSError:
    got = f"{path} ({error.strerror or error})"
    return type(error)(f"sparse_attn.{owner}: expected {what}, got {got}")


def write(path: str | PathLike[str], fields: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write a policy's fields; `about` says where it comes from and is not read back."""
    held = {
        name: None if value is None else FIELDS[name].to(value) for name, value in fields.items()
    }
    check_kind(_SAVE, "path", path, (str, PathLike), "a path")
    check_kind(_SAVE, "about", about, Mapping, "a mapping")
    whole = {"format": FORMAT, "version": VERSION} | held | {"about": dict(about)}
    try:
        text = json.dumps(whole, indent=1)
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse(_SAVE, "about that JSON can hold", f"one that it cannot ({error})") from None
    try:
        Path(path).write_text(f"{text}\n")
    except OSError as error:
        raise _unreachable(_SAVE, "a file that can be written", path, error) from None


def read(path: str | PathLike[str], make: Callable[..., _Made]) -> _Made:
    """Return what `make`, the policy's class, makes of the fields in a file."""
    check_kind(_LOAD, "path", path, (str, PathLike), "a path")
    try:
        held = json.loads(Path(path).read_text())
    except OSError as error:
        raise _unreachable(_LOAD, "a policy file", path, error) from None
    except (ValueError, RecursionError):
        raise refuse(_LOAD, "a policy file (JSON)", path) from None
    if not isinstance(held, dict) or held.get("format", FORMAT) != FORMAT or "version" not in held:
        raise refuse(_LOAD, "a policy file with its version", path)
    if held["version"] != VERSION:
        raise refuse(_LOAD, f"a policy file of version {VERSION}", f"version {held['version']!r}")
    fields = {name: value for name, value in held.items() if name not in _BESIDE}
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown or fields.get("pattern") is None:
        got = f"{path} with {', '.join(unknown)}" if unknown else f"{path} without a pattern"
        raise refuse(_LOAD, f"a policy of {', '.join(FIELDS)}", got)
    try:
        return make(**{name: FIELDS[name].back(v) for name, v in fields.items() if v is not None})
    except (AttributeError, TypeError, ValueError) as error:
        if str(error).startswith(f"sparse_attn.{_LOAD}"):
            raise
        raise refuse(_LOAD, "a policy", f"{path} ({error})") from None


def _numbered(entry: Callable[[Any], Any]) -> Callable[[Mapping[Any, Any]], dict[int, Any]]:
    """Return what makes entries of numbers, which JSON has as strings."""

    def made(entries: Mapping[Any, Any]) -> dict[int, Any]:
        if not isinstance(entries, Mapping):
            raise ValueError(f"expected entries by number, got {json.dumps(entries):.60}")
        return {_number(number): entry(own) for number, own in entries.items()}

    return made


def _number(name: Any) -> int:
    try:
        return int(name)
    except ValueError:
        raise ValueError(f"expected the number of a layer or head, got {name!r}") from None


class _Field(NamedTuple):
    """How a policy's field goes into the file and is made of what the file holds."""

    to: Callable[[Any], Any]
    back: Callable[[Any], Any]


_PLAIN = _Field(lambda value: value, lambda value: value)
_PATTERN = _Field(pattern_to, pattern_from)
_LAYERS = _Field(_numbered(pattern_to), _numbered(pattern_from))
_HEADS = _Field(_numbered(_LAYERS.to), _numbered(_LAYERS.back))

#: A policy's fields; null is the default.
FIELDS = {
    "pattern": _PATTERN,
    "dense_layers": _PLAIN,
    "dense_below": _PLAIN,
    "decode": _PATTERN,
    "num_layers": _PLAIN,
    "layers": _LAYERS,
    "heads": _HEADS,
    "num_key_heads": _PLAIN,
}
_BESIDE = ("format", "version", "about")

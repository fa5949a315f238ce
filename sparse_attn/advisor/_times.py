"""Seconds of a model's forward, at any length and under any policy, and of single calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .._binding import bound
from .._checks import check_integer, check_kind, refuse
from ..functional import sparse_attention
from ..patterns import Pattern
from ..policy import Policy
from ..quality._calls import call_model, shapes, stopwatch

__all__ = [
    "at_length",
    "checked_lengths",
    "in_turns",
    "is_text",
    "length_of",
    "random_tensors",
    "seconds_of",
    "seconds_of_call",
    "text_of",
]

#: Rounds that are timed anyway.
RUNS = 3
#: Most rounds of calls that take turns.
_ROUNDS = 49


def length_of(owner: str, call: dict[str, Any], name: str = "inputs") -> int:
    """Return the length of a text, the second size of its tensor; sentences say `name`."""
    return int(text_of(owner, call, name).shape[1])


def text_of(owner: str, call: dict[str, Any], name: str = "inputs") -> torch.Tensor:
    """Return the tensor of a text, ``(B, S)`` or ``(B, S, E)``; of images the first tensor."""
    there = [v for v in call.values() if isinstance(v, torch.Tensor) and v.dim() > 1 and v.shape[1]]
    texts = [v for v in there if _has_length(v)] or there
    if texts:
        return texts[0]
    got = [
        f"{key} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else key
        for key, value in call.items()
    ]
    raise refuse(owner, f"{name} with a tensor (B, S, ...)", ", ".join(got) or "none")


def _has_length(tensor: torch.Tensor) -> bool:
    """Whether dimension 1 is a length; of images and videos it is not."""
    return 1 < tensor.dim() <= 3


def is_text(owner: str, call: dict[str, Any]) -> bool:
    """Whether a call can be cut and repeated to other lengths."""
    return _has_length(text_of(owner, call))


def checked_lengths(owner: str, lengths: Any) -> list[int]:
    """Return lengths to measure at, at least one."""
    check_kind(owner, "lengths", lengths, (list, tuple, range), "a list of ints")
    if not lengths:
        raise refuse(owner, "at least one of lengths", "none")
    return [check_integer(owner, "lengths", length, 1) for length in lengths]


def _cut_dims(name: str, value: torch.Tensor, text: torch.Tensor) -> list[int]:
    """Return which dimensions of an argument go along with the length of a text.

    Of a mask (..., Sq or 1, Skv) these are its queries and keys.
    """
    batch, length = text.shape[:2]
    dims = [1] if _has_length(value) else []
    if name.endswith("mask") and not (value.dim() == 2 and len(value) == batch):
        dims = list(range(value.dim()))[-2:]
    return [dim for dim in dims if value.shape[dim] == length]


def resized(owner: str, call: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a call of `length` positions: cut, or repeated from the start.

    What is not of the text's length, such as images beside it, stays as it came. A text beside a
    mask of its pairs, which says nothing of others, is not repeated.
    """
    text = text_of(owner, call)
    made, own = dict(call), text.shape[1]
    for name, value in call.items():
        if not isinstance(value, torch.Tensor) or length == own:
            continue
        dims = _cut_dims(name, value, text)
        if length > own and len(dims) > 1:
            what = f"lengths of at most {own} beside {name}, a mask of pairs"
            raise refuse(owner, what, length)
        index = torch.arange(length, device=value.device) % own
        for dim in dims:
            made[name] = made[name].index_select(dim, index)
    return made


@contextmanager
def at_length(
    owner: str, model: nn.Module, call: dict[str, Any], length: int
) -> Iterator[dict[str, Any]]:
    """Give a call of `length` positions to what is inside.

    Dimension 1 of features may be no length, as in (batch, mel, time), and images stand at places
    of their text: what a model says of a shape that no user gave comes with the shape that came.
    """
    made = resized(owner, call, length)
    try:
        yield made
    except ValueError as error:
        said = error.__cause__  # the model's own, as call_model has it
        own = length_of(owner, call)
        if length == own or said is None or str(said).startswith("sparse_attn"):
            raise
        cut = {name: value for name, value in call.items() if made[name] is not value}
        beside = {name: value for name, value in call.items() if name not in cut}
        features = {name: value for name, value in cut.items() if value.dim() == 3}
        words = f"{type(said).__name__}: {' '.join(str(said).split()):.200}"
        words = f"{type(model).__name__} refuses that length by {words}"
        end = f"lengths=[{own}] takes them as they came; {words}"
        if features:
            what = f"inputs (batch, length, ...), their dimension 1 cut or repeated to {length}"
            raise refuse(owner, what, f"{shapes(features)}; {end}") from said
        if cut and beside:
            what = f"inputs whose text can be cut or repeated to {length} positions"
            raise refuse(owner, what, f"{shapes(cut)} beside {shapes(beside)}; {end}") from said
        raise


def in_turns(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Return the seconds of calls that take turns, each a list with a number for each round.

    What slows the machine for a while then slows all of them. After a round that warms up there are
    three, and more up to `seconds` in all.
    """
    for call in calls:
        call()
    taken: list[list[float]] = [[] for _ in calls]
    first = stopwatch()
    for number in range(_ROUNDS):
        if number >= RUNS and stopwatch() - first > seconds:
            break
        for call, own in zip(calls, taken, strict=True):
            began = stopwatch()
            call()
            own.append(stopwatch() - began)
    return taken


@torch.no_grad()
def seconds_of(
    owner: str, model: nn.Module, call: dict[str, Any], policy: Policy | Pattern | None
) -> float:
    """Return the median seconds of three forwards, after one that warms up."""
    with bound(owner, model, policy):
        return _seconds(partial(call_model, owner, model, call))


def random_tensors(query: torch.Tensor, key: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Return query, key and value of a length, with the heads, dtype and device of these."""
    return [
        torch.randn(1, like.shape[1], length, like.shape[3], device=like.device).to(like.dtype)
        for like in (query, key, key)
    ]


def seconds_of_call(tensors: list[torch.Tensor], pattern: Pattern, is_causal: bool = True) -> float:
    """Return the median seconds of three calls, after one that warms up."""
    return _seconds(partial(sparse_attention, *tensors, pattern, is_causal=is_causal))


def _seconds(call: Callable[[], object]) -> float:
    (taken,) = in_turns([call], 0.0)
    return statistics.median(taken)

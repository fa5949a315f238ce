"""What a contestant hands over: the call to time, and what was prepared for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cases import Case
from .inputs import Inputs

Attention = Callable[[], torch.Tensor]
Build = Callable[[Case, Inputs], "Contender"]


class Unavailable(RuntimeError):
    """The peer cannot take part; the sentence says why."""


def _as_it_is(out: torch.Tensor) -> torch.Tensor:
    return out


@dataclass(frozen=True)
class Contender:
    """A call to time."""

    call: Attention
    engine: str = ""  # which engine of the package serves it
    setup_ms: float | None = None  # building a mask, timed apart
    attends: bool = True  # the result is the case's attention, so its error can be measured
    arrange: Callable[[torch.Tensor], torch.Tensor] = _as_it_is  # the result as (B, Hq, Sq, D)

"""From which length on a pattern is faster than dense attention on a device.

Measured once, on random tensors, for patterns whose keys do not depend on the data, and kept for
the device.
"""

from __future__ import annotations

import torch

from ..patterns import Band, Dilated, Full, Pattern, Strided, TopK
from ._device_figures import kept_figure, place_of
from ._times import random_tensors, seconds_of_call

__all__ = ["crossover", "stands_alone"]

#: Lengths that are tried, doubling; a CPU stops where dense attention takes seconds.
FIRST, LAST = 128, {"cpu": 4096, "cuda": 32768}


def crossover(
    pattern: Pattern, query: torch.Tensor, key: torch.Tensor, is_causal: bool = True
) -> int | None:
    """Return the least tried length from which on `pattern` is faster; None beyond all.

    Parameters
    ----------
    pattern : Pattern
    query, key : Tensor
        ``(B, Hq, Sq, D)`` and ``(B, Hkv, Skv, D)``: heads, head dim, dtype and device count.
    is_causal : bool
        Of both calls.

    Raises
    ------
    NotImplementedError
        A pattern that depends on the data, or that holds a layout of one length.
    """
    if not stands_alone(pattern):
        name = type(pattern).__name__
        raise NotImplementedError(f"sparse_attn.crossover: not served: {name} without its data")
    name = f"{place_of(query, key)} | {pattern!r}{'' if is_causal else ' | not causal'}"
    found = kept_figure(name, lambda: _measured(pattern, query, key, is_causal))
    return None if found is None else int(found)


def stands_alone(pattern: Pattern) -> bool:
    """Whether a pattern can be timed at any length, on random tensors."""
    alone = isinstance(pattern, (Band, Dilated, Strided))
    return alone or (isinstance(pattern, TopK) and pattern.inside is None)


def _measured(
    pattern: Pattern, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> int | None:
    """Time both at doubling lengths, until the pattern was faster twice in a row."""
    faster: list[int] = []
    length, last = FIRST, LAST.get(query.device.type, LAST["cpu"])
    while length <= last and len(faster) < 2:
        tensors = random_tensors(query, key, length)
        dense, own = (seconds_of_call(tensors, timed, is_causal) for timed in (Full(), pattern))
        faster = [*faster, length] if own < dense else []
        length *= 2
    return faster[0] if faster else None

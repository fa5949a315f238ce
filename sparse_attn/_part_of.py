"""`part_of`: the methods of a mix-in are called as those of the class that users write.

Python's own errors, such as that of a missing argument, name a function as it was defined.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from typing import TypeVar

__all__ = ["part_of"]

Kind = TypeVar("Kind", bound=type)


def part_of(name: str) -> Callable[[Kind], Kind]:
    """Return a decorator of the mix-in of a public class `name`."""

    def named(mix_in: Kind) -> Kind:
        for member in vars(mix_in).values():
            function = getattr(member, "__func__", member)
            if isfunction(function):
                function.__qualname__ = f"{name}.{function.__name__}"
        return mix_in

    return named

"""Names of a model's modules: those that `only` asks for, and those of cross attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ._checks import check_kind, refuse

__all__ = ["CROSS_ATTENTION", "named_by", "refuse_names"]

#: Names that a sentence lists.
_SHOWN = 3

#: Matches the paths of cross attention, as models of many families call it.
CROSS_ATTENTION = r"cross|encoder_attn|encdec|encoder_decoder"


def named_by(owner: str, only: Any) -> Callable[[str], bool]:
    """Return the function that says whether a module's path is asked for; None asks for all."""
    if only is None:
        return lambda path: True
    check_kind(owner, "only", only, Sequence, "a name or a sequence of names")
    names = [only] if isinstance(only, str) else only
    for name in names:
        check_kind(owner, "each of only", name, str, "a name")
    return lambda path: any(fnmatchcase(path, name) for name in names)


def refuse_names(owner: str, what: str, only: Any, there: Sequence[str]) -> ValueError:
    """Make the error of names that match none of those that are there, at least one."""
    shown = [name or "'' (the model itself)" for name in there[:_SHOWN]]
    listed = ", ".join(shown + ["..."] * (len(there) > _SHOWN))
    return refuse(owner, f"{what} under the names {only!r}", f"none; it has {len(there)}: {listed}")

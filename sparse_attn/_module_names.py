"""Names of a model's modules: those that `only` asks for, and those of cross attention."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from ._checks import check_kind, refuse

__all__ = ["CROSS_ATTENTION", "named_by"]

#: Names that a sentence lists.
_SHOWN = 3

#: Matches the paths of cross attention, as models of many families call it.
CROSS_ATTENTION = r"cross|encoder_attn|encdec|encoder_decoder"


def named_by(owner: str, what: str, only: Any, there: Sequence[str]) -> Sequence[str]:
    """Return those of the paths `there`, of `what`, that are asked for; None asks for all.

    Raises
    ------
    ValueError
        A name that matches none of them.
    """
    if only is None:
        return there
    check_kind(owner, "only", only, Sequence, "a name or a sequence of names")
    names = [only] if isinstance(only, str) else only
    for name in names:
        check_kind(owner, "each of only", name, str, "a name")
    unknown = [name for name in names if not any(fnmatchcase(path, name) for path in there)]
    if unknown or not names:
        asked = only if isinstance(only, str) else unknown
        shown = [path or "'' (the model itself)" for path in there[:_SHOWN]]
        listed = ", ".join(shown + ["..."] * (len(there) > _SHOWN))
        got = f"none; it has {len(there)}: {listed}"
        raise refuse(owner, f"{what} under the names {asked!r}", got)
    return [path for path in there if any(fnmatchcase(path, name) for name in names)]

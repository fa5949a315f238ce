"""`Table`: patterns by layer or head that stay as they are, inside a `Policy` or a `ByHead`."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Table"]


class Table(dict[int, Any]):
    """Entries by number, which stay as they are: they were checked, and hashed by, once."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Table, (dict(self),)

    def _refuse(self, *arguments: object, **keywords: object) -> NoReturn:
        raise TypeError(
            "sparse_attn: expected the patterns of a Policy or ByHead to stay as they are, got a "
            "change; dataclasses.replace(policy, layers={**policy.layers, 3: pattern}) makes "
            "another one"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

"""Ready policies: dense layers on top, and every n-th one. Inherited by `Policy`."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from ._checks import Number, check_integer, check_kind, check_num_layers, refuse
from ._part_of import part_of
from .patterns import Pattern

__all__ = ["ReadyPolicies"]

Made = TypeVar("Made", bound="ReadyPolicies")


@part_of("Policy")
class ReadyPolicies:
    """Constructors of `Policy` for models whose dense layers follow a rule.

    Examples
    --------
    >>> from sparse_attn import Band, Policy
    >>> Policy.dense_every(Band(64), num_layers=16).dense_layers
    (7, 15)
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise NotImplementedError

    @classmethod
    def dense_on_top(
        cls: type[Made],
        pattern: Pattern,
        num_layers: int,
        share: float = 0.2,
        *,
        dense_below: int | None = None,
        decode: Pattern | None = None,
    ) -> Made:
        """Make the last ``ceil(share * num_layers)`` layers dense.

        Parameters
        ----------
        pattern, num_layers, dense_below, decode
            As in the class.
        share : float
            Share of the layers, from 0 to 1.

        Returns
        -------
        Policy

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; no layers; a share outside 0 to 1.

        Examples
        --------
        >>> from sparse_attn import Band, Policy
        >>> Policy.dense_on_top(Band(64), num_layers=10).dense_layers
        (8, 9)
        """
        check_num_layers("Policy.dense_on_top", num_layers)
        check_kind("Policy.dense_on_top", "share", share, Number, "a float")
        if not 0 <= share <= 1:
            raise refuse("Policy.dense_on_top", "share from 0 to 1", share)
        first = num_layers - math.ceil(round(float(share) * num_layers, 6))
        top = range(first, num_layers)
        return cls(
            pattern, dense_layers=top, dense_below=dense_below, decode=decode, num_layers=num_layers
        )

    @classmethod
    def dense_every(
        cls: type[Made],
        pattern: Pattern,
        num_layers: int,
        n: int = 8,
        *,
        dense_below: int | None = None,
        decode: Pattern | None = None,
    ) -> Made:
        """Make every n-th layer dense: n - 1, 2n - 1, and so on.

        Parameters
        ----------
        pattern, num_layers, dense_below, decode
            As in the class.
        n : int
            Distance of dense layers, at least 1.

        Returns
        -------
        Policy

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; no layers; an `n` below 1.

        Examples
        --------
        >>> from sparse_attn import Band, Policy
        >>> Policy.dense_every(Band(64), num_layers=12, n=4).dense_layers
        (3, 7, 11)
        """
        check_num_layers("Policy.dense_every", num_layers)
        check_integer("Policy.dense_every", "n", n, 1)
        nth = range(n - 1, num_layers, n)
        return cls(
            pattern, dense_layers=nth, dense_below=dense_below, decode=decode, num_layers=num_layers
        )

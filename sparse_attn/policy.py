"""Which pattern runs where: by layer, by key length and at decode.

``pattern`` in every layer, dense attention in ``dense_layers`` and below ``dense_below`` keys, and
a pattern of its own for single queries. Patterns never change by themselves; a policy changes them,
because it says so. Used by ``sparse_attn.nn`` and ``sparse_attn.integrations``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby
from typing import Any

from ._checks import Number, check_integer, check_kind, check_share, refuse
from ._pattern import check_pattern
from .patterns import Band, Dilated, Full, Pattern, Strided

__all__ = ["Policy", "as_policy"]


def _widened(pattern: Pattern) -> Pattern:
    """Make the dense form of `pattern`: finite sides become unlimited, a side of 0 stays 0."""
    if isinstance(pattern, Strided):
        return Band((None, 0))
    if not isinstance(pattern, (Band, Dilated)):
        return Full()
    left, right = (0 if side == 0 else None for side in pattern.window)  # type: ignore[union-attr]
    if left is None and right is None:
        return Full()
    if isinstance(pattern, Dilated):
        return Band((left, right), sinks=pattern.sinks)
    return replace(pattern, window=(left, right))


def _twice_reach(pattern: Pattern) -> int:
    """Twice the reach of a window, 0 for patterns without a finite side."""
    if not isinstance(pattern, (Band, Dilated)):
        return 0
    sides = [side for side in pattern.window if side is not None]  # type: ignore[union-attr]
    if not sides:
        return 0
    return 2 * (max(sides) + 1) * (pattern.dilation if isinstance(pattern, Dilated) else 1)


@dataclass(frozen=True)
class Policy:
    """A pattern for each layer, key length and for decode.

    Layers are numbered from 0 in module order; cross attention is no layer and stays dense.

    Parameters
    ----------
    pattern : Pattern
        Runs wherever nothing below says otherwise.
    dense_layers : iterable of int
        Layers that are always dense.
    dense_below : int, optional
        Attention is dense when the call has fewer keys. The default is twice the reach of a
        windowed pattern, ``2 * (largest finite side + 1) * dilation``, and 0 for all others.
    decode : Pattern, optional
        Runs when one query meets more than one key. None keeps `pattern`; ``Full()`` lets its
        window grow to all keys.
    num_layers : int, optional
        Number of layers the policy is made for; a model with another number refuses it.

    Notes
    -----
    Dense attention and a decode of ``Full()`` keep the sides of the pattern: every finite side
    becomes unlimited, but a side of 0 stays 0, so a causal band never looks ahead. The key length
    of a static cache is its capacity.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; a negative number; a layer beyond `num_layers`.

    Examples
    --------
    >>> from sparse_attn import Band, Full, Policy
    >>> policy = Policy(Band((3, 0)), dense_layers=[1], decode=Full())
    >>> policy.choose(0, Sq=64, Skv=64)
    Band(window=(3, 0), sinks=0, global_tokens=None)
    >>> policy.choose(1, Sq=64, Skv=64)
    Band(window=(None, 0), sinks=0, global_tokens=None)
    >>> policy.dense_below
    8

    References
    ----------
    Full layers among windowed ones: Brown et al. 2020, section 2.1 (GPT-3); Beltagy et al. 2020.
    """

    pattern: Pattern
    _: KW_ONLY
    dense_layers: Iterable[int] = ()
    dense_below: int | None = None
    decode: Pattern | None = None
    num_layers: int | None = None
    # Set when dense_below was not given, so that `replace` with another pattern finds it again.
    _default_below: int | None = field(default=None, repr=False, compare=False)
    _dense: Pattern = field(init=False, repr=False)
    _decode: Pattern = field(init=False, repr=False)

    def __post_init__(self) -> None:
        owner = "Policy"
        check_pattern(owner, self.pattern)
        if self.num_layers is not None:
            check_integer(owner, "num_layers", self.num_layers, 1)
        check_kind(owner, "dense_layers", self.dense_layers, Iterable, "an iterable of ints")
        layers = {check_integer(owner, "dense_layers", layer, 0) for layer in self.dense_layers}
        self._set("dense_layers", tuple(sorted(layers)))
        if layers and self.num_layers is not None and max(layers) >= self.num_layers:
            raise refuse(owner, f"dense_layers below num_layers {self.num_layers}", max(layers))
        if self.dense_below is None or self.dense_below == self._default_below:
            self._set("dense_below", _twice_reach(self.pattern))
            self._set("_default_below", self.dense_below)
        else:
            check_integer(owner, "dense_below", self.dense_below, 0)
        self._set("_dense", _widened(self.pattern))
        if self.decode is None:
            self._set("_decode", self.pattern)
        else:
            check_kind(owner, "decode", self.decode, Pattern, "a pattern or None")
            self._set("_decode", self._dense if isinstance(self.decode, Full) else self.decode)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def choose(self, layer: int, Sq: int, Skv: int) -> Pattern:
        """Return the pattern of a call.

        Parameters
        ----------
        layer : int
            Number of the layer.
        Sq, Skv : int
            Numbers of queries and keys.

        Returns
        -------
        Pattern

        Raises
        ------
        TypeError, ValueError
            Numbers that are no ints of at least 0.

        Examples
        --------
        >>> from sparse_attn import Band, Policy
        >>> Policy(Band(7)).choose(layer=0, Sq=4, Skv=4)
        Full()
        """
        for name, number in (("layer", layer), ("Sq", Sq), ("Skv", Skv)):
            check_integer("Policy.choose", name, number, 0)
        if layer in self.dense_layers or Skv < self.dense_below:  # type: ignore[operator]
            return self._dense
        return self._decode if Sq == 1 and Skv > 1 else self.pattern

    def patterns(self) -> tuple[Pattern, ...]:
        """Return all patterns that `choose` may return.

        Returns
        -------
        (Pattern, Pattern, Pattern)
            The usual one, the dense one, that of decode.

        Examples
        --------
        >>> from sparse_attn import Full, Policy, TopK
        >>> Policy(TopK(64), decode=Full()).patterns()
        (TopK(k=64), Full(), Full())
        """
        return self.pattern, self._dense, self._decode

    @classmethod
    def dense_on_top(
        cls,
        pattern: Pattern,
        num_layers: int,
        share: float = 0.2,
        *,
        dense_below: int | None = None,
        decode: Pattern | None = None,
    ) -> Policy:
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
            An argument of a wrong kind; a number out of range.

        Examples
        --------
        >>> from sparse_attn import Band, Policy
        >>> Policy.dense_on_top(Band(64), num_layers=10).dense_layers
        (8, 9)
        """
        check_integer("Policy.dense_on_top", "num_layers", num_layers, 1)
        check_kind("Policy.dense_on_top", "share", share, Number, "a float")
        if share != 0:
            check_share("Policy.dense_on_top", "share", share)
        first = num_layers - math.ceil(round(float(share) * num_layers, 6))
        return cls(
            pattern,
            dense_layers=range(first, num_layers),
            dense_below=dense_below,
            decode=decode,
            num_layers=num_layers,
        )

    @classmethod
    def dense_every(
        cls,
        pattern: Pattern,
        num_layers: int,
        n: int = 8,
        *,
        dense_below: int | None = None,
        decode: Pattern | None = None,
    ) -> Policy:
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
            An argument of a wrong kind; a number out of range.

        Examples
        --------
        >>> from sparse_attn import Band, Policy
        >>> Policy.dense_every(Band(64), num_layers=12, n=4).dense_layers
        (3, 7, 11)
        """
        check_integer("Policy.dense_every", "num_layers", num_layers, 1)
        check_integer("Policy.dense_every", "n", n, 1)
        return cls(
            pattern,
            dense_layers=range(n - 1, num_layers, n),
            dense_below=dense_below,
            decode=decode,
            num_layers=num_layers,
        )

    def check_layers(self, num_layers: int, model: str = "the model") -> None:
        """Raise ``ValueError`` unless a model of `num_layers` layers fits the policy.

        Parameters
        ----------
        num_layers : int
            Number of the model's layers.
        model : str
            What the sentence calls the model.

        Raises
        ------
        TypeError, ValueError
            A number that is no int of at least 0; a policy made for another number of layers.

        Examples
        --------
        >>> from sparse_attn import Policy, TopK
        >>> Policy(TopK(64), num_layers=4).check_layers(4)
        """
        check_integer("Policy", "num_layers", num_layers, 0)
        if self.num_layers not in (None, num_layers):
            what = f"a policy for {model}'s {num_layers} layers"
            raise refuse("Policy", what, f"num_layers={self.num_layers}")
        beyond = [layer for layer in self.dense_layers if layer >= num_layers]
        if beyond:
            what = f"dense_layers below {model}'s {num_layers} layers"
            raise refuse("Policy", what, ", ".join(map(str, beyond)))

    def table(self, num_layers: int | None = None) -> str:
        """Return the policy as a table, one line for a run of equal layers.

        Parameters
        ----------
        num_layers : int, optional
            Number of layers, by default the policy's own. Where neither is known the last line
            speaks of all other layers.

        Raises
        ------
        ValueError
            When the policy is made for another number of layers.

        Examples
        --------
        >>> from sparse_attn import Policy, TopK
        >>> print(Policy.dense_on_top(TopK(64), num_layers=10))
        layers  pattern     decode
        0-7     TopK(k=64)  TopK(k=64)
        8-9     Full()      Full()
        """
        count = num_layers if num_layers is not None else self.num_layers
        if count is not None:
            self.check_layers(count)
        known = count if count is not None else max(self.dense_layers, default=-1) + 1
        rows = [["layers", "pattern", "decode"]]
        for dense, run in groupby(range(known), lambda layer: layer in self.dense_layers):
            layers = list(run)
            name = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
            rows.append([name, *self._row(dense)])
        if count is None:
            rows.append([f"from {known}" if known else "all", *self._row(dense=False)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.dense_below:
            lines.append(f"below {self.dense_below} keys: {self._dense}")
        return "\n".join(lines)

    def _row(self, dense: bool) -> list[str]:
        if dense:
            return [repr(self._dense), repr(self._dense)]
        return [repr(self.pattern), repr(self._decode)]

    def __str__(self) -> str:
        return self.table()


def as_policy(policy: Policy | Pattern) -> Policy:
    """Return `policy`, or the policy that runs a bare pattern in every call, whatever its length.

    Raises
    ------
    TypeError
        Neither a policy nor a pattern.
    """
    if isinstance(policy, Policy):
        return policy
    check_kind("Policy", "policy", policy, Pattern, "a policy or a pattern")
    return Policy(policy, dense_below=0)

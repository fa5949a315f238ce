"""Which pattern runs where: by layer, by key head, by key length and at decode.

``pattern`` in every layer, others in ``layers`` and ``heads``, dense attention in ``dense_layers``
and below ``dense_below`` keys, and a pattern of its own for single queries. Patterns never change
by themselves; a policy changes them, because it says so. Used by ``sparse_attn.nn`` and
``sparse_attn.integrations``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from os import PathLike
from typing import Any

from . import _policy_file
from ._checks import check_integer, check_num_layers, kind_of, refuse
from ._pattern import check_pattern
from ._policy_parts import (
    check_prefill,
    check_served,
    checked_dense,
    checked_heads,
    checked_layers,
    twice_reach,
    widened,
)
from ._policy_table import ShownPolicy
from .by_head import ByHead
from .patterns import Full, Pattern
from .policy_makers import ReadyPolicies

__all__ = ["Policy", "as_policy", "check_policy"]


@dataclass(frozen=True)
class Policy(ReadyPolicies, ShownPolicy):
    """A pattern for each layer, key head and key length, and for decode.

    Layers are numbered from 0 in module order; cross attention is no layer and stays dense. Where
    several arguments apply to a call, the first of these decides: `dense_below`, `heads`, `layers`,
    `dense_layers`, `decode`, `pattern`.

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
        Number of layers the policy is made for, at most 65536; a model with another number
        refuses it.
    layers : mapping of int to Pattern
        Patterns of single layers, at decode too.
    heads : mapping of int to mapping of int to Pattern
        Patterns of single key heads, by layer and head, at decode too. Heads of a layer that are
        not named have what the rest of the policy says; see `ByHead`.
    num_key_heads : int, optional
        Number of key heads the policy is made for; a model with another number refuses it.

    Notes
    -----
    Dense attention and a decode of ``Full()`` keep the sides of the pattern in their place: every
    finite side becomes unlimited, but a side of 0 stays 0, so a causal band never looks ahead. The
    key length of a static cache is its capacity.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; a negative number; a layer beyond `num_layers`, a head beyond
        `num_key_heads`; a pattern by ``sketch`` elsewhere than in `decode`.
    NotImplementedError
        A pattern of your own, which no op serves.

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
    >>> Policy(Band(7), heads={5: {0: Full()}}, dense_below=0).choose(5, Sq=64, Skv=64).of(0)
    Full()

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
    layers: Mapping[int, Pattern] = field(default_factory=dict, hash=False)
    heads: Mapping[int, Mapping[int, Pattern]] = field(default_factory=dict, hash=False)
    num_key_heads: int | None = None
    # Set when dense_below was not given, so that `replace` with another pattern finds it again.
    _default_below: int | None = field(default=None, repr=False, compare=False)
    _dense: Pattern = field(init=False, repr=False)
    _decode: Pattern = field(init=False, repr=False)
    # Of layers in `layers` and `heads`: the patterns of several queries, dense and of decode.
    _own: dict[int, tuple[Pattern, Pattern, Pattern]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        owner = "Policy"
        check_prefill("pattern", self.pattern, "a pattern such as sparse_attn.Band")
        if self.num_layers is not None:
            self._set("num_layers", check_num_layers(owner, self.num_layers))
        layers = checked_dense(self.dense_layers)
        self._set("dense_layers", layers)
        if layers and self.num_layers is not None and max(layers) >= self.num_layers:
            raise refuse(owner, f"dense_layers below num_layers {self.num_layers}", max(layers))
        below = self.dense_below
        if below is not None:
            below = check_integer(owner, "dense_below", below, 0)
        if below is None or below == self._default_below:
            below = twice_reach(self.pattern)
            self._set("_default_below", below)
        self._set("dense_below", below)
        self._set("_dense", widened(self.pattern))
        if self.decode is None:
            self._set("_decode", self.pattern)
        else:
            check_served("decode", self.decode, "a pattern or None")
            self._set("_decode", self._dense if isinstance(self.decode, Full) else self.decode)
        if self.num_key_heads is not None:
            heads = check_integer(owner, "num_key_heads", self.num_key_heads, 1)
            self._set("num_key_heads", heads)
        self._set("layers", checked_layers(self.layers))
        self._set("heads", checked_heads(self.heads))
        self._set("_own", {layer: self._patterns_of(layer) for layer in self._named()})
        self.check_model(self.num_layers, self.num_key_heads, "the policy")

    def _named(self) -> list[int]:
        """Layers with patterns of their own."""
        return sorted({*self.layers, *self.heads})

    def _patterns_of(self, layer: int) -> tuple[Pattern, Pattern, Pattern]:
        """Return what a layer of `layers` or `heads` runs: usually, where dense, at decode."""
        dense = layer in self.dense_layers
        usual = self.layers.get(layer, self._dense if dense else self.pattern)
        decode = self.layers.get(layer, self._dense if dense else self._decode)
        if layer in self.heads:
            usual, decode = (ByHead(self.heads[layer], rest) for rest in (usual, decode))
        return usual, widened(usual), decode

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
            A `ByHead` for a layer of `heads`.

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
        usual, dense, decode = self._of_layer(layer)
        if Skv < self.dense_below:  # type: ignore[operator]
            return dense
        return decode if Sq == 1 and Skv > 1 else usual

    def _of_layer(self, layer: int) -> tuple[Pattern, Pattern, Pattern]:
        if layer in self._own:
            return self._own[layer]
        if layer in self.dense_layers:
            return self._dense, self._dense, self._dense
        return self.pattern, self._dense, self._decode

    def patterns(self) -> tuple[Pattern, ...]:
        """Return all patterns that `choose` may return.

        Returns
        -------
        tuple of Pattern
            The usual one, the dense one, that of decode; then those of `layers` and `heads`.

        Examples
        --------
        >>> from sparse_attn import Full, Policy, TopK
        >>> Policy(TopK(64), decode=Full()).patterns()
        (TopK(k=64), Full(), Full())
        """
        own = [pattern for patterns in self._own.values() for pattern in patterns]
        return self.pattern, self._dense, self._decode, *own

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
        self.check_model(check_num_layers("Policy", num_layers, 0), None, model)

    def check_model(
        self, num_layers: int | None, num_key_heads: int | None, model: str = "the model"
    ) -> None:
        """Raise ``ValueError`` unless a model of that shape fits the policy.

        Parameters
        ----------
        num_layers, num_key_heads : int or None
            Numbers of the model's layers and key heads; None where not known.
        model : str
            What the sentence calls the model.

        Raises
        ------
        TypeError, ValueError
            Numbers that are no ints of at least 0; a policy made for another shape, or one that
            names a layer or head beyond it.

        Examples
        --------
        >>> from sparse_attn import Full, Policy, TopK
        >>> Policy(TopK(64), heads={3: {1: Full()}}).check_model(4, 2)
        """
        if num_layers is not None:
            check_num_layers("Policy", num_layers, 0)
        if num_key_heads is not None:
            check_integer("Policy", "num_key_heads", num_key_heads, 0)
        by_head = [p for p in self.patterns() if isinstance(p, ByHead)]
        heads = sorted({head for pattern in by_head for head in pattern.patterns})
        named = (
            ("dense_layers", self.dense_layers, "layers", num_layers, self.num_layers),
            ("layers", self.layers, "layers", num_layers, self.num_layers),
            ("heads", self.heads, "layers", num_layers, self.num_layers),
            ("heads", heads, "key heads", num_key_heads, self.num_key_heads),
        )
        for name, numbers, kind, count, made_for in named:
            if count is None:
                continue
            if made_for not in (None, count):
                what = f"a policy for {model}'s {count} {kind}"
                raise refuse("Policy", what, f"num_{kind.replace(' ', '_')}={made_for}")
            beyond = [number for number in numbers if number >= count]
            if beyond:
                got = ", ".join(map(str, beyond))
                raise refuse("Policy", f"{name} below {model}'s {count} {kind}", got)

    def save(self, path: str | PathLike[str], about: Mapping[str, Any] | None = None) -> None:
        """Write the policy to a JSON file, which `load` reads.

        Parameters
        ----------
        path : path
            Written over where it exists.
        about : mapping, optional
            Kept in the file and not read back: where the policy comes from, its figures.

        Raises
        ------
        TypeError, OSError
            No path, or no mapping; a file that cannot be written.
        ValueError
            A pattern that holds data of one text (a layout, scores); an `about` that JSON cannot
            hold.

        Examples
        --------
        >>> import tempfile, pathlib
        >>> from sparse_attn import Band, Full, Policy
        >>> policy = Policy(Band((63, 0), sinks=4), heads={5: {0: Full()}}, num_layers=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     policy.save(pathlib.Path(folder, "policy.json"))
        ...     Policy.load(pathlib.Path(folder, "policy.json")) == policy
        True
        """
        held = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name in _policy_file.FIELDS
        }
        if self.dense_below == self._default_below:
            held["dense_below"] = None
        _policy_file.write(path, held, {} if about is None else about)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Policy:
        """Read a policy that `save` wrote.

        Parameters
        ----------
        path : path

        Returns
        -------
        Policy

        Raises
        ------
        TypeError, OSError
            No path; no such file.
        ValueError
            No policy, one of another version, or with a pattern that is not known, in a sentence.

        Examples
        --------
        >>> from sparse_attn import Policy
        >>> Policy.load("policy.json")  # doctest: +SKIP
        """
        return _policy_file.read(path, cls)


def as_policy(policy: Policy | Pattern) -> Policy:
    """Return `policy`, or the policy that runs a bare pattern in every call, whatever its length.

    Raises
    ------
    TypeError
        Neither a policy nor a pattern.
    """
    check_policy("Policy", "policy", policy, "a policy or a pattern")
    return policy if isinstance(policy, Policy) else Policy(policy, dense_below=0)


def check_policy(owner: str, name: str, policy: object, what: str) -> None:
    """Raise ``TypeError`` unless `policy` is a policy or a pattern; the sentence says the fix."""
    if isinstance(policy, Policy):
        return
    if isinstance(policy, type) and issubclass(policy, Policy):
        got = f"{kind_of(policy)}; write {policy.__name__}(Band(128))"
        raise TypeError(f"sparse_attn.{owner}: expected {name} to be {what}, got {got}")
    check_pattern(owner, policy, name, what)

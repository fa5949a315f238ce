"""The base of all patterns: dense mask, density and picture from two small methods.

A pattern says which keys are allowed (``allows``); mask, share of allowed pairs and plot follow.
Our own also name the op that serves them and count the keys of a row without listing them. Those
that depend on the data have no ``allows``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling

from ._checks import broadcasts, check_kind, check_length, dtype_name, kind_of, refuse
from ._pattern_picture import DrawnPattern
from ._tiles import TileRun, checked_tile

__all__ = ["Pattern", "check_pattern"]

#: Pairs that a count by ``allows`` looks at in one step.
_PAIRS = 2**22
#: What to write where something close to a pattern was given, by its kind.
_ADVICE = {
    "BlockLayout": "write BlockSparse(layout)",
    "NoneType": "Full() means all keys",
    "Policy": "a call takes one pattern, such as policy.choose(layer, Sq, Skv)",
    "int": "a window is Band(128)",
    "tuple": "a window is Band((127, 0))",
    "Tensor": "a mask goes in as attn_mask, or makes a BlockLayout",
}


class Pattern(DrawnPattern):
    """Which keys each query may attend to: the base of all patterns.

    Query i stands at key position ``p = i + Skv - Sq`` (lower-right alignment). A pattern of your
    own needs `allows` alone: `naive_attention` serves it, and it has a mask, a density and a plot.
    The engines know the package's own patterns.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Pattern, naive_attention
    >>> class EvenKeys(Pattern):
    ...     def allows(self, row, position, key):
    ...         return (key % 2 == 0) & (key <= position)
    >>> EvenKeys().density(4, 4)
    0.375
    >>> naive_attention(*torch.randn(3, 1, 2, 8, 16), EvenKeys()).shape
    torch.Size([1, 2, 8, 16])
    """

    #: The op that knows what `allows` says; none of a class that says it again.
    _op: ClassVar[str | None] = None
    #: An instance, as sentences write it.
    _example: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "allows" in vars(cls) and "_op" not in vars(cls):
            cls._op = cls._example = None
            for name in {"_row_counts", "_ahead", "_runs", "_visited"} - set(
                vars(cls)
            ):  # what its base knew
                setattr(cls, name, vars(Pattern)[name])

    def __repr__(self) -> str:
        """Return the class with what the pattern holds; tables, plots and sentences show it."""
        held = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({held})"

    def _unserved(self) -> str | None:
        """Say what no op serves, and what to do; None when one does."""
        if self._op is not None:
            return None
        name = type(self).__name__
        return (
            f"{name}, which has no op (it is known by its allows alone); call naive_attention, or "
            f"make blocks of its mask with BlockLayout"
        )

    def _arguments(self) -> dict[str, Any]:
        """Pattern arguments of the op, those at its defaults left out: each costs a call time."""
        return {}

    @property
    def _region(self) -> Pattern:
        """The pattern that says where keys lie; of a top-k the one whose keys it ranks."""
        return self

    @property
    def _head_patterns(self) -> tuple[Pattern, ...]:
        """The patterns of its heads: itself alone, but of a `ByHead`."""
        return (self,)

    @property
    def _ahead(self) -> int | None:
        """How many keys past its own a row reaches at most, where no column is seen by all."""
        return None

    @property
    def _device(self) -> torch.device | None:
        """Device of the tensors that the pattern carries."""
        return None

    @abc.abstractmethod
    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Tell which keys are allowed, leaving causal masking aside.

        Parameters
        ----------
        row, position, key : Tensor
            int64 query index i ``(Sq, 1)``, its key position p and the key index j, as they
            broadcast to ``(..., Sq, Skv)``.

        Returns
        -------
        Tensor
            bool that broadcasts to ``(..., Sq, Skv)``; a layout adds its batch and head dimensions.

        Raises
        ------
        NotImplementedError
            When the pattern depends on the data (top-k, block top-k).
        """
        # Not left to abc.ABC: an isinstance by its metaclass costs a call four times as much.
        name = type(self).__name__
        raise NotImplementedError(f"sparse_attn.{name}: expected a method allows, got none")

    def _allowed(
        self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Return what `allows` says when it is bool, and of a shape that says it of these pairs."""
        allowed = self.allows(row, position, key)
        if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool:
            is_tensor = isinstance(allowed, torch.Tensor)
            got = dtype_name(allowed.dtype) if is_tensor else kind_of(allowed)
            name = type(self).__name__
            raise TypeError(
                f"sparse_attn.{name}: expected allows to return a bool tensor, got {got}"
            )
        if not is_compiling():
            pairs = torch.broadcast_shapes(row.shape, position.shape, key.shape)[-2:]
            if allowed.dim() > 4 or not broadcasts(allowed.shape, pairs):
                what = f"allows to return what broadcasts to (B, Hq, {pairs[0]}, {pairs[1]})"
                raise refuse(type(self).__name__, what, f"shape {tuple(allowed.shape)}")
        return allowed

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Count the allowed keys in ``[0, end)`` of every row, ``(Sq,)``; a mean over heads."""
        key = torch.arange(int(end.max()), device=end.device)
        rows = torch.arange(position.shape[0], device=end.device)
        counts = []
        for row in rows.split(max(1, _PAIRS // max(1, key.shape[0]))):
            row = row[:, None]
            allowed = self._allowed(row, position[row], key[None]) & (key < end[row])
            counts.append(allowed.sum(-1).double().reshape(-1, row.shape[0]).mean(0))
        return torch.cat(counts)

    def _check_lengths(self, Sq: int, Skv: int) -> None:
        """Refuse lengths that are no ints of at least 0, or that no engine serves."""
        owner = type(self).__name__
        for name, length in (("Sq", Sq), ("Skv", Skv)):
            check_length(owner, name, length)

    def _check_call(self, Sq: int, Skv: int, is_causal: bool) -> None:
        """Refuse what no call has: such lengths, or a number in the place of ``is_causal``."""
        check_kind(type(self).__name__, "is_causal", is_causal, bool, "a bool")
        self._check_lengths(Sq, Skv)

    @contextmanager
    def _with_contents(self) -> Iterator[None]:
        """Refuse tensors without data; inside, tensors are made where they have some."""
        if self._device is not None and self._device.type == "meta":
            raise refuse(type(self).__name__, "tensors with contents", "meta tensors")
        is_meta = torch.get_default_device().type == "meta"
        with torch.device("cpu") if is_meta else nullcontext():
            yield

    def mask(self, Sq: int, Skv: int, is_causal: bool = False) -> torch.Tensor:
        """Return the dense mask, the readable truth.

        Parameters
        ----------
        Sq, Skv : int
            Numbers of queries and keys.
        is_causal : bool
            Cut the pattern to the keys ``j <= p``.

        Returns
        -------
        Tensor
            bool ``(Sq, Skv)``, true where query i may see key j; ``(B|1, H|1, Sq, Skv)`` for a
            block layout.

        Raises
        ------
        TypeError, ValueError
            Lengths that are no ints of at least 0, or that a layout does not cover; an `is_causal`
            that is no bool.
        NotImplementedError
            When the pattern depends on the data (top-k, block top-k).

        Examples
        --------
        >>> from sparse_attn import Band
        >>> Band((1, 0)).mask(3, 3).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        self._check_call(Sq, Skv, is_causal)
        row = torch.arange(Sq, device=self._device)[:, None]
        key = torch.arange(Skv, device=self._device)[None, :]
        position = row + (Skv - Sq)
        allowed = self._allowed(row, position, key)
        allowed = allowed.expand(*allowed.shape[:-2], Sq, Skv)
        return allowed & (key <= position) if is_causal else allowed

    def mask_mod(self) -> Callable[..., torch.Tensor]:
        """Return the pattern as FlexAttention's ``mask_mod``: train with it there, serve it here.

        For ``Sq == Skv``, where query i stands at key i. Causal masking is left to the caller.

        Returns
        -------
        callable
            ``mask_mod(b, h, q_idx, kv_idx)``.

        Raises
        ------
        NotImplementedError
            When the pattern depends on the data (top-k, block top-k).

        Examples
        --------
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from sparse_attn import Band, BlockLayout
        >>> mask = create_block_mask(Band((9, 0)).mask_mod(), 1, 1, 64, 64, "cpu", BLOCK_SIZE=16)
        >>> BlockLayout.from_flex(mask).counts.tolist()
        [[[1, 2, 2, 2]]]
        """
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._allowed(nothing, nothing, nothing)  # refuses patterns without a mask

        def mask_mod(b: Any, h: Any, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            return self.allows(q_idx, q_idx, kv_idx)

        return mask_mod

    def density(self, Sq: int, Skv: int, is_causal: bool = False) -> float:
        """Return the share of the ``Sq * Skv`` pairs that are allowed.

        Counted row by row, without a dense mask.

        Parameters
        ----------
        Sq, Skv, is_causal
            As in `mask`.

        Returns
        -------
        float
            From 0 to 1; of a layout, the mean over batch entries and heads.

        Raises
        ------
        TypeError, ValueError
            As `mask`.
        NotImplementedError
            When the number of allowed pairs depends on the data (block top-k).

        Examples
        --------
        >>> from sparse_attn import Band, Full
        >>> Full().density(4, 4, is_causal=True)
        0.625
        >>> round(Band((4095, 0)).density(131072, 131072), 4)
        0.0308
        """
        self._check_call(Sq, Skv, is_causal)
        if Sq == 0 or Skv == 0:
            return 0.0
        with self._with_contents():
            position = torch.arange(Sq, device=self._device) + (Skv - Sq)
            end = torch.full_like(position, Skv)
            if is_causal:
                end = torch.clamp(position + 1, 0, Skv)
            return float(self._row_counts(position, end).double().sum() / (Sq * Skv))

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        """Return the tiles that engines visit, of a layout its blocks."""
        raise NotImplementedError(
            f"sparse_attn.{type(self).__name__}: not served: visited tiles of {self._unserved()}"
        )

    def _visited(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> float:
        """Count the visited tiles, of a layout by the area of its blocks."""
        return float(sum(run.tiles for run in self._runs(Sq, Skv, is_causal, tile)))

    def cost(
        self,
        Sq: int,
        Skv: int | None = None,
        is_causal: bool = False,
        *,
        tile: int | tuple[int, int] = 64,
    ) -> float:
        """Count the tiles of queries and keys that engines visit: what a call costs.

        An engine computes whole tiles, so that this, not `density`, follows its time: a window of
        one key visits a tile for each query tile. Top-k counts once, though engines look twice.

        Parameters
        ----------
        Sq, Skv, is_causal
            As in `mask`; `Skv` is `Sq` by default.
        tile : int or (int, int)
            Queries and keys of a tile. Engines have tiles of their own, from 16 to 192.

        Returns
        -------
        float
            Tiles of a batch entry and head; of a layout, the area of its blocks in tiles, the mean
            over batch entries and heads.

        Raises
        ------
        TypeError, ValueError
            As `mask`; a tile that is no int of at least 1.
        NotImplementedError
            When the tiles depend on the data (block top-k), for a pattern that no engine knows, and
            where the compiled module ``_info`` is not built.

        Examples
        --------
        >>> from sparse_attn import Band, Full
        >>> Full().cost(1024, is_causal=True)
        136.0
        >>> Band((127, 0)).cost(1024)
        45.0
        """
        Skv = Sq if Skv is None else Skv
        self._check_call(Sq, Skv, is_causal)
        size = checked_tile(type(self).__name__, tile)
        with self._with_contents():
            return self._visited(Sq, Skv, is_causal, size)


def check_pattern(
    owner: str,
    pattern: object,
    name: str = "pattern",
    what: str = "a pattern such as sparse_attn.Band",
) -> None:
    """Raise ``TypeError`` unless `pattern` is a pattern; the sentence says what to write."""
    if isinstance(pattern, Pattern):
        return
    got = kind_of(pattern)
    if isinstance(pattern, type) and issubclass(pattern, Pattern):
        got += f"; write {pattern._example or f'{pattern.__name__}(...)'}"
    elif type(pattern).__name__ in _ADVICE:
        got += f"; {_ADVICE[type(pattern).__name__]}"
    raise TypeError(f"sparse_attn.{owner}: expected {name} to be {what}, got {got}")

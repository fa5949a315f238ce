"""Patterns of windows and columns: full, band, dilated, strided.

Each checks the kinds and numbers of its arguments when it is made, says which keys it allows in
plain torch (the truth that tests and pictures use), and names the op that serves it with the op's
pattern arguments. Tensors that a pattern carries are checked by the ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from ._checks import (
    LARGE,
    Integer,
    as_int64,
    check_dense,
    check_integer,
    check_kind,
    check_window,
    clamped,
    kind_of,
    refuse,
    same_values,
)
from ._pattern import Pattern
from ._tiles import TileRun, tile_runs

__all__ = ["DENSE", "Band", "Dilated", "Full", "Strided", "Window"]

Sides = tuple[int | None, int | None]
Window = int | Sides


def _is_sink(key: torch.Tensor, sinks: int) -> torch.Tensor:
    return (key >= 0) & (key < clamped(sinks))


def _check_window_and_sinks(owner: str, pattern: Band | Dilated) -> None:
    """Check these fields, and write what comes of them where that is something else."""
    window = check_window(owner, pattern.window)
    sinks = check_integer(owner, "sinks", pattern.sinks, 0)
    if window is not pattern.window:
        object.__setattr__(pattern, "window", window)
    if sinks is not pattern.sinks:
        object.__setattr__(pattern, "sinks", sinks)


def _window_arguments(sides: Sides, sinks: int) -> dict[str, Any]:
    """Arguments of the ops that take a window and sinks."""
    arguments = {}
    left, right = sides
    if left is not None:
        arguments["left"] = left if left <= LARGE else LARGE
    if right is not None:
        arguments["right"] = right if right <= LARGE else LARGE
    if sinks:
        arguments["sinks"] = clamped(sinks)
    return arguments


def _in_window(offset: torch.Tensor, sides: Sides) -> torch.Tensor:
    """``-left <= offset <= right``."""
    left, right = (LARGE if side is None else clamped(side) for side in sides)
    return (-left <= offset) & (offset <= right)


def _taps(position: torch.Tensor, sides: Sides, step: int, end: torch.Tensor) -> torch.Tensor:
    """Count the keys ``p + t * step`` in [0, end) with t inside `sides`."""
    left, right = (LARGE if side is None else clamped(side) for side in sides)
    first = torch.clamp(-(position // step), min=-left)
    last = torch.clamp((end - 1 - position) // step, max=right)
    return torch.clamp(last - first + 1, min=0)


def _with_columns(
    columns: torch.Tensor,
    position: torch.Tensor,
    sides: Sides,
    end: torch.Tensor,
) -> torch.Tensor:
    """Count the keys in [0, end) of a window and of ascending `columns`, each key once."""
    left, right = (LARGE if side is None else clamped(side) for side in sides)
    window_begin = torch.minimum(position - left, end)
    window_end = torch.minimum(position + right + 1, end)
    both = torch.searchsorted(columns, torch.maximum(window_end, window_begin))
    both = both - torch.searchsorted(columns, window_begin)
    return _taps(position, sides, 1, end) + torch.searchsorted(columns, end) - both


@dataclass(frozen=True)
class Full(Pattern):
    """Every key: dense attention (Vaswani et al. 2017, equation 1).

    Examples
    --------
    >>> from sparse_attn import Full
    >>> Full().density(4, 4)
    1.0
    """

    _op: ClassVar[str | None] = "fused"
    _example: ClassVar[str | None] = "Full()"

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Allow everything."""
        return torch.ones(
            torch.broadcast_shapes(position.shape, key.shape), dtype=torch.bool, device=key.device
        )

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return end

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        return tile_runs(Sq, Skv, is_causal, tile)


#: Every key, made once.
DENSE = Full()


@dataclass(frozen=True)
class Band(Pattern):
    """Sliding window, with sink columns and global tokens (Longformer, Beltagy et al. 2020).

    Parameters
    ----------
    window : int or (int or None, int or None)
        ``(left, right)``: key j is allowed when ``-left <= j - p <= right``. An int w means (w, w),
        None on a side no limit there.
    sinks : int
        Also every key ``j < sinks``, for all rows (StreamingLLM, Xiao et al. 2023).
    global_tokens : int or Tensor, optional
        Positions seen by all rows and whose rows see every key: the first g, or an index
        tensor ``(tokens,)`` in any order, of which a copy is kept. Positions without a key are
        ignored.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; a negative number.

    Examples
    --------
    >>> from sparse_attn import Band
    >>> Band(2)
    Band(window=(2, 2), sinks=0, global_tokens=None)
    >>> Band((None, 0), sinks=4).density(8, 8)
    0.65625
    """

    window: Window
    sinks: int = 0
    global_tokens: int | torch.Tensor | None = None

    _op: ClassVar[str | None] = "band"
    _example: ClassVar[str | None] = "Band(128)"

    def __post_init__(self) -> None:
        _check_window_and_sinks("Band", self)
        tokens = self.global_tokens
        if tokens is None:
            return
        if isinstance(tokens, torch.Tensor):
            check_dense("Band", "global_tokens", tokens)
            if tokens.dtype != torch.int32:  # the ops take int32 and int64
                tokens = as_int64("Band", "global_tokens", tokens)
            tokens = tokens.detach().clone()
        elif isinstance(tokens, (list, tuple)):
            raise TypeError(
                "sparse_attn.Band: expected global_tokens to be an int or a tensor, got "
                f"{kind_of(tokens)}; write torch.tensor({list(tokens)!r:.40})"
            )
        else:
            check_kind("Band", "global_tokens", tokens, Integer, "an int or a tensor")
            tokens = check_integer("Band", "global_tokens", tokens, 0)
        object.__setattr__(self, "global_tokens", tokens)

    @property
    def sides(self) -> Sides:
        """The window's ``(left, right)``, None without a limit."""
        return cast(Sides, self.window)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Band):
            return NotImplemented
        mine, theirs = self.global_tokens, other.global_tokens
        if (self.window, self.sinks) != (other.window, other.sinks):
            return False
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            return same_values(mine, theirs)
        if isinstance(mine, torch.Tensor) or isinstance(theirs, torch.Tensor):
            return False
        return (mine or 0) == (theirs or 0)

    def __hash__(self) -> int:
        tokens = self.global_tokens  # of a tensor the shape alone: no wait for the device
        key = tokens.shape if isinstance(tokens, torch.Tensor) else tokens or 0
        return hash((self.window, self.sinks, key))

    def _arguments(self) -> dict[str, Any]:
        arguments = _window_arguments(self.sides, self.sinks)
        tokens = self.global_tokens
        if tokens is None:
            return arguments
        if isinstance(tokens, torch.Tensor):
            return arguments | {"global_tokens": tokens}
        return arguments | {"num_global": clamped(tokens)}

    @property
    def _ahead(self) -> int | None:
        return None if self.sinks or self.global_tokens is not None else self.sides[1]

    @property
    def _device(self) -> torch.device | None:
        tokens = self.global_tokens
        return tokens.device if isinstance(tokens, torch.Tensor) else None

    def _check_lengths(self, Sq: int, Skv: int) -> None:
        super()._check_lengths(Sq, Skv)
        tokens = self.global_tokens
        if isinstance(tokens, torch.Tensor) and tokens.dim() != 1:
            raise refuse("Band", "global_tokens of shape (tokens,)", f"shape {tuple(tokens.shape)}")

    def _is_global(self, position: torch.Tensor) -> torch.Tensor:
        tokens = self.global_tokens
        if isinstance(tokens, torch.Tensor):
            return torch.isin(position, tokens.to(position.device)) & (position >= 0)
        return (position >= 0) & (position < clamped(tokens or 0))

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Allow the window, the sinks, the global columns and every key of global rows."""
        window = _in_window(key - position, self.sides)
        columns = _is_sink(key, self.sinks) | self._is_global(key)
        rows = self._is_global(position)
        if key.dim() and isinstance(self.global_tokens, torch.Tensor):  # one pair has no length
            rows = rows & (position <= key[..., -1:])  # an index that names no key is no token
        return window | columns | rows

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        key = torch.arange(int(end.max()), device=position.device)
        columns = key[(key < clamped(self.sinks)) | self._is_global(key)]
        counts = _with_columns(columns, position, self.sides, end)
        return torch.where(self._is_global(position), end, counts)

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        arguments = self._arguments()
        columns = (0, 1, max(arguments.pop("sinks", 0), arguments.get("num_global", 0)))
        return tile_runs(Sq, Skv, is_causal, tile, columns=columns, **arguments)


@dataclass(frozen=True)
class Dilated(Pattern):
    """Every `dilation`-th key of a window (Longformer, Beltagy et al. 2020, section 3.1).

    Parameters
    ----------
    window : int or (int or None, int or None)
        ``(left, right)`` in taps: ``j = p + t * dilation`` with ``-left <= t <= right``, so
        left=4095 with dilation 2 reaches 8190 back. An int w means (w, w), None no limit.
    dilation : int
        Distance of neighbouring taps, at least 1.
    sinks : int
        Also every key ``j < sinks``, undilated.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; a number out of range.

    Examples
    --------
    >>> from sparse_attn import Dilated
    >>> Dilated((1, 1), 2).mask(5, 5)[2].int().tolist()
    [1, 0, 1, 0, 1]
    """

    window: Window
    dilation: int
    sinks: int = 0

    _op: ClassVar[str | None] = "dilated"
    _example: ClassVar[str | None] = "Dilated(128, 2)"

    def __post_init__(self) -> None:
        _check_window_and_sinks("Dilated", self)
        dilation = check_integer("Dilated", "dilation", self.dilation, 1)
        object.__setattr__(self, "dilation", dilation)

    @property
    def sides(self) -> Sides:
        """The window's ``(left, right)``, None without a limit."""
        return cast(Sides, self.window)

    def _arguments(self) -> dict[str, Any]:
        return _window_arguments(self.sides, self.sinks) | {"dilation": clamped(self.dilation)}

    @property
    def _ahead(self) -> int | None:
        right = self.sides[1]
        return None if self.sinks or right is None else right * self.dilation

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Allow the taps of the window and the sinks."""
        offset, step = key - position, clamped(self.dilation)
        taps = torch.div(offset, step, rounding_mode="floor")
        tap = (offset % step == 0) & _in_window(taps, self.sides)
        return tap | _is_sink(key, self.sinks)

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        sinks = torch.clamp(end, max=clamped(self.sinks))
        step, sides = clamped(self.dilation), self.sides
        taps = _taps(position, sides, step, end)
        return taps + sinks - _taps(position, sides, step, sinks)

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        arguments = self._arguments()
        columns = (0, 1, arguments.pop("sinks", 0))
        return tile_runs(Sq, Skv, is_causal, tile, columns=columns, **arguments)


@dataclass(frozen=True)
class Strided(Pattern):
    """A causal window plus every `stride`-th column (Sparse Transformer, Child et al. 2019).

    Parameters
    ----------
    local : int
        Keys ``0 <= p - j < local`` are allowed, at least 1.
    stride : int
        And keys ``j <= p`` with ``j mod stride == stride - 1``, at least 1. Always causal.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; a number below 1.

    Examples
    --------
    >>> from sparse_attn import Strided
    >>> Strided(1, 2).mask(4, 4).int().tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    """

    local: int
    stride: int

    _op: ClassVar[str | None] = "strided"
    _example: ClassVar[str | None] = "Strided(128, 128)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", check_integer("Strided", "local", self.local, 1))
        object.__setattr__(self, "stride", check_integer("Strided", "stride", self.stride, 1))

    def _arguments(self) -> dict[str, Any]:
        return {"local": clamped(self.local), "stride": clamped(self.stride)}

    @property
    def _ahead(self) -> int | None:
        return 0

    def allows(self, row: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Allow the window and the strided columns up to the diagonal."""
        stride = clamped(self.stride)
        back = position - key
        column = (key >= 0) & (key % stride == stride - 1)
        return (back >= 0) & ((back < clamped(self.local)) | column)

    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        end = torch.minimum(end, torch.clamp(position + 1, min=0))
        stride = clamped(self.stride)
        last = max(stride - 1, int(end.max()))
        columns = torch.arange(stride - 1, last, stride, device=position.device)
        sides = (clamped(self.local) - 1, 0)
        return _with_columns(columns, position, sides, end)

    def _runs(self, Sq: int, Skv: int, is_causal: bool, tile: tuple[int, int]) -> list[TileRun]:
        local, stride = clamped(self.local), clamped(self.stride)
        columns = (stride - 1, stride, LARGE)
        return tile_runs(Sq, Skv, True, tile, left=local - 1, right=0, columns=columns)

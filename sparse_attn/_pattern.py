"""The base of all patterns: dense mask, density and picture from two small methods.

A pattern says which keys are allowed (``allows``) and how many each row has (``_row_counts``); the
mask, the share of allowed pairs and the plot follow. Data-dependent patterns have no ``allows``.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch

from ._checks import check_integer, refuse

__all__ = ["Pattern"]


class Pattern(abc.ABC):
    """Which keys each query may attend to: the base of all patterns, made by none of its own.

    Query i stands at key position ``p = i + Skv - Sq`` (lower-right alignment).

    Examples
    --------
    >>> from sparse_attn import Band, Pattern
    >>> isinstance(Band(3), Pattern)
    True
    """

    _op: ClassVar[str]

    def _arguments(self) -> dict[str, Any]:
        """Pattern arguments of the op."""
        return {}

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
            int64 query index i, its key position p and the key index j, as they broadcast to
            ``(..., Sq, Skv)``.

        Returns
        -------
        Tensor
            bool of the broadcast shape; a layout adds its batch and head dimensions.

        Raises
        ------
        NotImplementedError
            When the pattern depends on the data (top-k, block top-k).
        """

    @abc.abstractmethod
    def _row_counts(self, position: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Count the allowed keys in ``[0, end)`` of every row, ``(Sq,)``; a mean over heads."""

    def _check_lengths(self, Sq: int, Skv: int) -> None:
        """Refuse lengths that are no ints of at least 0."""
        owner = type(self).__name__
        check_integer(owner, "Sq", Sq, 0)
        check_integer(owner, "Skv", Skv, 0)

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
            bool ``(Sq, Skv)``, true where query i may see key j; ``(B|1, Hq|1, Sq, Skv)`` for a
            block layout.

        Raises
        ------
        TypeError, ValueError
            Lengths that are no ints of at least 0, or that a layout does not cover.
        NotImplementedError
            When the pattern depends on the data (top-k, block top-k).

        Examples
        --------
        >>> from sparse_attn import Band
        >>> Band((1, 0)).mask(3, 3).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        self._check_lengths(Sq, Skv)
        row = torch.arange(Sq, device=self._device)[:, None]
        key = torch.arange(Skv, device=self._device)[None, :]
        position = row + (Skv - Sq)
        allowed = self.allows(row, position, key)
        return allowed & (key <= position) if is_causal else allowed

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
        self._check_lengths(Sq, Skv)
        if Sq == 0 or Skv == 0:
            return 0.0
        position = torch.arange(Sq, device=self._device) + (Skv - Sq)
        end = torch.full_like(position, Skv)
        if is_causal:
            end = torch.clamp(position + 1, 0, Skv)
        return float(self._row_counts(position, end).double().sum() / (Sq * Skv))

    def plot(self, Sq: int, Skv: int, is_causal: bool = False, ax: Any = None) -> Any:
        """Draw the mask: queries down, keys across, allowed pairs dark.

        Parameters
        ----------
        Sq, Skv, is_causal
            As in `mask`. Of a layout, the first batch entry and head are drawn.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default a new figure.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        TypeError, ValueError
            As `mask`; a layout without batch entries or heads.
        NotImplementedError
            When the pattern depends on the data.

        Examples
        --------
        >>> from sparse_attn import Band
        >>> Band(3).plot(16, 16).figure.savefig("band.png")  # doctest: +SKIP
        """
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap

        mask = self.mask(Sq, Skv, is_causal)
        if 0 in mask.shape[:-2]:
            raise refuse(type(self).__name__, "a mask to draw", f"shape {tuple(mask.shape)}")
        picture = mask[(0,) * (mask.dim() - 2)].cpu().numpy()
        if ax is None:
            ax = pyplot.figure(figsize=(4, 4)).gca()
        colors = ListedColormap(["#eef1f5", "#1f4e79"])
        ax.imshow(picture, cmap=colors, vmin=0, vmax=1, interpolation="nearest")
        share = self.density(Sq, Skv, is_causal)
        ax.set(title=f"{self!r}\n{share:.1%} of the pairs", xlabel="key", ylabel="query")
        return ax

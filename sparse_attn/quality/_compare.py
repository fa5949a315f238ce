"""`compare`: what a pattern keeps of one dense attention call, by head.

The mass that a row keeps is ``exp(lse_sparse - lse_dense)``: two calls give it exactly, without a
matrix of size Sq x Skv. Mass is not error, since values matter: relative L1 and cosine of the
outputs stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Unpack

from .._checks import check_tensors
from .._common import Common, op_arguments
from .._head_calls import calls_by_head, check_whole
from .._pattern import check_pattern
from ..by_head import ByHead
from ..patterns import Full, Pattern
from ..tools import with_lists
from ._counts import attend_with_lse, pair_counts

__all__ = ["LEVELS", "Comparison", "Reference", "compare"]

#: Shares of the rows at which `Comparison.quantiles` holds the mass.
LEVELS = (0.0, 0.01, 0.05, 0.25, 0.5)
_ROWS = 4096  # rows whose outputs are compared at once


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` found. Rows without keys count nowhere.

    Attributes
    ----------
    mass : Tensor
        ``(B, Hq)``: share of the softmax's mass that a row keeps, mean over the rows.
    rel_l1 : Tensor
        ``(B, Hq)``: a row's ``sum |sparse - dense| / sum |dense|``, mean over the rows.
    cosine : Tensor
        ``(B, Hq)``: cosine between a row's two outputs, mean over the rows.
    squares : Tensor
        ``(B, Hq)``: sum of the squared differences of the outputs, over all rows.
    worst : Tensor
        0-d: the least mass of a row, over all heads.
    pairs : Tensor
        0-d: visited pairs over allowed pairs.
    pairs_by_head : Tensor
        ``(B, Hq)``: the same for each head.
    quantiles : Tensor
        ``(B, Hq, levels)``: the mass below which the shares `levels` of the rows lie; level 0 is
        the worst row of each head.
    allowed : Tensor
        ``(B, Hq)``: allowed pairs.
    levels : tuple of float

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, quality
    >>> found = quality.compare(*torch.randn(3, 1, 2, 64, 16), Band(7))
    >>> found.mass.shape, found.quantiles.shape
    (torch.Size([1, 2]), torch.Size([1, 2, 5]))
    """

    mass: torch.Tensor
    rel_l1: torch.Tensor
    cosine: torch.Tensor
    squares: torch.Tensor
    worst: torch.Tensor
    pairs: torch.Tensor
    pairs_by_head: torch.Tensor
    quantiles: torch.Tensor
    allowed: torch.Tensor
    levels: tuple[float, ...] = LEVELS

    def __repr__(self) -> str:
        names = ("mass", "worst", "rel_l1", "cosine", "pairs")
        if self.mass.is_meta:
            return f"Comparison({', '.join(names)} of meta tensors)"
        shown = ", ".join(f"{name}={float(getattr(self, name).mean()):.4f}" for name in names)
        return f"Comparison({shown})"


def compare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    **common: Unpack[Common],
) -> Comparison:
    """Compare a pattern with dense attention on the same tensors.

    Parameters
    ----------
    query : Tensor
        ``(B, Hq, Sq, D)``, as in the attention functions.
    key, value : Tensor
        ``(B, Hkv, Skv, D)``.
    pattern : Pattern
        What is judged; a pattern of your own too, for which `naive_attention` stores all scores.
    **common
        Common keywords of the attention functions, for both calls; `return_lse` and `out` are
        refused.

    Returns
    -------
    Comparison
        ``.mass``, ``.rel_l1``, ``.cosine``, each ``(B, Hq)``; ``.worst``, ``.pairs``,
        ``.quantiles``. Tensors on the device of `query`, float64; nothing waits for it.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the attention functions; `return_lse` or `out`.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, quality
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> kept = quality.compare(q, k, v, Band((15, 0), sinks=4), is_causal=True)
    >>> kept.mass.shape, bool(kept.worst < kept.mass.min())
    (torch.Size([1, 2]), True)
    >>> round(float(kept.pairs), 3)
    0.524

    Notes
    -----
    Kept mass is the "recall" of Jiang et al. 2024 (MInference); relative L1 is the criterion of
    Zhang et al. 2025 (SpargeAttn), there over all rows at once.
    """
    owner = "quality.compare"
    check_tensors(owner, query, key, value)
    check_pattern(owner, pattern)
    given: dict[str, Any] = dict(common)
    for name in ("return_lse", "out"):
        argument = given.pop(name, None)
        if argument is not None and argument is not False:
            raise TypeError(f"sparse_attn.{owner}: expected no {name}, got one")
    op_arguments(owner, given)  # refuses in the name of this function
    if isinstance(pattern, ByHead):
        check_whole("fused", query, key, value, given)
        calls = calls_by_head(pattern, query, key, value, given)
        return _joined([compare(*call.tensors, call.pattern, **call.common) for call in calls])
    return Reference(query, key, value, given).compare(pattern)


class Reference:
    """Dense attention on some tensors, beside which several patterns are judged.

    Parameters
    ----------
    query, key, value : Tensor
    common : dict
        As in `compare`.
    rows : Tensor, optional
        bool ``(B|1, 1, Sq)``: the rows that count; all by default.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        common: dict[str, Any],
        rows: torch.Tensor | None = None,
    ) -> None:
        self._tensors, self._common, self._rows = (query, key, value), common, rows
        with torch.no_grad():
            self._out, self._lse = attend_with_lse(query, key, value, Full(), **common)
            if rows is not None:  # the others count as rows without keys do
                self._out = self._out.where(rows[..., None], 0.0)
                self._lse = self._lse.where(rows, -torch.inf)
            self.allowed = self.pairs(Full(), common)
            #: Sum of the squares of the dense output, ``(B, Hq)``.
            self.dense_squares = self._out.double().square().sum((2, 3))

    def pairs(self, pattern: Pattern, common: dict[str, Any]) -> torch.Tensor:
        """Count the pairs that each head visits under a pattern, float64 ``(B, Hq)``."""
        query, key, _ = self._tensors
        return pair_counts(query, key, pattern, common, self._rows)

    @torch.no_grad()
    def compare(self, pattern: Pattern, common: dict[str, Any] | None = None) -> Comparison:
        """Return the figures of a pattern that is the same for all heads.

        Parameters
        ----------
        pattern : Pattern
        common : dict, optional
            Keywords of the pattern's call; those of dense attention by default.
        """
        query, key, value = self._tensors
        common = self._common if common is None else common
        pattern = with_lists(pattern, query, key, common)  # chosen once, read and counted
        sparse, lse = attend_with_lse(query, key, value, pattern, **common)
        real = self._lse > -torch.inf
        mass = torch.where(real, (lse.double() - self._lse.double()).exp(), torch.nan)
        rel_l1, cosine, squares = _row_errors(sparse, self._out)
        visited = self.pairs(pattern, common)
        quantiles = _quantiles(mass)
        return Comparison(
            mass=mass.nanmean(-1),
            rel_l1=torch.where(real, rel_l1, torch.nan).nanmean(-1),
            cosine=torch.where(real, cosine, torch.nan).nanmean(-1),
            squares=torch.where(real, squares, 0.0).sum(-1),
            worst=_least(quantiles[..., 0]),
            pairs=visited.sum() / self.allowed.sum(),
            pairs_by_head=visited / self.allowed,
            quantiles=quantiles,
            allowed=self.allowed,
        )


def _joined(parts: list[Comparison]) -> Comparison:
    """Join the figures of several runs of heads."""
    by_head = ("mass", "rel_l1", "cosine", "squares", "pairs_by_head", "quantiles", "allowed")
    figures: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts], 1) for name in by_head
    }
    allowed = figures["allowed"]
    return Comparison(
        **figures,
        worst=_least(figures["quantiles"][..., 0]),
        pairs=(figures["pairs_by_head"] * allowed).nansum() / allowed.sum(),
    )


def _quantiles(mass: torch.Tensor) -> torch.Tensor:
    """Return the mass at each level, ``(B, Hq, levels)``; NaN rows do not count."""
    ranked = torch.nn.functional.pad(mass, (0, 1), value=torch.nan).sort(-1).values  # NaN last
    last = (ranked.isfinite().sum(-1, keepdim=True) - 1).clamp(min=0)
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=mass.device)
    return ranked.gather(-1, (levels * last).long())


def _least(mass: torch.Tensor) -> torch.Tensor:
    """Return the least of the heads' figures, NaN where no head has one."""
    least = torch.nn.functional.pad(mass.flatten().nan_to_num(torch.inf), (0, 1), value=torch.inf)
    return least.amin().where(least.amin() < torch.inf, torch.nan)


def _row_errors(
    sparse: torch.Tensor, dense: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return relative L1, cosine and squared error of each row, float64 ``(B, Hq, Sq)``."""
    found = []
    for part, whole in zip(sparse.split(_ROWS, 2), dense.split(_ROWS, 2), strict=True):
        part, whole = part.double(), whole.double()
        error = part - whole
        difference = error.abs().sum(-1)
        rel_l1 = torch.where(difference == 0, 0.0, difference / whole.abs().sum(-1))
        cosine = torch.where(difference == 0, 1.0, torch.cosine_similarity(part, whole, -1))
        found.append((rel_l1, cosine, error.square().sum(-1)))
    rel_l1, cosine, squares = (torch.cat(chunks, -1) for chunks in zip(*found, strict=True))
    return rel_l1, cosine, squares

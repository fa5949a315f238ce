"""The error of a timed call against float64, on sampled query rows.

Some rows of two (batch, head) problems are computed in float64 from the very inputs, under the
benchmark's own statement of the pattern (masks.py). The error is the greatest difference; the limit
is twice the error of same-dtype math attention on those rows, plus 2^-20 (float32), 2^-11 (float16)
or 2^-8 (bfloat16) of the greatest output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .cases import Case
from .inputs import Inputs, allowed_rows, sampled_rows
from .masks import TopK

ABSOLUTE = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Accuracy:
    """Greatest error on the sampled rows and the limit that it has to keep."""

    error: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the limit; a NaN is not."""
        return self.error <= self.limit


@dataclass(frozen=True)
class _Problem:
    batch: int
    head: int
    rows: torch.Tensor  # [rows] query indices
    exact: torch.Tensor  # [rows, D] float64
    math_error: float


class Reference:
    """Exact rows of a case, to compare outputs with."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case = case
        corners = {(0, 0), (case.batch - 1, case.heads - 1)}
        found = [_problem(case, inputs, b, h) for b, h in sorted(corners)]
        self.problems = [problem for problem in found if problem is not None]
        if not self.problems:
            raise ValueError("no sampled row has one clear answer")

    def compare(self, out: torch.Tensor) -> Accuracy:
        """Return the error of ``out`` (B, Hq, Sq, D) on the sampled rows."""
        error, limit = 0.0, 0.0
        for problem in self.problems:
            rows = out[problem.batch, problem.head, problem.rows].double()
            difference = (rows - problem.exact).abs().max().item()
            error = math.nan if math.isnan(difference) else max(error, difference)
            absolute = ABSOLUTE[self.case.torch_dtype] * problem.exact.abs().max().item()
            limit = max(limit, 2 * problem.math_error + absolute)
        return Accuracy(error, limit)

    def distance(self, out: torch.Tensor) -> float:
        """Return the relative distance of ``out`` from the exact rows, in the Euclidean norm."""
        far = exact = 0.0
        for problem in self.problems:
            rows = out[problem.batch, problem.head, problem.rows].double()
            far += (rows - problem.exact).square().sum().item()
            exact += problem.exact.square().sum().item()
        return math.sqrt(far / exact)


def _problem(case: Case, inputs: Inputs, batch: int, head: int) -> _Problem | None:
    group = case.heads // (case.kv_heads or case.heads)
    rows = sampled_rows(case.extent(batch)[0], inputs.device)
    query = inputs.query[batch, head, rows]
    key, value = inputs.key[batch, head // group], inputs.value[batch, head // group]
    allowed = allowed_rows(case, inputs, batch, head, rows)
    if isinstance(case.spec, TopK):
        allowed, clear = _highest(allowed, case.spec.k, query, key)
        rows, query, allowed = rows[clear], query[clear], allowed[clear]
        if len(rows) == 0:
            return None
    bias = _bias(case, inputs, batch, head, rows)
    sink = inputs.extras["sink_logits"][head] if "sink_logits" in inputs.extras else None

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        score = (query @ key.mT) * case.head_dim**-0.5
        if case.softcap:
            score = case.softcap * torch.tanh(score / case.softcap)
        score = (score + bias.to(score.dtype)).masked_fill(~allowed, -math.inf)
        if sink is not None:
            score = torch.cat([score, sink.to(score.dtype).expand(len(rows), 1)], -1)
        weights = torch.softmax(score, -1, dtype=torch.promote_types(score.dtype, torch.float32))
        weights = weights[:, : case.length].masked_fill(~allowed, 0.0)  # a row without keys is 0
        return weights.to(value.dtype) @ value

    exact = attend(query.double(), key.double(), value.double())
    math_error = (attend(query, key, value).double() - exact).abs().max().item()
    return _Problem(batch, head, rows, exact, math_error)


def _bias(case: Case, inputs: Inputs, batch: int, head: int, rows: torch.Tensor) -> torch.Tensor:
    """Return what is added to the scores of the rows, broadcast to (rows, Skv)."""
    if case.option in ("bias", "head bias"):
        added = inputs.extras["attn_mask"]
        return added[0, head % added.shape[1], rows]
    distance = torch.zeros((), device=rows.device)
    if case.option != "alibi":
        return distance
    distance = (rows + inputs.offset[batch])[:, None] - torch.arange(
        case.length, device=rows.device
    )
    return -inputs.extras["alibi_slopes"][head].double() * distance.abs()


def _highest(
    allowed: torch.Tensor, k: int, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest allowed scores of each row, and the rows that rounding cannot change.

    A row whose k-th and next products are nearer than ``2^-20 * sum |q k|`` has no one answer in
    float32, so it is left out of the comparison.
    """
    if k >= allowed.shape[-1]:
        return allowed, torch.ones(len(allowed), dtype=torch.bool, device=allowed.device)
    ranked = (query.double() @ key.double().mT).masked_fill(~allowed, -math.inf)
    best = ranked.topk(k + 1, -1)
    gap = best.values[:, k - 1] - best.values[:, k]
    size = (query * key[best.indices[:, k]]).double().abs().sum(-1)
    clear = ~(gap <= 2.0**-20 * size)
    chosen = torch.zeros_like(allowed).scatter_(1, best.indices[:, :k], True)
    return chosen & allowed, clear

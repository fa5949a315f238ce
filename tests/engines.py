"""The engines of a device and what each serves, as the package says: tests make their cases by it.

``Attend`` is the call that a test of an engine makes. A case that the engine refuses is skipped
with the reason, within the budget of ``skip_budget.py``; inside a property another case is drawn.
"""

from dataclasses import replace
from functools import cache

import hypothesis
import pytest
import torch
from reference import DTYPES, Shape

import sparse_attn as sa
from sparse_attn.ops import empty_output

BLOCKS = (16, 64, 128)
HEAD_DIMS = range(8, 257, 8)


def can_run(device):
    return device == "cpu" or torch.cuda.is_available()


@cache
def serves(device, engine, dtype=None, head_dim=None, Sq=1, block_q=None, value_dim=None):
    """Whether `engine` serves a call of these sizes; None is any size that it serves."""
    rest = (Sq, block_q, value_dim)
    if dtype is None:
        return any(serves(device, engine, d, head_dim, *rest) for d in DTYPES.values())
    if head_dim is None:
        return any(serves(device, engine, dtype, d, *rest) for d in HEAD_DIMS)
    query, key, value = Shape(1, 1, 1, Sq, 64, head_dim, Dv=value_dim).make(device, dtype)
    pattern = sa.Full()
    if block_q is not None:
        mask = torch.ones(-(-Sq // block_q), 4, dtype=torch.bool, device=device)
        pattern = sa.BlockSparse(sa.BlockLayout.from_mask(mask, block_q, 16))
    return bool(sa.can_use(query, key, value, pattern, engine=engine))


def serves_parameters(device, engine, parameters):
    """Whether the dtype, head dims, queries and blocks that a test's parameters name are served."""
    known = ("dtype", "head_dim", "Sq", "block_q", "value_dim")
    named = {name: parameters[name] for name in known if name in parameters}
    return not named or not can_run(device) or serves(device, engine, **named)


def main_dtype(device, engine):
    """The dtype of tests that name none: float32 where the engine serves it."""
    return next(dtype for dtype in DTYPES.values() if serves(device, engine, dtype))


def fitted(device, engine, shape):
    """The shape with the next head dim that the engine serves, no more queries and higher blocks.

    Every engine so meets every pattern, whatever sizes a test was written for.
    """
    served = [d for d in HEAD_DIMS if serves(device, engine, None, d)]
    head_dim = next((d for d in served if d >= shape.D), served[-1])
    queries = shape.Sq
    while queries > 1 and not serves(device, engine, None, head_dim, queries):
        queries = queries * 3 // 4
    served = (b for b in BLOCKS if serves(device, engine, None, head_dim, queries, b))
    block = next(served, shape.block)
    value_dim = shape.Dv
    if value_dim and not serves(device, engine, None, head_dim, queries, None, value_dim):
        value_dim = None
    return replace(shape, D=head_dim, Sq=queries, block=max(block, shape.block), Dv=value_dim)


def cuda_engine(device, engine, filled=False, **given):
    """Return a call of one CUDA engine, ``(query, key, value, pattern, **common)``.

    A refusal fails its test. `filled`: outputs hold NaN until they are written. `given` are common
    arguments that a call may give again.
    """
    if device != "cuda":
        pytest.skip("a CUDA engine: run with --device cuda")

    def call(query, key, value, pattern, **common):
        if filled:
            common.setdefault("out", filled_output(query, value))
        return sa.sparse_attention(
            query, key, value, pattern, **{"engine": engine, **given, **common}
        )

    return call


def filled_output(query, value):
    """An output that holds NaN until it is written."""
    return empty_output(query, value).fill_(torch.nan)


def leave_out(error):
    """Leave out a case that an engine refuses: skip its test, or draw another one of a property."""
    if hypothesis.currently_in_test_context():
        hypothesis.reject()  # a skip would end the whole property
    pytest.skip(str(error))


class Attend:
    """Calls `sparse_attention` with one engine."""

    def __init__(self, device, engine, filled=False):
        self.device, self.engine, self.filled = device, engine, filled

    @property
    def dtype(self):
        return main_dtype(self.device, self.engine)

    def fit(self, shape):
        return fitted(self.device, self.engine, shape)

    def serves(self, pattern, query, key, value, **common):
        return bool(sa.can_use(query, key, value, pattern, engine=self.engine, **common))

    def __call__(self, pattern, query, key, value, **common):
        if self.filled:
            common.setdefault("out", filled_output(query, value))
        try:
            return sa.sparse_attention(query, key, value, pattern, engine=self.engine, **common)
        except NotImplementedError as error:
            leave_out(error)

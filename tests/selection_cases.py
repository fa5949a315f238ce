"""Random settings of block top-k, for properties of its lists."""

import math

import torch
from hypothesis import strategies as st

import sparse_attn as sa

MASSES = [0.01, 0.5, 0.7, 0.9, 0.97, 1 - 1e-15, 1.0]
COUNTS = st.sampled_from([1, 2, 3, 7, 2**31, 2**62])
SHARES = st.sampled_from([1e-300, 0.1, 1 / 3, 0.5, 1.0])


@st.composite
def amounts(draw):
    """A mass, a budget, or both."""
    by = draw(st.sampled_from(["mass", "mass", "count", "share", "mass-count", "mass-share"]))
    amount = {"mass": draw(st.sampled_from(MASSES)) if "mass" in by else None}
    if "count" in by:
        amount["budget_blocks"] = draw(COUNTS)
    if "share" in by:
        amount["budget_share"] = draw(SHARES)
    return amount


@st.composite
def selections(draw, selector):
    """Block top-k by a selector, with small blocks and any of its settings."""
    block_q, block_kv = (draw(st.sampled_from([16, 16, 32, 48, 64, 128])) for _ in range(2))
    common = math.gcd(block_q, block_kv)
    both = st.sampled_from([0, 0, 1, 2, 5, 2**62])
    return sa.BlockTopK(
        (block_q, block_kv),
        selector=selector,
        group=draw(st.sampled_from(["q", "kv"])),
        sink_blocks=draw(both),
        local_blocks=draw(both),
        groups=draw(st.sampled_from([n for n in (1, 2, 4, 6, 8, 16) if common % n == 0])),
        row_step=draw(st.sampled_from([1, 3, 8, 16, 17, 2**31 - 1])),
        stride=draw(st.sampled_from([8, 16])),
        **draw(amounts()),
    )


def scores_of(draw, heads, num_q, num_kv):
    """Scores of a caller: some tied, some no numbers."""
    scores = torch.randn(1, draw(st.sampled_from([1, heads])), num_q, num_kv)
    if draw(st.booleans()):
        scores = scores.round()
    for value in draw(st.sets(st.sampled_from([math.nan, math.inf, -math.inf]))):
        scores[torch.rand(scores.shape) < 0.1] = value
    return scores

"""A decoding step's one list for the heads of a group, on both sides of what its own kernel takes.

Scores are far apart or equal, so the list is exact: ties go to the lower block.
"""

import pytest
import torch

import sparse_attn as sa


def scores_of(kind, shape):
    if kind == "equal":
        return torch.full(shape, 1.5)
    scores = (2 * torch.randn(shape)).round()
    if kind == "one":  # all others are far below it
        scores[..., shape[-1] // 2] += 60
    return scores


def best_blocks(scores, heads, budget):
    """The first block, the last one, and the highest greatest shares of the heads."""
    shares = scores.double().softmax(-1).unflatten(1, (-1, heads)).amax(2)
    shares[..., [0, -1]] = 2.0
    return shares.argsort(dim=-1, descending=True, stable=True)[..., :budget].sort(-1).values


@pytest.mark.parametrize("kind", ["ties", "one", "equal"])
@pytest.mark.parametrize(
    ("heads", "blocks", "budget"),
    [
        (1, 7, 4),
        (4, 1025, 128),
        (8, 2000, 667),
        (9, 2000, 667),  # heads past eight
        (4, 16384, 128),
        (4, 16385, 128),  # blocks past those of a cluster
    ],
)
def test_step_list(device, heads, blocks, budget, kind):
    torch.manual_seed(blocks)
    scores = scores_of(kind, (2, 2 * heads, 1, blocks))
    query = torch.randn(2, 2 * heads, 1, 8, device=device)
    key = torch.zeros(2, 2, 16 * blocks - 5, 8, device=device)
    pattern = sa.BlockTopK(
        16, None, scores.to(device), group="kv", budget_blocks=budget, local_blocks=1
    )
    layout = sa.select_blocks(query, key, pattern)
    assert (layout.counts == budget).all()
    expected = best_blocks(scores, heads, budget)
    assert torch.equal(layout.indices[..., :budget].cpu(), expected.int())
    assert not layout.indices[..., budget:].any()

"""The lists of block selection against the plain definitions in ``selection``."""

import pytest
import torch
from reference import Shape
from selection import BLOCK, DTYPE_ERRORS, SELECTORS, by_budget, check_selection, pattern_of

import sparse_attn as sa

AMOUNTS = {
    "mass": {"mass": 0.7},
    "mass-high": {"mass": 0.99},
    "mass-all": {"mass": 1.0},
    "mass-least": {"mass": 1e-300, "sink_blocks": 0, "local_blocks": 0},
    "mass-all-but-rounding": {"mass": 1 - 1e-15},
    "mass-and-cap": {"mass": 0.9, "budget_blocks": 3},
    "mass-and-share": {"mass": 0.9, "budget_share": 0.3},
    "share": {"mass": None, "budget_share": 0.3},
    "share-tenth": {"mass": None, "budget_share": 0.1},
    "all": {"mass": None, "budget_share": 1.0},
    "count": {"mass": None, "budget_blocks": 4},
    "count-large": {"mass": None, "budget_blocks": 2**40},
    "forced-beyond-budget": {"mass": 0.5, "budget_blocks": 1, "sink_blocks": 2, "local_blocks": 3},
    "nothing-forced": {"mass": 0.5, "sink_blocks": 0, "local_blocks": 0},
    "share-least": {"mass": None, "budget_share": 1e-300, "sink_blocks": 0},
    "sinks-beyond-all": {"mass": 0.5, "sink_blocks": 2**62},
    "local-beyond-all": {"mass": 0.5, "local_blocks": 2**62},
}
LENGTHS = [(96, 96), (70, 101), (1, 120), (110, 40)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("Sq, Skv", LENGTHS)
@pytest.mark.parametrize("amount", AMOUNTS.values(), ids=AMOUNTS)
@pytest.mark.parametrize("selector", ["mixed", "mean"])
def test_amounts(device, selector, amount, Sq, Skv, is_causal):
    query, key, _ = Shape(2, 2, 1, Sq, Skv, 32).make(device, memory="transposed")
    check_selection(pattern_of(selector, **amount), query, key, is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("Sq, Skv", LENGTHS)
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_selectors(device, selector, group, Sq, Skv, is_causal):
    query, key, _ = Shape(1, 4, 2, Sq, Skv, 40).make(device)
    query = 2 * query  # estimates far apart
    check_selection(pattern_of(selector, group=group, row_step=8), query, key, is_causal)


SETTINGS = {
    "one-group": pattern_of(groups=1, row_step=5),
    "groups-of-one-row": pattern_of(groups=16, row_step=1),
    "no-sampled-row": pattern_of(row_step=1000),
    "stride-16": pattern_of("antidiagonal", stride=16),
    "stride-16-blocks-of-48": pattern_of("antidiagonal", 48, stride=16),
    "block-64": pattern_of(block=64),
    "block-128": pattern_of(block=128),
    "wide-queries": pattern_of(block=(64, 16)),
    "wide-keys": pattern_of(block=(16, 64)),
    "wide-keys-lines": pattern_of("vertical_slash", block=(16, 48)),
    "wide-queries-bounds": pattern_of("minmax", block=(48, 32)),
    "wide-queries-antidiagonal": pattern_of("antidiagonal", block=(80, 16)),
    "wide-keys-means": pattern_of("mean", block=(16, 32)),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("pattern", SETTINGS.values(), ids=SETTINGS)
def test_settings(device, pattern, is_causal):
    query, key, _ = Shape(1, 2, 1, 230, 330, 32).make(device)
    check_selection(pattern, 2 * query, key, is_causal)


@pytest.mark.parametrize("dtype", DTYPE_ERRORS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("selector", SELECTORS)
def test_types_and_head_dims(device, selector, head_dim, dtype):
    query, key, _ = Shape(1, 2, 1, 200, 264, head_dim).make(device, dtype)
    error = DTYPE_ERRORS[dtype] if device == "cuda" else 1e-5
    check_selection(pattern_of(selector, 32), query, key, True, error=error)


LONG = {
    "mixed": (pattern_of("mixed", (128, 64)), 300, 4250, {}),
    "mixed-kv": (pattern_of("mixed", (64, 16), group="kv"), 90, 2111, {}),
    "mixed-blocks-of-128": (pattern_of("mixed", 128), 40, 9000, {"scale": 0.2}),
    "antidiagonal-8": (pattern_of("antidiagonal", 128, stride=8), 300, 2500, {}),
    "antidiagonal-8-kv": (pattern_of("antidiagonal", 64, stride=8, group="kv"), 77, 2111, {}),
    "antidiagonal-16": (pattern_of("antidiagonal", 128, stride=16), 520, 4200, {}),
    "antidiagonal-16-cap": (pattern_of("antidiagonal", 64, stride=16), 147, 4099, {"softcap": 2.0}),
    "minmax": (pattern_of("minmax"), 40, 4250, {"softcap": 2.0}),
    "minmax-kv": (pattern_of("minmax", 64, group="kv"), 140, 700, {"scale": -0.2}),
    "minmax-blocks-of-128": (pattern_of("minmax", 128), 300, 700, {}),
    "vertical-slash": (pattern_of("vertical_slash", 64), 300, 1400, {}),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern, Sq, Skv, scoring", LONG.values(), ids=LONG)
def test_more_keys_than_a_tile(device, pattern, Sq, Skv, scoring, dtype, is_causal):
    """Lengths that end inside a square and a block, and a head dim that ends inside a slab."""
    query, key, _ = Shape(1, 2, 1, Sq, Skv, 72).make(device, dtype)
    error = DTYPE_ERRORS[dtype] if device == "cuda" else 1e-5
    check_selection(pattern, 2 * query, key, is_causal, error=error, **scoring)


TILES = {
    "one-query": (Shape(2, 6, 6, 1, 100, 64), BLOCK),
    "one-tile": (Shape(1, 6, 6, 65, 90, 64), (64, 16)),
    "three-tiles": (Shape(1, 3, 3, 260, 280, 40), (64, 32)),
    "two-columns": (Shape(1, 3, 3, 20, 4250, 16), BLOCK),
    "wide-heads": (Shape(1, 3, 3, 20, 2100, 192), BLOCK),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape, block", TILES.values(), ids=TILES)
def test_tiles_of_many_key_heads(device, shape, block, is_causal):
    """Some tiles of a key head have no other for the second warpgroup."""
    query, key, _ = shape.make(device, torch.bfloat16)
    error = DTYPE_ERRORS[torch.bfloat16] if device == "cuda" else 1e-5
    check_selection(pattern_of("minmax", block), 2 * query, key, is_causal, error=error)


@pytest.mark.parametrize("dtype", DTYPE_ERRORS, ids=str)
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_offsets(device, selector, is_causal, dtype):
    query, key, _ = Shape(2, 2, 1, 40, 200, 32).make(device, dtype)
    error = DTYPE_ERRORS[dtype] if device == "cuda" else 1e-6

    def check(query_offset):
        pattern = pattern_of(selector, row_step=8)
        check_selection(pattern, query, key, is_causal, query_offset=query_offset, error=error)

    check(23)
    check(torch.tensor([-20, 90], dtype=torch.int32, device=device))
    check(torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32, device=device))


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize(
    "scoring",
    [{"scale": 0.5}, {"scale": -0.2}, {"scale": 0.0}, {"softcap": 1.5}],
    ids=["scale", "negative-scale", "no-scale", "softcap"],
)
def test_scores_are_those_of_the_call(device, selector, scoring):
    query, key, _ = Shape(1, 2, 1, 100, 140, 32).make(device)
    check_selection(pattern_of(selector, row_step=8), query, key, True, **scoring)


@pytest.mark.parametrize("heads, is_causal", [(1, True), (2, False)], ids=["causal", "by-head"])
@pytest.mark.parametrize("group", ["q", "kv"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_bounds(device, selector, group, heads, is_causal):
    """Left padding of half the keys, and packed texts whose rows see their own keys alone."""
    query, key, _ = Shape(2, 2, 1, 192, 192, 16).make(device)
    padded = torch.tensor([96, 192]).expand(heads, 192, 2)
    text = torch.arange(192) // 75
    packed = torch.stack([text * 75, (text + 1) * 75], -1).expand(heads, 192, 2).clone()
    packed[-1, 120:] = torch.tensor([-7, 400])
    packed[:, 32:64] = 5  # a query block without keys
    bounds = torch.stack([padded, packed]).int().to(device)
    pattern = pattern_of(selector, 32, group=group)
    check_selection(pattern, query, key, is_causal, key_bounds=bounds)


def test_own_scores(device):
    query, key, _ = Shape(2, 4, 2, 100, 131, 16).make(device)
    generator = torch.Generator().manual_seed(1)
    for heads in (1, 2, 4):
        scores = 3 * torch.randn(2, heads, 7, 9, generator=generator)
        for group in ("q", "kv"):
            pattern = pattern_of(scores.to(device), group=group)
            check_selection(pattern, query, key, True)
    pattern = by_budget(selector=scores[:1].bfloat16().to(device), budget_blocks=4)
    check_selection(pattern, query, key)


def test_own_scores_that_are_no_numbers_keep_their_blocks(device):
    query, key, _ = Shape(1, 1, 1, 16, 160, 16).make(device)
    scores = torch.zeros(1, 1, 1, 10, device=device)
    scores[..., 2], scores[..., 5], scores[..., 7] = torch.nan, torch.inf, -torch.inf
    pattern = by_budget(selector=scores, budget_blocks=4, sink_blocks=0, local_blocks=0)
    assert sa.select_blocks(query, key, pattern).indices[0, 0, 0, :4].tolist() == [0, 2, 5, 9]
    check_selection(pattern_of(scores, mass=0.3), query, key)
    check_selection(pattern_of(torch.full_like(scores, -torch.inf)), query, key)
    check_selection(pattern_of(torch.full_like(scores, torch.nan)), query, key)


def test_own_scores_of_heads_that_do_not_see_a_block_say_nothing(device):
    """In a list of two heads, of which one sees the first block alone and has no number beyond."""
    query, key, _ = Shape(1, 2, 1, BLOCK, 4 * BLOCK, 32).make(device)
    bounds = torch.tensor([[0, BLOCK], [0, 4 * BLOCK]], dtype=torch.int32, device=device)
    bounds = bounds[None, :, None].expand(1, 2, BLOCK, 2).contiguous()
    for number in (torch.nan, torch.inf):
        scores = torch.zeros(1, 2, 1, 4, device=device)
        scores[0, 0, 0, 2] = number
        pattern = sa.BlockTopK(
            BLOCK, selector=scores, mass=0.5, group="kv", sink_blocks=0, local_blocks=0
        )
        kept = check_selection(pattern, query, key, key_bounds=bounds)
        assert kept.flatten().tolist() == [True, False, False, True]

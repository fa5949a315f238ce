"""The pattern nearest to a mask: patterns are found again, and what differs is reported."""

import itertools

import pytest
import torch

import sparse_attn as sa

PATTERNS = [
    sa.Full(),
    sa.Band((5, 0)),
    sa.Band((5, 2)),
    sa.Band((None, 0)),
    sa.Band((0, 0)),
    sa.Band((5, 3), sinks=2),
    sa.Band(4, global_tokens=3),
    sa.Band((7, 2), global_tokens=18),
    sa.Band((5, 0), sinks=4, global_tokens=1),
    sa.Dilated((6, 0), 3),
    sa.Dilated((4, 4), 2),
    sa.Dilated((4, 0), 3, sinks=2),
    sa.Dilated((3, 3), 2, sinks=3),
    sa.Strided(4, 8),
]


@pytest.mark.parametrize("Sq, Skv", [(64, 64), (48, 64), (64, 48)])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_patterns_are_found_again(pattern, Sq, Skv):
    found = sa.nearest(pattern.mask(Sq, Skv))
    assert torch.equal(found.pattern.mask(Sq, Skv), pattern.mask(Sq, Skv))
    assert found.missing == found.extra == 0


@pytest.mark.parametrize("window, sinks", [((10, 0), 3), ((7, 0), 4), ((12, 1), 2), ((8, 5), 3)])
def test_short_masks(window, sinks):
    """Far diagonals hold few pairs, which sinks may fill."""
    mask = sa.Band(window, sinks=sinks).mask(16, 16)
    assert sa.nearest(mask)[1:] == (0, 0)
    assert sa.nearest(mask.tril(), is_causal=True)[1:] == (0, 0)


@pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("Sq, Skv", [(5, 5), (3, 5), (5, 3)])
def test_every_mask_of_a_pattern(Sq, Skv, is_causal):
    """The masks of all windows, steps, sinks, global tokens and strides of small lengths."""
    few = range(max(Sq, Skv))
    windows = list(itertools.product([*few, None], repeat=2))
    patterns = [sa.Band(*fields) for fields in itertools.product(windows, few, few)]
    patterns += [sa.Dilated(*fields) for fields in itertools.product(windows, few[2:], few)]
    patterns += [sa.Strided(*fields) for fields in itertools.product(few[1:], repeat=2)]
    masks = {}
    for pattern in patterns:
        mask = pattern.mask(Sq, Skv, is_causal)
        masks.setdefault(tuple(mask.flatten().tolist()), (pattern, mask))
    assert not [pattern for pattern, mask in masks.values() if any(sa.nearest(mask, is_causal)[1:])]


@pytest.mark.parametrize(
    "pattern, Sq, Skv, is_causal",
    [
        (sa.Dilated((16, 16), 2, sinks=4), 33, 33, True),
        (sa.Dilated((None, 1), 2, sinks=2), 95, 59, True),
        (sa.Band((None, 40), global_tokens=4), 100, 64, False),
        (sa.Band((57, 1), sinks=35, global_tokens=12), 99, 99, False),
    ],
    ids=repr,
)
def test_lines_filled_by_others(pattern, Sq, Skv, is_causal):
    """Columns and diagonals that a window, steps or global rows fill by more than half."""
    assert sa.nearest(pattern.mask(Sq, Skv, is_causal), is_causal)[1:] == (0, 0)


@pytest.mark.parametrize("local", [1, 4, 9])
def test_steps_of_two_columns(local):
    """Every second column fills half of each diagonal, of an odd number of rows more than half."""
    mask = sa.Strided(local, 2).mask(33, 53)
    assert sa.nearest(mask) == (sa.Strided(local, 2), 0, 0)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_patterns_are_found_through_noise(pattern):
    """With a few pairs wrong no line of the pattern is whole."""
    wrong = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.05
    mask = pattern.mask(64, 64) ^ wrong
    found = sa.nearest(mask).pattern
    assert (found.mask(64, 64) ^ mask).sum() <= wrong.sum()


def test_what_is_missing_and_what_is_extra():
    mask = sa.Band((5, 0)).mask(64, 64)
    pairs = int(mask.sum())
    mask[40, 3] = True
    mask[30, 30] = False
    found = sa.nearest(mask)
    assert found.pattern == sa.Band((5, 0))
    assert found.missing == pytest.approx(1 / pairs) and found.extra == pytest.approx(1 / pairs)


@pytest.mark.parametrize("mask", [torch.ones(4, 4), torch.ones(4).bool(), torch.ones(0, 4).bool()])
def test_wrong_masks(mask):
    with pytest.raises(
        ValueError,
        match="^sparse_attn.nearest: expected mask of dtype bool and .*, got (float32|bool) of",
    ):
        sa.nearest(mask)


@pytest.mark.parametrize("Sq, Skv", [(64, 64), (48, 64)])
@pytest.mark.parametrize(
    "pattern",
    [sa.Band((None, 0)), sa.Band((4, None)), sa.Dilated((None, 0), 3), sa.Dilated((None, None), 3)],
    ids=repr,
)
def test_a_side_that_reaches_the_edge_has_no_limit(pattern, Sq, Skv):
    assert sa.nearest(pattern.mask(Sq, Skv)).pattern == pattern


@pytest.mark.parametrize(
    "pattern",
    [sa.Full(), sa.Band((5, 0), sinks=3), sa.Strided(4, 8), sa.Dilated((4, 0), 3, sinks=2)],
    ids=repr,
)
def test_patterns_of_causal_calls(pattern):
    found = sa.nearest(pattern.mask(64, 64, is_causal=True), is_causal=True)
    assert found == (pattern, 0, 0)


def test_a_mask_with_heads_says_which_part_to_give():
    with pytest.raises(ValueError, match=r"mask\[0, 0\]$"):
        sa.nearest(torch.ones(1, 1, 4, 4).bool())


def test_a_mask_without_contents():
    with pytest.raises(ValueError, match=r"^sparse_attn\.nearest: .* contents, got a meta tensor$"):
        sa.nearest(torch.ones(4, 4, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
def test_torchs_default_device_does_not_matter(is_causal):
    mask = sa.Band((5, 0), sinks=2).mask(64, 64)
    want = sa.nearest(mask, is_causal)
    with torch.device("meta"):
        assert sa.nearest(mask, is_causal) == want

"""Neighbourhoods on grids against the definition pair by pair, in the order of tiles."""

import math

import pytest
import torch

import sparse_attn as sa
from sparse_attn import BlockLayout, BlockSparse, layout_nd


def neighbours(shape, sides, moved=False):
    """Which tokens of a grid see which, bool (tokens, tokens); by NATTEN's rule where `moved`."""
    axes = []
    for size, (before, after) in zip(shape, sides, strict=True):
        at, to = torch.arange(size)[:, None], torch.arange(size)
        begin = (at - before).clamp(0, size - 1 - before - after) if moved else at - before
        axes.append((begin <= to) & (to <= begin + before + after))
    seen = torch.ones(1, 1).bool()
    for axis in axes:
        seen = (seen[:, None, :, None] & axis[None, :, None]).flatten(2).flatten(0, 1)
    return seen


FAR = 10**6
GRIDS = {
    "image": ((12, 20), 3, (4, 4), [(3, 3), (3, 3)]),
    "uneven": ((13, 21), (2, 5), (4, 4), [(2, 2), (5, 5)]),
    "pairs": ((9, 17), ((2, 0), (0, 3)), (2, 8), [(2, 0), (0, 3)]),
    "video": ((5, 9, 11), (1, (2, 0), None), (2, 2, 4), [(1, 1), (2, 0), (FAR, FAR)]),
    "line": ((100,), 9, (16,), [(9, 9)]),
    "itself": ((8, 8), 0, (4, 4), [(0, 0), (0, 0)]),
    "everything": ((8, 9), None, (4, 4), [(FAR, FAR)] * 2),
    "one-tile": ((3, 3), 1, (4, 4), [(1, 1), (1, 1)]),
}


@pytest.mark.parametrize("pairs", [2**24, 1], ids=["at-once", "by-groups"])
@pytest.mark.parametrize("shape, window, tile, sides", GRIDS.values(), ids=GRIDS)
def test_exact(device, shape, window, tile, sides, pairs, monkeypatch):
    monkeypatch.setattr(layout_nd, "PAIRS", pairs)
    layout, order = BlockLayout.local_nd(shape, window, tile, device=device)
    tokens = math.prod(shape)
    assert order.dtype == torch.int64 and sorted(order.tolist()) == list(range(tokens))
    want = neighbours(shape, sides)[order.cpu()][:, order.cpu()]
    assert torch.equal(BlockSparse(layout).mask(tokens, tokens)[0, 0].cpu(), want)
    whole, same = BlockLayout.local_nd(shape, window, tile, device=device, whole=True)
    assert whole.bits is None and torch.equal(whole.to_mask(), layout.to_mask())
    assert torch.equal(same, order)


def test_tiles_follow_one_another():
    _, order = BlockLayout.local_nd((4, 8), 1, (4, 4))
    assert order[:16].tolist() == [row * 8 + column for row in range(4) for column in range(4)]


def test_attention_in_the_order_of_tiles_is_that_of_the_grid(device):
    shape, sides = (9, 14), [(2, 2), (3, 3)]
    query, key, value = torch.randn(3, 1, 2, 126, 16, device=device)
    layout, order = BlockLayout.local_nd(shape, (2, 3), (4, 4), device=device)
    moved = (tensor[:, :, order] for tensor in (query, key, value))
    out = sa.naive_attention(*moved, BlockSparse(layout))[:, :, order.argsort()]
    mask = neighbours(shape, sides).to(device)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(out, sdpa(query, key, value, attn_mask=mask))


def test_natten_moves_windows_at_the_borders_where_ours_are_cut():
    shape, sides = (11, 13), [(2, 2), (3, 3)]
    layout, order = BlockLayout.local_nd(shape, (2, 3), (4, 4))
    back = order.argsort()
    ours = BlockSparse(layout).mask(143, 143)[0, 0][back][:, back]
    natten = neighbours(shape, sides, moved=True)
    assert (natten.sum(-1) == 5 * 7).all()
    inside = torch.zeros(shape).bool()
    inside[2:-2, 3:-3] = True
    same = (ours == natten).all(-1).view(shape)
    assert torch.equal(same, inside)
    assert (ours <= natten).all()  # a cut window is part of the moved one
    exact = BlockLayout.from_token_mask(natten[order][:, order], 16, 16)  # theirs, served so
    assert torch.equal(BlockSparse(exact).mask(143, 143)[0, 0], natten[order][:, order])


def test_a_video_sized_grid_has_few_bits():
    layout, order = BlockLayout.local_nd((8, 48, 80), (3, 6, 6), (4, 4, 8))
    assert layout.counts.shape == (1, 1, 240) and len(order) == 8 * 48 * 80
    assert len(layout.bits) < 200
    assert int(layout.counts.sum()) < 0.2 * 240**2


WRONG = {
    "axes": ((8, 8), 1, (4,), ValueError, "tile of 2 axes"),
    "no-axes": ((), 1, (), ValueError, "tile of 1 axes"),
    "block": ((8, 8), 1, (3, 4), ValueError, r"tile of a multiple of 16 tokens, got \(3, 4\)"),
    "size": ((8, 0), 1, (4, 4), ValueError, "shape of at least 1, got 0"),
    "tokens": ((2**20, 2**20), 1, (4, 4), ValueError, "the tokens of shape of at most 536870911"),
    "large": ((8, 8), 1, (2**40, 2**40), ValueError, "the tokens of tile of at most 536870911"),
    "sides": ((8, 8), (1, 1, 1), (4, 4), ValueError, "window with sides for each of 2 axes"),
    "side": ((8, 8), (1, -1), (4, 4), ValueError, "window's left side of at least 0, got -1"),
    "shape": (64, 1, (4, 4), TypeError, "shape to be a sequence of ints, got int"),
    "window": ((8, 8), "9", (4, 4), TypeError, "window to be an int or a pair"),
}


@pytest.mark.parametrize("shape, window, tile, kind, sentence", WRONG.values(), ids=WRONG)
def test_wrong_grids(shape, window, tile, kind, sentence):
    with pytest.raises(kind, match=f"^sparse_attn.BlockLayout: expected {sentence}"):
        BlockLayout.local_nd(shape, window, tile)


def test_a_wrong_device():
    with pytest.raises(ValueError, match="^sparse_attn.BlockLayout: expected device .* 'gpu'$"):
        BlockLayout.local_nd((8, 8), 1, (4, 4), device="gpu")

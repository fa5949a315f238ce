"""Visited tiles of patterns: what `cost` counts and `plot(tiles=...)` shows."""

import subprocess
import sys

import pytest
import torch

import sparse_attn as sa
from sparse_attn._tiles import tile_picture

PATTERNS = {
    "full": sa.Full(),
    "causal-band": sa.Band((40, 0)),
    "band-sinks": sa.Band((None, 7), sinks=70),
    "band-globals": sa.Band((9, 9), global_tokens=3),
    "band-scattered": sa.Band((9, 0), global_tokens=torch.tensor([129, 50, -1, 900, 3])),
    "dilated": sa.Dilated((7, 3), 5, sinks=4),
    "dilated-far": sa.Dilated((1, 1), 99),
    "strided": sa.Strided(33, 20),
    "blocks": sa.BlockSparse(sa.BlockLayout.local(130, 200, 32, 16, (2, 1))),
    "partial": sa.BlockSparse(
        sa.BlockLayout.from_token_mask(sa.Band((40, 9)).mask(130, 200), 32, 16)
    ),
}
LENGTHS = [(130, 200), (64, 64), (200, 130), (1, 77), (0, 5), (5, 0)]
info = pytest.importorskip("sparse_attn._info", reason="the info module is not built")


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("tile", [(64, 64), (16, 48), (1, 1)], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_visited_tiles_hold_every_allowed_pair(name, tile, is_causal):
    pattern = PATTERNS[name]
    for Sq, Skv in LENGTHS[:1] if isinstance(pattern, sa.BlockSparse) else LENGTHS:
        mask = pattern.mask(Sq, Skv, is_causal)
        mask = mask[0, 0] if mask.dim() == 4 else mask
        runs = pattern._runs(Sq, Skv, is_causal, tile)
        picture = tile_picture(runs, mask)
        assert torch.equal(picture >= 2, mask)  # tiles without a mask are allowed whole
        visited = sum(run.rows * run.keys for run in runs)
        assert visited >= int(mask.sum())
        assert pattern.cost(Sq, Skv, is_causal, tile=tile) * tile[0] * tile[1] >= visited
        if tile == (1, 1) and name.startswith(("full", "causal", "band-sinks", "strided")):
            assert visited == int(mask.sum())  # no idle tile


@pytest.mark.parametrize(
    ("pattern", "arguments", "tiles"),
    [
        (sa.Full(), {}, 256),
        (sa.Full(), {"is_causal": True}, 136),
        (sa.TopK(8), {"is_causal": True}, 136),
        (sa.Band((0, 0)), {}, 16),
        (sa.Band((127, 0)), {}, 45),
        (sa.Band((127, 0), sinks=4), {}, 58),
        (sa.Band((127, 0)), {"tile": (128, 64)}, 30),
        (sa.BlockSparse(sa.BlockLayout.local(1024, 1024, 32, 128, 0)), {"tile": 64}, 32),
    ],
    ids=str,
)
def test_cost_counts_tiles(pattern, arguments, tiles):
    assert pattern.cost(1024, **arguments) == tiles


def test_cost_of_a_layout_is_a_mean_and_obeys_causal():
    mask = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    mask[0, 1] = torch.eye(4)
    pattern = sa.BlockSparse(sa.BlockLayout.from_mask(mask, 64, 64))
    assert pattern.cost(256) == 10
    assert pattern.cost(256, is_causal=True) == 7


class Own(sa.Pattern):
    def allows(self, row, position, key):
        return key <= position


class Narrower(sa.Band):
    def allows(self, row, position, key):
        return super().allows(row, position, key) & (key % 2 == 0)


@pytest.mark.parametrize(
    ("pattern", "error", "sentence"),
    [
        (sa.BlockTopK(), NotImplementedError, "BlockTopK: no tiles without data; BlockSparse"),
        (sa.ByHead({0: sa.Full()}), NotImplementedError, "ByHead: no tiles of all heads; ask"),
        (Own(), NotImplementedError, "Own: not served: visited tiles of Own, which has no op"),
        (Narrower(9), NotImplementedError, "Narrower: not served: visited tiles of Narrower"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, sa.Pattern) else "",
)
def test_patterns_without_tiles_say_so(pattern, error, sentence):
    with pytest.raises(error, match=rf"sparse_attn\.{sentence}"):
        pattern.cost(64)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"tile": 10**30}, ValueError, "Band: expected tile of at most 536870911, got 1000"),
        ({"tile": 0}, ValueError, "Band: expected tile of at least 1, got 0"),
        ({"tile": (1, 2, 3)}, ValueError, r"Band: expected tile of \(queries, keys\)"),
        ({"tile": "64"}, TypeError, "Band: expected tile to be an int or a pair"),
        ({"Skv": -1}, ValueError, "Band: expected Skv of at least 0, got -1"),
        ({"Skv": 2**29}, ValueError, "Band: expected Skv of at most 536870911"),
    ],
    ids=str,
)
def test_wrong_arguments_of_cost(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        sa.Band(9).cost(64, **arguments)


def test_without_the_module_only_tiles_are_missing():
    script = """
import sys
sys.modules["sparse_attn._info"] = None  # importing it now fails
import sparse_attn as sa
layout = sa.BlockLayout.local(256, 256, 64, 64, 0)
print(sa.Band(3).density(8, 8), sa.BlockSparse(layout).cost(256))
try:
    sa.Band(3).cost(64)
except NotImplementedError as error:
    print(error)
"""
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "0.6875 4.0"
    assert said[1].startswith("sparse_attn: not served: visited tiles without the module _info")

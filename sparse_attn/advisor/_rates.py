"""The time model of the search: visited tiles, times what a tile of that kind of pattern takes.

``pattern.cost`` counts tiles; of lists their pairs stand for them. A rate is the time of a visited
tile beside one of dense attention, measured once on the device with the model's heads and, of
lists, with their block sizes. Rates are rounded, so that the noise of a clock does not choose.
Choosing blocks is not in them: it takes the same for all masses.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..layout import BlockLayout
from ..patterns import BlockSparse, BlockTopK, Full, Pattern, TopK
from ._crossover import stands_alone
from ._device_figures import kept_figure, place_of
from ._times import random_tensors, seconds_of_call

__all__ = ["cost"]

#: Keys at which rates are measured: enough that the start of a call does not count.
LENGTH = {"cpu": 2048, "cuda": 16384}
#: What rates are rounded to, and the least.
STEP = 0.1
_known: dict[str, float] = {}


def cost(
    pattern: Pattern, query: torch.Tensor, key: torch.Tensor, is_causal: bool, pairs: list[float]
) -> list[float]:
    """Return the predicted time under a pattern for each head, as a share of dense attention's.

    Parameters
    ----------
    pattern : Pattern
    query, key : Tensor
        Of the model's call.
    is_causal : bool
    pairs : list of float
        Share of the pairs that each head reads: its tiles, where lists name them.
    """
    if not stands_alone(pattern):
        rate = _rate(pattern, query, key)
        return [rate * own for own in pairs]
    try:
        tiles = pattern.cost(query.shape[2], key.shape[2], is_causal)
        share = tiles / Full().cost(query.shape[2], key.shape[2], is_causal)
    except NotImplementedError:  # the module that counts tiles is missing: pairs stand for them
        return pairs
    return [_rate(pattern, query, key) * share] * len(pairs)


def _rate(pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> float:
    kind = type(pattern).__name__
    if not stands_alone(pattern):
        kind += " {}x{}".format(*_block_sizes(pattern))
    name = f"{place_of(query, key)} | a tile of {kind}"
    if name not in _known:
        _known[name] = kept_figure(name, lambda: _measured(pattern, query, key))
    return _known[name]


def _measured(pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> float:
    """Return the time of a pattern's tile over that of a dense one, causal, on random tensors."""
    length = LENGTH.get(query.device.type, LENGTH["cpu"])
    timed = pattern if stands_alone(pattern) else _lists_like(pattern, length, query.device)
    tensors = random_tensors(query, key, length)
    if timed is pattern:
        share = timed.cost(length, is_causal=True) / Full().cost(length, is_causal=True)
    else:
        share = timed._region.density(length, length, True) / Full().density(length, length, True)
    rounds = [(seconds_of_call(tensors, timed), seconds_of_call(tensors, Full())) for _ in range(3)]
    own, dense = (min(times) for times in zip(*rounds, strict=True))  # others may use the machine
    return max(STEP, STEP * round(own / dense / share / STEP))


def _lists_like(pattern: Pattern, length: int, device: torch.device) -> Pattern:
    """Return lists of a quarter of the blocks, of a pattern's block sizes; top-k inside of them."""
    block_q, block_kv = _block_sizes(pattern)
    i = torch.arange(-(-length // block_q), device=device)[:, None]
    j = torch.arange(-(-length // block_kv), device=device)
    lists = BlockSparse(BlockLayout.from_mask((i + 3 * j) % 4 == 0, block_q, block_kv))
    return replace(pattern, inside=lists) if isinstance(pattern, TopK) else lists


def _block_sizes(pattern: Pattern) -> tuple[int, int]:
    """Return the queries and keys of a block."""
    blocks = pattern._region
    if isinstance(blocks, BlockTopK):
        return blocks._blocks
    if isinstance(blocks, BlockSparse):
        return blocks.layout.block_q, blocks.layout.block_kv
    return 64, 64

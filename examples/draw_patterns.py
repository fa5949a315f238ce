"""Draw the patterns of the README: ``python examples/draw_patterns.py docs/patterns.png``."""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot

import sparse_attn as sa

LENGTH = 128
TILE = 16
PANELS = [
    ("full, causal", sa.Full()),
    ("band, 2 sinks", sa.Band((23, 0), sinks=2)),
    ("band, global tokens", sa.Band(12, global_tokens=torch.tensor([0, 1, 60]))),
    ("dilated", sa.Dilated((15, 0), dilation=4)),
    ("strided", sa.Strided(16, 16)),
    ("block-sparse", sa.BlockSparse(sa.BlockLayout.bigbird(LENGTH, LENGTH, 16, 16))),
]


def main(path: str) -> None:
    """Write one picture: for each pattern its pairs, and the tiles that engines visit."""
    figure, axes = pyplot.subplots(
        2, len(PANELS), figsize=(3 * len(PANELS), 6.6), layout="constrained"
    )
    for (above, below), (title, pattern) in zip(axes.T, PANELS, strict=True):
        causal = title.startswith("full")
        pattern.plot(LENGTH, is_causal=causal, ax=above)
        pattern.plot(LENGTH, is_causal=causal, ax=below, tiles=TILE)
        share = pattern.density(LENGTH, LENGTH, is_causal=causal)
        visited = pattern.cost(LENGTH, is_causal=causal, tile=TILE) / sa.Full().cost(
            LENGTH, tile=TILE
        )
        above.set(title=f"{title}: {share:.0%}", xticks=[], yticks=[], xlabel="", ylabel="")
        below.set(title=f"tiles: {visited:.0%}", xticks=[], yticks=[], xlabel="", ylabel="")
        marks = below.get_legend()
        marks.remove()
    names = [text.get_text() for text in marks.get_texts()]
    figure.legend(marks.legend_handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Draw the patterns of the README: ``python examples/draw_patterns.py docs/patterns.png``."""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot

import sparse_attn as sa

LENGTH = 128
PANELS = [
    ("full, causal", sa.Full()),
    ("band, 2 sinks", sa.Band((23, 0), sinks=2)),
    ("band, global tokens", sa.Band(12, global_tokens=torch.tensor([0, 1, 60]))),
    ("dilated", sa.Dilated((15, 0), dilation=4)),
    ("strided", sa.Strided(16, 16)),
    ("block-sparse", sa.BlockSparse(sa.BlockLayout.bigbird(LENGTH, LENGTH, 16, 16))),
]


def main(path: str) -> None:
    """Write one picture with a panel for each pattern."""
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(3 * len(PANELS), 3.3))
    for ax, (title, pattern) in zip(axes, PANELS, strict=True):
        causal = title.startswith("full")
        pattern.plot(LENGTH, LENGTH, is_causal=causal, ax=ax)
        share = pattern.density(LENGTH, LENGTH, is_causal=causal)
        ax.set(title=f"{title}: {share:.0%}", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])

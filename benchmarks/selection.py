"""Choosing blocks from the data: what each selector costs beside dense attention."""

from __future__ import annotations

from dataclasses import replace

from .cases import Case, Entry, Group
from .masks import Blocks, BlockTopK, Full

LENGTH = 131072
SELECTORS = {
    "mean": BlockTopK(128, mass=0.9),
    "minmax": BlockTopK(128, selector="minmax", mass=0.9),
    "vertical_slash": BlockTopK(128, selector="vertical_slash", mass=0.9),
    "antidiagonal 16": BlockTopK(
        128, selector="antidiagonal", mass=0.9, settings=(("stride", 16),)
    ),
    "antidiagonal 8": BlockTopK(128, selector="antidiagonal", mass=0.9, settings=(("stride", 8),)),
    "mixed": BlockTopK(128, selector="mixed", mass=0.9, settings=()),
}
DEFAULT = BlockTopK((128, 64), selector="mixed", mass=0.9, settings=())
TENTH = 0.1  # of the blocks, by count
# Of the blocks that a mass of 0.9 keeps of a real model's text, or more (quality-*.md: 18 %). White
# noise would keep 90 %, so the cap ends the lists here.
FIFTH = 0.2
UNEVEN = (64, 128)  # blocks
SPREAD = 20.0  # heads of a real model keep 3 to 60 %


def selection() -> list[Group]:
    """List every selector alone, whole calls, and lists of even and uneven heads."""
    dense = Case(Full(), LENGTH, heads=32, kv_heads=8, causal=True)
    entries = [Entry(name, replace(dense, spec=spec), "select") for name, spec in SELECTORS.items()]
    entries.append(Entry("default", replace(dense, spec=DEFAULT), "select"))
    for name in ("mean", "mixed"):
        spec = replace(SELECTORS[name], mass=None, budget=TENTH)
        entries.append(Entry(f"call by {name}", replace(dense, spec=spec)))
    capped = replace(dense, spec=replace(DEFAULT, budget=FIFTH))
    entries += [Entry("call by default", capped), Entry("compare", capped, "compare")]
    return [Group("selection, 128K", (*entries, Entry("dense", dense))), _uneven()]


def _uneven() -> Group:
    """Return lists of as many pairs, the same for all heads or as a mass budget leaves them."""
    case = Case(Full(), 32768, heads=32, kv_heads=8, causal=True)
    entries = []
    for block in UNEVEN:
        even = Blocks(block, block, FIFTH)
        entries += [
            Entry(f"even {block}", replace(case, spec=even)),
            Entry(f"uneven {block}", replace(case, spec=replace(even, spread=SPREAD))),
        ]
    return Group("uneven lists, 32K", tuple(entries))

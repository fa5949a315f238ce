"""Choosing blocks from the data: what each selector costs beside dense attention."""

from __future__ import annotations

from dataclasses import replace

from .cases import Case, Entry, Group
from .masks import BlockTopK, Full

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
TENTH = 0.1  # of the blocks, by count


def selection() -> list[Group]:
    """List every selector alone, and whole calls at a tenth of the blocks."""
    dense = Case(Full(), LENGTH, heads=32, kv_heads=8, causal=True)
    entries = [Entry(name, replace(dense, spec=spec), "select") for name, spec in SELECTORS.items()]
    for name in ("mean", "mixed"):
        spec = replace(SELECTORS[name], mass=None, budget=TENTH)
        entries.append(Entry(f"call by {name}", replace(dense, spec=spec)))
    return [Group("selection, 128K", (*entries, Entry("dense", dense)))]

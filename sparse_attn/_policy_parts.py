"""What a `Policy` is made of: the dense form of a pattern, its reach, checks of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ._checks import check_integer, check_kind, kind_of, refuse
from ._pattern import check_pattern
from ._table import Table
from .by_head import ByHead
from .patterns import Band, BlockTopK, Dilated, Full, Pattern, Strided

__all__ = [
    "check_prefill",
    "check_served",
    "checked_dense",
    "checked_heads",
    "checked_layers",
    "twice_reach",
    "widened",
]


def check_served(name: str, pattern: object, what: str = "a pattern") -> None:
    """Refuse what is no pattern, and what no op serves: at once, not in a model's first call."""
    check_pattern("Policy", pattern, name, what)
    assert isinstance(pattern, Pattern)
    for own in pattern._head_patterns:
        reason = own._unserved()
        if reason is not None:
            raise NotImplementedError(f"sparse_attn.Policy: {name} not served: {reason}")
        blocks = own._region
        if isinstance(blocks, BlockTopK) and blocks.sketch is not None:
            got = "one; leave sketch= out, then each call makes its own"
            raise refuse("Policy", f"{name} without a KeySketch, the keys of one layer", got)


def check_prefill(name: str, pattern: object, what: str = "a pattern") -> None:
    """Refuse what `check_served` does, and what serves few queries alone."""
    check_served(name, pattern, what)
    assert isinstance(pattern, Pattern)
    for own in pattern._head_patterns:
        blocks = own._region
        if isinstance(blocks, BlockTopK) and blocks._by_sketch:
            got = (
                "selector 'sketch' (1 to 16 queries); give it as decode= beside one that does, "
                "such as Policy(Full(), decode=...)"
            )
            raise refuse("Policy", f"{name} that serves a whole prompt", got)


def widened(pattern: Pattern) -> Pattern:
    """Make the dense form of `pattern`: finite sides become unlimited, a side of 0 stays 0."""
    if isinstance(pattern, ByHead):
        return ByHead({h: widened(p) for h, p in pattern.patterns.items()}, widened(pattern.rest))
    if isinstance(pattern, Strided):
        return Band((None, 0))
    if not isinstance(pattern, (Band, Dilated)):
        return Full()
    left, right = (0 if side == 0 else None for side in pattern.sides)
    if left is None and right is None:
        return Full()
    if isinstance(pattern, Dilated):
        return Band((left, right), sinks=pattern.sinks)
    return replace(pattern, window=(left, right))


def twice_reach(pattern: Pattern) -> int:
    """Twice the reach of a window, 0 for patterns without a finite side."""
    if not isinstance(pattern, (Band, Dilated)):
        return 0
    sides = [side for side in pattern.sides if side is not None]
    if not sides:
        return 0
    return 2 * (max(sides) + 1) * (pattern.dilation if isinstance(pattern, Dilated) else 1)


def checked_dense(layers: Iterable[int]) -> tuple[int, ...]:
    """Return numbers of dense layers, in order; refuse what is none."""
    try:
        numbers = iter(layers)
    except TypeError:  # of a tensor without dimensions too, which has the method
        numbers = None
    if numbers is None or isinstance(layers, (str, bytes, bytearray)):
        what = "dense_layers to be an iterable of ints"
        raise TypeError(f"sparse_attn.Policy: expected {what}, got {kind_of(layers)}")
    own = {check_integer("Policy", "each of dense_layers", layer, 0) for layer in numbers}
    return tuple(sorted(own))


def checked_layers(layers: Mapping[int, Pattern]) -> Table:
    """Return patterns by layer, in order; refuse what is none."""
    check_kind("Policy", "layers", layers, Mapping, "a mapping of layer to pattern")
    for layer, pattern in layers.items():
        check_integer("Policy", "a layer's number", layer, 0)
        check_prefill(f"layers[{layer}]", pattern)
    return Table({int(layer): layers[layer] for layer in sorted(layers)})


def checked_heads(heads: Mapping[int, Mapping[int, Pattern]]) -> Table:
    """Return patterns by layer and key head, in order; refuse what is none."""
    what = "a mapping of layer to a mapping of key head to pattern"
    check_kind("Policy", "heads", heads, Mapping, what)
    checked = {}
    for layer, patterns in heads.items():
        check_integer("Policy", "a layer's number", layer, 0)
        check_kind(
            "Policy", f"heads[{layer}]", patterns, Mapping, "a mapping of key head to pattern"
        )
        by_head = ByHead(patterns)
        check_prefill(f"heads[{layer}]", by_head)
        checked[int(layer)] = Table(by_head.patterns)
    return Table(sorted(checked.items()))

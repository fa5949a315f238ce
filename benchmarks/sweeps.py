"""The report's curves: time and memory over lengths, time and accuracy over sparsity, and the rest.

A group is a point of a curve (``sweep``, ``x``); its entries carry the same names along the curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from .cases import Case, Entry, Group
from .masks import Band, Blocks, BlockTopK, Dilated, Full, Spec, Strided, TopK


@dataclass(frozen=True)
class Scale:
    """What a device can be asked in minutes."""

    base: Case  # dense, at the length of the sparsity curve
    lengths: tuple[int, ...]
    longest_topk: int
    longest_materialised: int
    window: int
    dense_peers: tuple[str, ...]
    flex_lengths: tuple[int, ...]
    densities: tuple[float, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    side_length: int  # of the head dim, dtype and batch curves


GPU = Scale(
    base=Case(Full(), 16384),
    lengths=tuple(1024 << step for step in range(8)),
    longest_topk=32768,
    longest_materialised=8192,
    window=1024,
    dense_peers=("flash", "cudnn"),
    flex_lengths=(4096, 16384, 65536),
    densities=(0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.02),
    head_dims=(64, 96, 128, 192, 256),
    dtypes=("bfloat16", "float16", "float32"),
    batches=(1, 4, 16),
    side_length=4096,
)
CPU = Scale(
    base=Case(Full(), 4096, heads=2, head_dim=64, dtype="float32"),
    lengths=(512, 1024, 2048, 4096, 8192),
    longest_topk=4096,
    longest_materialised=4096,
    window=512,
    dense_peers=("sdpa",),
    flex_lengths=(),
    densities=(0.75, 0.5, 0.25, 0.1, 0.05),
    head_dims=(32, 64, 128),
    dtypes=("float32", "bfloat16", "float16"),
    batches=(1, 4),
    side_length=1024,
)


def report(scale: Scale = GPU) -> list[Group]:
    """Return every point of every curve, the cheap and telling ones first."""
    groups = [_length(scale, length) for length in scale.lengths if length <= 16384]
    groups += [_sparsity(scale, density) for density in scale.densities]
    base = scale.base
    groups.append(
        fused_global(
            "global tokens",
            base.length,
            2 * scale.window,
            heads=base.heads,
            head_dim=base.head_dim,
            dtype=base.dtype,
        )
    )
    groups += _side_curves(scale)
    groups += [_length(scale, length) for length in scale.lengths if length > 16384]
    return groups


def fused_global(name: str, length: int, window: int, **shape: Any) -> Group:
    """Global tokens in the band's own pass beside two calls merged by their lse."""
    both = Case(Band(window - 1, 0, global_tokens=min(128, window)), length, causal=True, **shape)
    return Group(
        name,
        (
            Entry("fused", both),
            Entry("merged", both, "merged"),
            Entry("band", replace(both, spec=Band(window - 1))),
        ),
    )


def _length(scale: Scale, length: int) -> Group:
    dense = replace(scale.base, length=length, causal=True)
    window = scale.window
    entries = [Entry("dense", dense)]
    entries += [Entry(peer, dense, peer) for peer in scale.dense_peers]
    patterns: dict[str, Spec] = {
        "band": Band(window - 1),
        "dilated": Dilated(window - 1, 0, 2),
        "strided": Strided(window // 2, 64),
        "blocks": Blocks(128, 128, 0.1),
        "block top-k": BlockTopK(128, 0.1),
    }
    if length <= scale.longest_topk:
        patterns["top-k"] = TopK(window // 4)
    entries += [Entry(name, replace(dense, spec=spec)) for name, spec in patterns.items()]
    if length in scale.flex_lengths:
        entries.append(Entry("flex band", replace(dense, spec=Band(window - 1)), "flex"))
    if length <= scale.longest_materialised:
        entries += [Entry("naive", dense, "naive"), Entry("math", dense, "math")]
    return Group(f"length {length}", tuple(entries), "length", length)


def _sparsity(scale: Scale, density: float) -> Group:
    dense = replace(scale.base, peaked=True)
    side = _side(dense.length, density)
    taps = _side(dense.length, min(1.0, 2 * density)) // 2  # half the keys of a window, at most
    entries = [
        Entry("dense", dense),
        Entry(scale.dense_peers[0], dense, scale.dense_peers[0]),
        Entry("band", replace(dense, spec=Band(side, side))),
        Entry("dilated", replace(dense, spec=Dilated(taps, taps, 2))),
        Entry("blocks", replace(dense, spec=Blocks(128, 128, density))),
        Entry("block top-k", replace(dense, spec=BlockTopK(128, density))),
        Entry("top-k", replace(dense, spec=TopK(max(1, round(density * dense.length))))),
    ]
    return Group(f"density {density}", tuple(entries), "density", density)


def _side(length: int, share: float) -> int:
    """Return how far a window has to reach on both sides to hold that share of all pairs."""
    return max(1, min(length - 1, round(length * (1 - math.sqrt(1 - share)))))


def _side_curves(scale: Scale) -> list[Group]:
    base = replace(scale.base, length=scale.side_length, causal=True)
    width = base.heads * base.head_dim
    peer = scale.dense_peers[0]

    def point(case: Case, sweep: str, x: float, name: str) -> Group:
        band = replace(case, spec=Band(scale.window // 2 - 1))
        blocks = replace(case, spec=Blocks(128, 128, 0.25))
        return Group(
            name,
            (
                Entry("dense", case),
                Entry(peer, case, peer),
                Entry("band", band),
                Entry("blocks", blocks),
            ),
            sweep,
            x,
        )

    groups = [
        point(
            replace(base, head_dim=dim, heads=max(1, width // dim)),
            "head dim",
            dim,
            f"head dim {dim}",
        )
        for dim in scale.head_dims
    ]
    groups += [
        point(replace(base, dtype=dtype), "dtype", x, dtype) for x, dtype in enumerate(scale.dtypes)
    ]
    groups += [
        point(replace(base, batch=batch), "batch", batch, f"batch {batch}")
        for batch in scale.batches
    ]
    return groups

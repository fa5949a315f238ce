"""The named suites: which groups are run. Their floors stand in floors.py, by group and entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .cases import Case, Entry, Group
from .cliffs import BOTH, beside, cliffs, cpu_cliffs
from .draws import draws
from .landscape import sweep
from .masks import Band, Blocks, BlockTopK, Dilated, Full, Spec, Strided, TopK
from .selection import selection
from .serving import DECODE, decode_case, serving, size_name
from .sweeps import CPU, GPU, fused_global, report

# (head dim, heads, length, batch): BARS' dense table.
DENSE_SHAPES = (
    (128, 16, 16384, 1),
    (128, 16, 4096, 4),
    (128, 16, 1024, 16),
    (64, 32, 16384, 1),
    (64, 32, 4096, 4),
    (64, 32, 1024, 16),
    (256, 8, 16384, 1),
    (192, 10, 16384, 1),
    (96, 21, 16384, 1),
)
KEY_BLOCKS = (64, 32, 16)
TOP_K = (64, 512, 2048)
BREAK_EVEN = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
#: Query heads, key heads and keys of one sequence, as a shard of a tensor-parallel model has them.
FEW_KEY_HEADS = ((8, 1, 8192), (8, 1, 16384), (8, 1, 131072), (32, 4, 16384))


def dense() -> list[Group]:
    """List dense prefill beside SDPA's backends, FlexAttention, flash-attn 3 and 4."""
    groups = []
    for dim, heads, length, batch in DENSE_SHAPES:
        for causal in (False, True):
            case = Case(Full(), length, batch=batch, heads=heads, head_dim=dim, causal=causal)
            peers = ["cudnn", "flash", "fa3", "fa4"]
            peers += ["flex"] if dim in (64, 128) else []
            peers += ["math"] if length == 1024 else []
            name = dense_name(dim, length, causal)
            groups.append(Group(name, beside(case, *peers), methods=BOTH))
    return groups


def dense_name(dim: int, length: int, causal: bool) -> str:
    """Return the group's name for a row of the dense table."""
    return f"dense {dim}, {length // 1024}K, {'causal' if causal else 'full'}"


def sparse() -> list[Group]:
    """List static and dynamic sparsity beside FlexAttention, flash-attn 3 and 4, our own dense."""
    groups = []
    for length, window, heads in ((16384, 2048, 16), (32768, 4096, 16), (131072, 4096, 4)):
        band = Case(Band(window - 1), length, heads=heads, causal=True)
        full = _as(band, Full())
        groups.append(
            Group(
                f"band {length // 1024}K",
                (
                    *beside(band, "flex", "tuned flex", "fa3", "fa4"),
                    Entry("cudnn full causal", full, "cudnn"),
                ),
                methods=BOTH,
            )
        )
    taps = Case(Dilated(4095, 0, 2), 32768, causal=True)
    groups.append(
        Group("dilated 32K", (*beside(taps, "flex"), Entry("band", _as(taps, Band(4095)))))
    )
    groups.append(_blocks("block 128, 16K", Case(Full(), 16384), (0.5, 0.25, 0.1)))
    groups.append(_blocks("block 128, 64K", Case(Full(), 65536, heads=8), (0.1, 0.05)))
    half = Case(Full(), 16384)
    groups.append(
        Group(
            "block 128x64, 16K",
            tuple(Entry(f"density {d:.2f}", _as(half, Blocks(128, 64, d))) for d in (0.25, 0.1)),
        )
    )
    groups.append(
        Group(
            "block 64, 16K",
            (
                Entry("density 0.25", _as(half, Blocks(64, 64, 0.25))),
                Entry("flex", _as(half, Blocks(64, 64, 0.25)), "flex"),
            ),
        )
    )
    groups.append(
        Group(
            "key blocks, 16K",
            tuple(Entry(f"keys {size}", _as(half, Blocks(128, size, 0.25))) for size in KEY_BLOCKS),
        )
    )
    groups.append(
        Group(
            "square blocks, 16K",
            tuple(Entry(f"block {size}", _as(half, Blocks(size, size, 0.1))) for size in (32, 16)),
        )
    )
    groups.append(fused_global("global tokens, 16K", 16384, 2048))
    groups.append(
        Group(
            "list building, 16K", (Entry("from_mask", _as(half, Blocks(128, 128, 0.25)), "list"),)
        )
    )
    chosen = Case(BlockTopK(128, 0.1), 131072, heads=32, causal=True)
    groups.append(
        Group(
            "block selection, 128K",
            (
                Entry("select", chosen, "select"),
                Entry("block top-k", chosen),
                Entry("dense", _as(chosen, Full())),
            ),
        )
    )
    causal = Case(Full(), 16384, causal=True)
    exact = (Entry(f"k {k}", _as(causal, TopK(k))) for k in TOP_K)
    groups.append(Group("top-k, 16K", (*exact, Entry("dense", causal))))
    groups.append(_blocks("break-even, 16K", half, BREAK_EVEN, peers=False))
    return groups


def decode() -> list[Group]:
    """List decode: one query row, the bytes of keys and values over time."""
    groups = []
    for batch, length in DECODE:
        entries = beside(decode_case(batch, length), "cudnn", "flash", "fa3", "fa4")
        name = f"decode {size_name(batch, length)}"
        groups.append(Group(name, entries, flops_ceiling=False, methods=BOTH))
    for heads, kv_heads, length in FEW_KEY_HEADS:
        case = replace(decode_case(1, length), heads=heads, kv_heads=kv_heads)
        entries = beside(case, "cudnn", "flash", "fa3", "fa4")
        name = f"decode, {heads}/{kv_heads} heads, {length // 1024}K"
        groups.append(Group(name, entries, flops_ceiling=False, methods=BOTH))
    few = decode_case(64, 32768)
    groups.append(
        Group(
            "sparse decode batch 64, 32K",
            (
                Entry("dense", few),
                Entry("band", _as(few, Band(4095))),
                Entry("blocks", _as(few, Blocks(128, 128, 0.125, per="one"))),
            ),
            flops_ceiling=False,
        )
    )
    groups.append(
        Group(
            "decode batch 1, window 4096",
            (Entry("ours", _as(decode_case(1, 131072), Band(4095))),),
            flops_ceiling=False,
        )
    )
    return groups


def portable() -> list[Group]:
    """List the engine for every GPU beside FlashAttention-2, and beside its own dense."""
    groups = []
    via = "ours/portable"
    for causal in (False, True):
        case = Case(Full(), 16384, causal=causal)
        # The wider band has a quarter of all pairs: below that density no floor is asked for.
        bands, blocks = (Band(2047), Band(4799)), (Blocks(128, 128, 0.5), Blocks(128, 128, 0.25))
        sparse: Sequence[Spec] = bands if causal else blocks
        groups.append(
            Group(
                f"portable 16K, {'causal' if causal else 'full'}",
                (
                    Entry("ours", case, via),
                    Entry("flash", case, "flash"),
                    *(Entry(spec.label, _as(case, spec), via) for spec in sparse),
                ),
            )
        )
    return groups


def cpu() -> list[Group]:
    """List the CPU engine beside torch's SDPA: dense, then every variant beside our own dense."""
    shape: dict[str, Any] = {"heads": 4, "head_dim": 64}
    groups = []
    for dtype in ("float32", "bfloat16"):
        case = Case(Full(), 4096, dtype=dtype, **shape)
        groups.append(
            Group(f"cpu dense, {dtype}", (Entry("ours", case), Entry("sdpa", case, "sdpa")))
        )
    full = Case(Full(), 4096, dtype="float32", **shape)
    causal = _as(full, Full(), causal=True)
    entries = [
        Entry("dense", full),
        Entry("sdpa", full, "sdpa"),
        Entry("causal", causal),
        Entry("sdpa causal", causal, "sdpa"),
        Entry("naive", full, "naive"),
    ]
    for name, spec, cut in (
        ("band", Band(1023), True),
        ("band 256", Band(255), True),
        ("dilated", Dilated(511, 511, 2), False),
        ("strided", Strided(512, 64), True),
        ("blocks", Blocks(128, 128, 0.25), False),
        ("blocks 16", Blocks(16, 16, 0.25), False),
        ("block top-k", BlockTopK(128, 0.25), False),
        ("top-k", TopK(256), False),
        ("top-k 64", TopK(64), False),
        ("top-k 512", TopK(512), False),
    ):
        entries.append(Entry(name, _as(full, spec, causal=cut)))
    entries.append(Entry("sdpa with the band's mask", _as(full, Band(1023), causal=True), "sdpa"))
    entries.append(Entry("flex band", _as(full, Band(1023), causal=True), "flex"))
    groups.append(Group("cpu variants, float32", tuple(entries)))
    return groups + cpu_cliffs()


def quick() -> list[Group]:
    """List every variant once, small: shows in seconds that the harness and the package run."""
    full = Case(Full(), 512, heads=2, head_dim=64, dtype="float32")
    specs: Sequence[tuple[Spec, bool]] = (
        (Full(), True),
        (Band(127), True),
        (Dilated(31, 31, 4), False),
        (Strided(64, 32), True),
        (Blocks(64, 64, 0.25), False),
        (TopK(32), False),
        (BlockTopK(64, 0.25), False),
    )
    entries = [Entry("dense", full), Entry("sdpa", full, "sdpa"), Entry("naive", full, "naive")]
    entries += [
        Entry(spec.label + " causal" * cut, _as(full, spec, causal=cut)) for spec, cut in specs
    ]
    small: dict[str, Any] = {"heads": 2, "head_dim": 64, "dtype": "float32"}
    return [Group("quick", tuple(entries)), fused_global("global tokens", 512, 128, **small)]


SUITES = {
    "quick": quick,
    "cpu": cpu,
    "dense": dense,
    "sparse": sparse,
    "decode": decode,
    "portable": portable,
    "cliffs": cliffs,
    "serving": serving,
    "selection": selection,
    "sweep": sweep,
}
NAMES = (*SUITES, "report", "random")
# How suites of one run share its time: about the seconds that each takes on an H200.
WEIGHTS = {
    "quick": 5,
    "cpu": 60,
    "decode": 8,
    "portable": 4,
    "sparse": 45,
    "dense": 35,
    "cliffs": 40,
    "serving": 10,
    "selection": 10,
    "sweep": 75,
    "report": 75,
    "random": 120,
}
NEED_CUDA = ("dense", "sparse", "decode", "portable", "cliffs", "serving", "selection", "sweep")


def groups_of(suite: str, device_type: str, seed: int = 0, calls: int = 100) -> list[Group]:
    """Return the groups of a suite; the report's sizes and random calls depend on the device."""
    if suite == "random":
        return draws(device_type, seed, calls)
    if suite == "report":
        return report(GPU if device_type == "cuda" else CPU)
    return SUITES[suite]()


def _as(case: Case, spec: Spec, **changes: Any) -> Case:
    return replace(case, spec=spec, **changes)


def _blocks(name: str, full: Case, densities: Sequence[float], peers: bool = True) -> Group:
    entries = [Entry("dense", full)]
    for density in densities:
        case = _as(full, Blocks(128, 128, density))
        entries.append(Entry(f"density {density:.2f}", case))
        if peers:
            entries.append(Entry(f"flex {density:.2f}", case, "flex"))
            entries.append(Entry(f"fa4 {density:.2f}", case, "fa4"))
    return Group(name, tuple(entries))

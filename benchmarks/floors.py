"""The floors, as data: what must hold in a run, and what is aimed at."""

from __future__ import annotations

from . import landscape, selection, suites
from .bars import BEST_PEER, Bar
from .cliffs import (
    FEW_QUERIES,
    FOUR_QUERIES,
    ON_CPU,
    ONE_QUERY,
    band_name,
    few_name,
    one_name,
)
from .serving import DECODE, PAGE_SIZES, size_name
from .suites import TOP_K, dense_name


def _dense_bars() -> list[Bar]:
    table = {  # (head dim, length in K): floors full and causal, goals full and causal
        (128, 16): (1.08, 1.15, 1.15, 1.22),
        (128, 4): (1.07, 1.15, 1.14, 1.22),
        (128, 1): (1.05, 1.13, 1.12, 1.20),
        (64, 16): (1.20, 1.20, 1.22, 1.25),
        (64, 4): (1.14, 1.12, 1.16, 1.16),
        (64, 1): (1.06, 1.04, 1.15, 1.12),
        (256, 16): (1.12, 1.20, 1.20, 1.30),
        (192, 16): (1.16, 1.25, 1.26, 1.36),
        (96, 16): (1.28, 1.36, 1.35, 1.45),
    }
    flash_attn_3 = {
        (128, 16): (1.00, 1.00, 1.03, 1.03),
        (128, 4): (1.00, 1.00, 1.05, 1.05),
        (128, 1): (1.00, 1.00, 1.08, 1.08),
        (64, 16): (1.05, 1.05, 1.12, 1.15),
        (64, 4): (1.03, 1.00, 1.10, 1.10),
    }
    bars = []
    for peer, method, rows in (
        ("cudnn", "", table),
        ("fa3", "", flash_attn_3),
        ("fa3", "burst", flash_attn_3),
        ("fa4", "burst", dict.fromkeys(table, (1.00, 1.00, 1.08, 1.08))),
    ):
        for (dim, kilo), (full, causal, goal_full, goal_causal) in rows.items():
            for cut, floor, goal in ((False, full, goal_full), (True, causal, goal_causal)):
                name = dense_name(dim, kilo * 1024, cut)
                bars.append(Bar(name, "ours", "speed", floor, goal, peer, method=method))
    return bars


def _cliff_bars() -> list[Bar]:
    best = {  # group: floor and goal against the best peer, in bursts
        "head dim 32 beside peers": (0.95, 1.05),
        "head dim 72 beside peers": (1.00, 1.15),
        "head dim 80 beside peers": (0.97, 1.08),
        "head dim 112 beside peers": (1.05, 1.20),
        "197 tokens": (1.00, 1.10),
        **{few_name(*shape[:3]): (1.00, 1.15) for shape in FEW_QUERIES},
        few_name(64, 65536, 32): (1.00, 1.30),
        few_name(128, 65536, 32): (1.00, 1.30),
        "softcap": (1.00, 1.08),
        "additive mask": (1.00, 1.40),
        band_name(128, 4, 32768): (0.95, 1.05),
        band_name(1024, 4, 8192): (0.97, 1.05),
    }
    one_query = dict(zip(ONE_QUERY, ((8, 6), (10, 8)), strict=True))
    return [
        *(
            Bar(name, "ours", "speed", floor, goal, BEST_PEER, method="burst")
            for name, (floor, goal) in best.items()
        ),
        Bar("softcap", "ours", "speed", 0.65, 0.80, "plain"),
        Bar("padding mask", "ours", "us", 450, 300, at_most=True, device="H200"),
        Bar("Longformer", "scattered", "cost", 1.5, 1.2, "first 4", at_most=True),
        *(
            Bar(one_name(keys), "ours", "us", floor, goal, at_most=True, device="H200")
            for keys, (floor, goal) in one_query.items()
        ),
        Bar("host cost, fused", "ours", "us", 20, 15, at_most=True, device="H200"),
        Bar("host cost, band", "ours", "us", 22, 15, at_most=True, device="H200"),
    ]


def _serving_bars() -> list[Bar]:
    pages = dict(zip(PAGE_SIZES, ((0.90, 0.95), (0.95, 0.98), (0.97, 1.0)), strict=True))
    sizes = [size_name(*shape) for shape in DECODE]
    bars = []
    for size in sizes:
        name = f"paged decode {size}"
        for page, (floor, goal) in pages.items():
            bars.append(Bar(name, f"pages of {page}", "speed", floor, goal, "contiguous"))
        bars.append(Bar(name, "joined", "speed", 0.95, 1.0, "contiguous"))
        bars.append(Bar(name, "joined pages of 16", "speed", 0.95, 1.0, "pages of 16"))
    for size in sizes[1:]:
        bars.append(Bar(f"8-bit decode {size}", "8 bits", "speed", 1.6, 1.85, "16 bits"))
    for size, floor, goal in zip(sizes[:2], (4, 3), (7, 5), strict=True):
        bars.append(Bar(f"sketch decode {size}", "sketch", "speed", floor, goal, "dense"))
    return [
        *bars,
        Bar("8-bit prefill", "8 bits", "speed", 0.90, 1.0, "16 bits"),
        Bar("ragged decode", "ragged", "byte rate", 0.85, 0.95, "equal"),
        Bar("block lists over pages", "lists", "byte rate", 0.85, 0.95, "dense"),
        Bar("varlen prefill", "packed", "rate", 0.92, 0.97, "dense"),
        *(
            Bar("chunked prefill", f"pages of {page}", "speed", 0.95, 1.0, "contiguous")
            for page in PAGE_SIZES
        ),
    ]


def _selection_bars() -> list[Bar]:
    shares = {
        "mean": (0.02, 0.01),
        "minmax": (0.02, 0.01),
        "vertical_slash": (0.02, 0.01),
        "antidiagonal 16": (0.04, 0.03),
        "antidiagonal 8": (0.08, 0.06),
        "default": (0.03, 0.015),
        "compare": (3, 2),
    }
    name = "selection, 128K"
    return [
        *(
            Bar(name, selector, "cost", floor, goal, "dense", at_most=True)
            for selector, (floor, goal) in shares.items()
        ),
        Bar(name, "call by mean", "speed", 8, 9, "dense"),
        Bar(name, "call by default", "speed", 4, 5, "dense"),
        *(
            Bar("uneven lists, 32K", f"uneven {block}", "rate", 0.93, 1.0, f"even {block}")
            for block in selection.UNEVEN
        ),
    ]


def _sweep_bars() -> list[Bar]:
    cliffs = {bar.group for bar in _cliff_bars() if bar.against == BEST_PEER}
    judged_there = {group.entries[0].case for group in suites.cliffs() if group.name in cliffs}
    bars = []
    for group in landscape.sweep():
        case = group.entries[0].case
        if case in judged_there:
            continue
        if case.queries is None:
            floor, goal = (0.97, 1.05) if case.head_dim >= 16 else (0.95, 1.0)
        else:
            few = 17 <= case.queries <= 512 and case.length >= 4096
            floor, goal = (1.0, 1.15) if few else (0.95, 1.0)
        bars.append(Bar(group.name, "ours", "speed", floor, goal, BEST_PEER))
    return bars


BARS = (
    *_dense_bars(),
    *_cliff_bars(),
    *_serving_bars(),
    *_selection_bars(),
    *_sweep_bars(),
    Bar("band 16K", "ours", "speed", 1.75, 1.9, "flex"),
    Bar("band 16K", "ours", "speed", 4.2, 4.7, "cudnn full causal"),
    Bar("band 32K", "ours", "speed", 1.80, 1.9, "flex"),
    Bar("band 128K", "ours", "speed", 1.80, 1.9, "flex"),
    *(
        Bar(f"band {length}", "ours", "speed", 1.0, 1.08, peer, method="burst")
        for length in ("16K", "32K", "128K")
        for peer in ("fa3", "fa4")
    ),
    Bar("dilated 32K", "ours", "pair cost", 1.03, 1.00, "band", at_most=True),
    Bar("block 128, 16K", "density 0.50", "rate", 0.96, 0.98, "dense"),
    Bar("block 128, 16K", "density 0.25", "rate", 0.94, 0.97, "dense"),
    Bar("block 128, 16K", "density 0.10", "rate", 0.88, 0.94, "dense"),
    Bar("block 128, 64K", "density 0.10", "rate", 0.96, 1.00, "dense"),
    Bar("block 128, 64K", "density 0.05", "rate", 0.93, 0.97, "dense"),
    *(
        Bar(f"block 128, {length}", f"density {d}", "speed", 1.0, 1.08, f"fa4 {d}")
        for length, d in (("16K", "0.50"), ("16K", "0.25"), ("16K", "0.10"), ("64K", "0.05"))
    ),
    Bar("block 128x64, 16K", "density 0.25", "TFLOP/s", 600, 660, device="H200"),
    Bar("block 128x64, 16K", "density 0.10", "TFLOP/s", 580, 630, device="H200"),
    Bar("block 64, 16K", "density 0.25", "TFLOP/s", 530, 600, device="H200"),
    Bar("key blocks, 16K", "keys 32", "pair cost", 1.05, 1.0, "keys 64", at_most=True),
    Bar("key blocks, 16K", "keys 16", "pair cost", 1.2, 1.05, "keys 64", at_most=True),
    Bar("square blocks, 16K", "block 32", "L2 share", 0.75, 0.90),
    Bar("square blocks, 16K", "block 16", "L2 share", 1.0, 1.2),
    Bar("global tokens, 16K", "fused", "tile cost", 1.07, 1.00, "band", at_most=True),
    Bar("list building, 16K", "from_mask", "us", 15, 5, at_most=True),
    Bar("block selection, 128K", "select", "cost", 0.013, 0.008, "dense", at_most=True),
    Bar("block selection, 128K", "select", "cost", 0.12, 0.08, "block top-k", at_most=True),
    *(Bar("top-k, 16K", f"k {k}", "cost", 2.0, 1.6, "dense", at_most=True) for k in TOP_K),
    Bar("break-even, 16K", "dense", "break-even", 0.05, 0.02, at_most=True),
    Bar("decode batch 1, 128K", "ours", "TB/s", 4.05, 4.4, device="H200"),
    Bar("decode batch 16, 32K", "ours", "TB/s", 4.35, 4.6, device="H200"),
    Bar("decode batch 64, 8K", "ours", "TB/s", 4.33, 4.6, device="H200"),
    *(
        Bar(f"decode {size}", "ours", "speed", 1.0, 1.03, "cudnn", method="burst")
        for size in (size_name(*shape) for shape in DECODE)
    ),
    Bar("sparse decode batch 64, 32K", "band", "byte rate", 0.94, 1.0, "dense"),
    Bar("sparse decode batch 64, 32K", "blocks", "byte rate", 0.94, 1.0, "dense"),
    Bar("portable 16K, full", "ours", "speed", 0.95, 1.10, "flash"),
    Bar("portable 16K, causal", "ours", "speed", 0.95, 1.10, "flash"),
    Bar("portable 16K, causal", "band (4799, 0)", "rate", 0.93, 0.97, "ours"),
    Bar("portable 16K, full", "blocks 128, density 0.50", "rate", 0.93, 0.97, "ours"),
    Bar("portable 16K, full", "blocks 128, density 0.25", "rate", 0.93, 0.97, "ours"),
    Bar("cpu dense, float32", "ours", "speed", 1.0, 1.15, "sdpa"),
    Bar("cpu dense, bfloat16", "ours", "speed", 1.0, 1.3, "sdpa"),
    *(Bar(f"cpu, {name}", "ours", "speed", 1.05, 1.1, "sdpa") for name in ON_CPU),
    Bar(f"cpu, {FOUR_QUERIES}", "ours", "speed", 1.0, 1.05, "sdpa"),
    Bar("cpu variants, float32", "band", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "dilated", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "blocks", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "band 256", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "blocks 16", "rate", 0.75, 0.9, "dense"),
    Bar("cpu variants, float32", "top-k 64", "speed", 1.5, 1.5, "sdpa"),
    Bar("cpu variants, float32", "top-k 512", "speed", 1.25, 1.25, "sdpa"),
)

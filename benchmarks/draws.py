"""Random calls: shapes, layouts, patterns and options that users bring and no table has.

A call depends on its seed, its number and the kind of device alone, so that it can be drawn again
by itself. Plain calls stand beside peers, all others beside our own dense call without options;
findings.py reads their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .cases import OPTIONS, Case, Entry, Group
from .cliffs import beside
from .masks import (
    Band,
    Blocks,
    BlockTopK,
    Dilated,
    Full,
    Scattered,
    Spec,
    Strided,
    TopK,
)

RANDOM = "random, "  # a group's sweep: this and the call's kind
PLAIN = "plain"
OPTION = "option"  # no pattern, and an option

KV_HEADS = (1, 2, 4, 8, 8, 8, 12, 16, 20, 32)
SHARED_BY = (1, 1, 2, 4, 4, 5, 7, 8, 16)  # query heads of a key head
MOST_HEADS = 128
HEAD_DIMS = (32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 128, 192, 256)
QUERIES = (
    *(1, 1, 1, 2, 4, 5, 8, 12, 16, 17, 30, 64, 100, 197, 256, 400, 512, 577),
    *(1024, 1500, 2048, 4096, 8192),
)
KEYS = (64, 128, 200, 512, 1000, 1024, 2048, 4096, 8192, 16384, 40000)
BATCHES = (1, 1, 1, 2, 4, 8, 16, 32, 64)
WINDOWS = (16, 64, 100, 128, 256, 500, 512, 1024, 2000, 4096)
FEW = 16  # queries, which block lists may serve one by one


@dataclass(frozen=True)
class Limits:
    """What one call may take, and who stands beside a plain one."""

    products: float  # batch x heads x queries x keys x head dim
    numbers: float  # of the queries, of the keys, and of a mask
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]


LIMITS = {
    "cuda": Limits(2e12, 5e8, ("bfloat16", "float16"), ("cudnn", "flash", "fa3")),
    "cpu": Limits(1e9, 2e7, ("float32", "float32", "bfloat16", "float16"), ("sdpa",)),
}

# By kind: the spec that a window and a case without one get.
PATTERNS: dict[str, Callable[[Random, int, Case], Spec]] = {
    "band": lambda draw, window, case: Band(window - 1, draw.choice((0, window))),
    "sinks": lambda draw, window, case: Band(window - 1, sinks=draw.choice((1, 4, 17, 64, 128))),
    "global": lambda draw, window, case: Band(
        window, window, global_tokens=draw.choice((1, 4, 64, 200))
    ),
    "scattered": lambda draw, window, case: Scattered(window, _tokens(draw, case)),
    "dilated": lambda draw, window, case: Dilated(
        min(window, 1024), draw.choice((0, min(window, 1024))), draw.choice((2, 3, 4, 8, 16))
    ),
    "strided": lambda draw, window, case: Strided(window, draw.choice((16, 32, 64, 128))),
    "block list": lambda draw, window, case: _blocks(draw, case),
    "block top-k": lambda draw, window, case: BlockTopK(
        draw.choice((64, 128)),
        draw.choice((0.05, 0.1, 0.3)),
        draw.choice(("mean", "minmax", "mixed")),
    ),
    "top-k": lambda draw, window, case: TopK(draw.choice((32, 128, 512, 2048))),
}
KINDS = (*PATTERNS, "band", "block list", OPTION, OPTION, OPTION)


def draws(device_type: str, seed: int, number: int) -> list[Group]:
    """Return the first calls of a seed, every other one plain."""
    limits = LIMITS[device_type]
    return [_group(limits, seed, index) for index in range(number)]


def _group(limits: Limits, seed: int, index: int) -> Group:
    draw = Random(f"{seed}, {index}")
    case, kind = _shape(draw, limits), PLAIN
    if index % 2 == 0:
        case = replace(case, causal=case.queries is None and draw.random() < 0.5)
        entries = beside(case, *limits.peers)
    else:
        kind, case = _sparse(draw, limits, case)
        dense = replace(case, spec=Full(), option="", softcap=0.0)
        entries = (*beside(case), Entry("dense", dense))
    name = f"call {index} of seed {seed}"
    return Group(name, entries, RANDOM + kind, index, methods=("burst",))


def _shape(draw: Random, limits: Limits) -> Case:
    """Return a plain case within the limits."""
    while True:
        kv_heads, batch, dim = (draw.choice(list) for list in (KV_HEADS, BATCHES, HEAD_DIMS))
        heads = kv_heads * draw.choice(SHARED_BY)
        rows = draw.choice(QUERIES)
        square = rows > FEW and draw.random() < 0.5
        keys = rows if square else draw.choice(KEYS)
        within = (
            heads <= MOST_HEADS
            and rows <= keys
            and batch * heads * rows * keys * dim <= limits.products
            and batch * dim * max(heads * rows, kv_heads * keys) <= limits.numbers
        )
        if within:
            return Case(
                Full(),
                keys,
                queries=None if square else rows,
                batch=batch,
                heads=heads,
                kv_heads=None if heads == kv_heads else kv_heads,
                head_dim=dim,
                dtype=draw.choice(limits.dtypes),
                layout=draw.choice(("bhsd", "bshd", "qkv") if square else ("bhsd", "bshd")),
            )


def _sparse(draw: Random, limits: Limits, case: Case) -> tuple[str, Case]:
    """Return the case with a pattern, an option or both, and its kind."""
    kind = draw.choice(KINDS)
    window = draw.choice([window for window in WINDOWS if window < case.length])
    spec = case.spec if kind == OPTION else PATTERNS[kind](draw, window, case)
    case = replace(case, spec=spec, causal=draw.random() < 0.6)
    if kind != OPTION and draw.random() < 0.6:
        return kind, case
    options = [*OPTIONS, "softcap"]
    if case.heads * case.rows * case.length > limits.numbers:
        options.remove("head bias")
    if isinstance(spec, Scattered):
        options.remove("left padding")  # token numbers name keys, wherever a text begins
    option = draw.choice(options)
    change: dict[str, Any] = {"softcap": 30.0} if option == "softcap" else {"option": option}
    return kind, replace(case, **change)


def _blocks(draw: Random, case: Case) -> Blocks:
    heights = (1, 16) if case.rows <= FEW else (16, 32, 64, 64, 128, 128, 128, 256)
    block_q, block_kv = draw.choice(heights), draw.choice((16, 32, 64, 128, 128))
    shared = ("key", "one")  # lists of one query have no others
    per = draw.choice(shared if block_q == 1 else ("query", *shared))
    return Blocks(block_q, block_kv, draw.choice((0.02, 0.05, 0.1, 0.3, 0.6)), per)


def _tokens(draw: Random, case: Case) -> tuple[int, ...]:
    number = min(case.length, draw.choice((1, 4, 16, 64)))
    return tuple(sorted(draw.sample(range(case.length), number)))

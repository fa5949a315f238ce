"""What servers ask for: pages, ragged batches, 8-bit caches, sketches, chunks of a prompt.

An entry's ``via`` says how the same keys lie in memory (storage.py); the groups of plain decoding
are in the suite ``decode``.
"""

from __future__ import annotations

from dataclasses import replace

from .cases import Case, Entry, Group
from .masks import Blocks, Full, Sketched

DECODE = ((1, 131072), (16, 32768), (64, 8192))
PAGE_SIZES = (16, 64, 256)
FEW_KEYS = 16  # blocks of 128 that each key head of a sequence reads
RAGGED = tuple(round(64 * 512 ** (i / 63)) for i in range(64))  # 64 to 32K
PROMPTS = tuple(round(128 * 128 ** (i / 31)) for i in range(32))  # 128 to 16K
METHOD = ("burst",)


def serving() -> list[Group]:
    """List everything that reads a cache which is not one contiguous tensor of 16-bit keys."""
    groups = [_paged(batch, length) for batch, length in DECODE]
    groups += [_coarse(batch, length) for batch, length in DECODE[1:]]
    groups += [_sketched(batch, length) for batch, length in DECODE[:2]]
    return [*groups, _ragged(), _lists(), _prompts(), _chunk(), _coarse_chunk()]


def decode_case(batch: int, length: int) -> Case:
    """Return one new token for each sequence on its cache."""
    return Case(Full(), length, queries=1, batch=batch, heads=32, kv_heads=8)


def size_name(batch: int, length: int) -> str:
    """Return the size of a decoding group in words."""
    return f"batch {batch}, {length // 1024}K"


def _decode_group(name: str, *entries: Entry) -> Group:
    return Group(name, entries, flops_ceiling=False, methods=METHOD)


def _paged(batch: int, length: int) -> Group:
    case = decode_case(batch, length)
    return _decode_group(
        f"paged decode {size_name(batch, length)}",
        Entry("contiguous", case),
        *(Entry(f"pages of {size}", case, f"paged/{size}") for size in PAGE_SIZES),
        Entry("joined", case, "joined"),
        Entry("joined pages of 16", case, "joined pages/16"),
    )


def _coarse(batch: int, length: int) -> Group:
    case = replace(decode_case(batch, length), coarse=True)
    return _decode_group(
        f"8-bit decode {size_name(batch, length)}",
        Entry("16 bits", case),
        Entry("8 bits", case, "8 bits"),
        Entry("8 bits, pages of 16", case, "8 bits/16"),
    )


def _sketched(batch: int, length: int) -> Group:
    case = decode_case(batch, length)
    return _decode_group(
        f"sketch decode {size_name(batch, length)}",
        Entry("sketch", replace(case, spec=Sketched())),
        Entry("dense", case),
    )


def _ragged() -> Group:
    equal = decode_case(len(RAGGED), round(sum(RAGGED) / len(RAGGED) / 64) * 64)
    ragged = replace(equal, length=max(RAGGED), lengths=RAGGED)
    return _decode_group(
        "ragged decode",
        Entry("equal", equal, "paged/64"),
        Entry("ragged", ragged, "paged/64"),
        Entry("ragged, packed", ragged, "packed"),
    )


def _lists() -> Group:
    dense = decode_case(64, 32768)
    lists = replace(dense, spec=Blocks(1, 128, FEW_KEYS * 128 / dense.length, per="key"))
    return _decode_group(
        "block lists over pages",
        Entry("dense", dense, "paged/128"),
        Entry("lists", lists, "paged/128"),
        Entry("lists, contiguous", lists),
    )


def _prompts() -> Group:
    dense = Case(Full(), 16384, heads=32, kv_heads=8, causal=True)
    ragged = replace(dense, batch=len(PROMPTS), lengths=PROMPTS)
    return Group(
        "varlen prefill",
        (Entry("dense", dense), Entry("packed", ragged, "packed")),
        methods=METHOD,
    )


def _chunk() -> Group:
    case = Case(Full(), 65536, queries=2048, heads=32, kv_heads=8, causal=True)
    pages = (Entry(f"pages of {size}", case, f"paged/{size}") for size in PAGE_SIZES)
    return Group("chunked prefill", (Entry("contiguous", case), *pages), methods=METHOD)


def _coarse_chunk() -> Group:
    case = Case(Full(), 65536, queries=2048, heads=32, kv_heads=8, causal=True, coarse=True)
    return Group(
        "8-bit prefill",
        (Entry("16 bits", case), Entry("8 bits", case, "8 bits")),
        methods=METHOD,
    )

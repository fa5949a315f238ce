"""What users bring that is off the tuned table: other head dims, few queries, masks, short calls.

Each group holds the package beside every peer that serves the case. Their floors stand in
floors.py.
"""

from __future__ import annotations

from dataclasses import replace

from .cases import Case, Entry, Group
from .masks import Band, Full, Scattered, Spec

BOTH = ("single", "burst")
BURST = ("burst",)
FLASH = ("cudnn", "flash", "fa3", "fa4")

# (head dim, heads, length, batch, causal)
HEAD_DIMS = (
    (32, 32, 16384, 1, False),
    (72, 16, 577, 32, False),
    (80, 16, 8192, 1, True),
    (112, 16, 8192, 1, True),
)
# (queries, keys, heads, key heads) of one sequence
FEW_QUERIES = (
    (64, 65536, 32, 8),
    (128, 65536, 32, 8),
    (17, 4096, 32, 8),
    (17, 131072, 32, 8),
    (17, 4096, 8, 8),
    (32, 16384, 8, 8),
    (128, 131072, 8, 8),
    (256, 32768, 32, 8),
    (512, 4096, 8, 8),
    (512, 131072, 32, 8),
)
ONE_QUERY = (1024, 4096)
_SMALL = Case(Full(), 2048, heads=4, head_dim=64, dtype="float32")
_CACHE = replace(_SMALL, length=8192, heads=8, kv_heads=2)
ON_CPU = {
    **{
        f"head dim {dim}": replace(_SMALL, head_dim=dim, causal=True)
        for dim in (32, 48, 80, 96, 128, 192, 256)
    },
    "padding mask": replace(_SMALL, batch=2, length=1024, option="padding"),
    "additive mask": replace(_SMALL, option="bias"),
    "float16": replace(_SMALL, dtype="float16", causal=True),
    **{f"{n} queries, 8K keys": replace(_CACHE, queries=n) for n in (16, 64, 256)},
}
FOUR_QUERIES = "4 queries, 8K keys"
# (window, sinks, length)
NARROW = ((128, 4, 32768), (1024, 4, 8192))


def cliffs() -> list[Group]:
    """List every row of the floors off the table."""
    groups = []
    for dim, heads, length, batch, causal in HEAD_DIMS:
        case = Case(Full(), length, batch=batch, heads=heads, head_dim=dim, causal=causal)
        groups.append(Group(f"head dim {dim} beside peers", beside(case, *FLASH), methods=BOTH))
    vision = Case(Full(), 197, batch=64, heads=12, head_dim=64)
    groups.append(Group("197 tokens", beside(vision, *FLASH), methods=BOTH))
    for queries, keys, heads, kv_heads in FEW_QUERIES:
        shared = None if kv_heads == heads else kv_heads
        case = Case(Full(), keys, queries=queries, heads=heads, kv_heads=shared)
        name = few_name(queries, keys, heads)
        groups.append(Group(name, beside(case, *FLASH), methods=BURST))
    for keys in ONE_QUERY:
        case = Case(Full(), keys, queries=1, heads=32, kv_heads=8)
        group = Group(one_name(keys), beside(case, *FLASH), flops_ceiling=False, methods=BURST)
        groups.append(group)
    groups += _scores() + [_narrow(*shape) for shape in NARROW] + [_longformer()]
    for name, spec in (("fused", Full()), ("band", Band(31))):
        groups.append(_host(name, spec))
    return groups


def cpu_cliffs() -> list[Group]:
    """List what lies off the CPU's table, beside torch's SDPA."""
    cases = ON_CPU | {FOUR_QUERIES: replace(_CACHE, queries=4)}
    return [Group(f"cpu, {name}", beside(case, "sdpa")) for name, case in cases.items()]


def beside(case: Case, *peers: str) -> tuple[Entry, ...]:
    """Return the package's entry and those of its peers."""
    return (Entry("ours", case), *(Entry(via, case, via) for via in peers))


def few_name(queries: int, keys: int, heads: int) -> str:
    """Return the group's name for a number of queries on many keys."""
    return f"{queries} queries, {keys // 1024}K keys, {heads} heads"


def one_name(keys: int) -> str:
    """Return the group's name for one query."""
    return f"one query, {keys // 1024}K keys"


def band_name(window: int, sinks: int, length: int) -> str:
    """Return the group's name for a narrow band."""
    return f"band {window} + {sinks} sinks, {length // 1024}K"


def _scores() -> list[Group]:
    """List what changes scores: softcap, an added mask, a padding mask given as a tensor."""
    plain = Case(Full(), 8192, kv_heads=8, causal=True)
    capped = replace(plain, softcap=50.0)
    added = Case(Full(), 8192, option="bias")
    padded = Case(Full(), 2048, batch=8, head_dim=64, option="padding")
    return [
        Group(
            "softcap",
            (*beside(capped, "flex", "tuned flex", "fa3", "fa4"), Entry("plain", plain)),
            methods=BURST,
        ),
        Group("additive mask", beside(added, "cudnn"), methods=BURST),
        Group(
            "padding mask",
            (*beside(padded, "cudnn", "flex"), Entry("bounds", replace(padded, option="bounds"))),
            methods=BURST,
        ),
    ]


def _narrow(window: int, sinks: int, length: int) -> Group:
    case = Case(Band(window - 1, 0, sinks=sinks), length, causal=True)
    plain = replace(case, spec=Band(window - 1))
    entries = [Entry("ours", case), Entry("flex", case, "flex")]
    entries += [Entry(via, plain, via) for via in ("fa3", "fa4")]  # they have no sinks
    entries.append(Entry("no sinks", plain))
    return Group(band_name(window, sinks, length), tuple(entries), methods=BOTH)


def _longformer() -> Group:
    shape = Case(Full(), 4096, batch=8, heads=12, head_dim=64)
    scattered = replace(shape, spec=Scattered(256, (100, 1365, 2055, 4046)))
    first = replace(shape, spec=Band(256, 256, global_tokens=4))
    return Group(
        "Longformer",
        (
            Entry("scattered", scattered),
            Entry("first 4", first),
            Entry("flex", scattered, "flex"),
        ),
        methods=BURST,
    )


def _host(name: str, spec: Spec) -> Group:
    """Hold calls that compute next to nothing: what is left is the host's cost."""
    case = Case(spec, 64, heads=8, head_dim=64, causal=True)
    plain = replace(case, spec=Full())
    return Group(
        f"host cost, {name}",
        (Entry("ours", case, "function"), Entry("sdpa", plain, "sdpa")),
        methods=("host",),
    )

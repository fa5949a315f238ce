"""Ragged batches for the tests of packed and paged sequences."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from engines import leave_out

import sparse_attn as sa


@dataclass(frozen=True)
class Ragged:
    """Lengths of the queries and keys of each sequence, and the sizes that they share."""

    rows: tuple[int, ...] = (3, 0, 70, 1, 33, 5)
    keys: tuple[int, ...] = (5, 9, 150, 64, 0, 16)
    Hq: int = 4
    Hkv: int = 2
    D: int = 64
    Dv: int | None = None  # of the values; D by default

    @property
    def batch(self):
        return len(self.rows)

    def bound(self, slack):
        """A bound of the queries, above them but where the decode engine would not take it."""
        most = max(self.rows)
        return most + slack if most > 16 else most

    def starts(self, device, lengths):
        return torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def sequences(self, device, dtype):
        """Query, key and value (1, heads, length, D) of each sequence."""
        made = []
        for rows, keys in zip(self.rows, self.keys, strict=True):
            q = torch.randn(1, self.Hq, rows, self.D, device=device).to(dtype)
            k, v = (
                torch.randn(1, self.Hkv, keys, columns, device=device).to(dtype)
                for columns in (self.D, self.Dv or self.D)
            )
            made.append((q, k, v))
        return made


#: The batch of most tests, and one with as few queries as the decode engine takes.
RAGGED = Ragged()
FEW_ROWS = Ragged((3, 0, 16, 1, 9, 5), (5, 9, 150, 2100, 0, 16))
#: One as short as the small engine takes.
SHORT = Ragged((3, 0, 70, 1, 33, 5), (5, 9, 78, 64, 0, 16))


def ragged_for(engine):
    return {"decode": FEW_ROWS, "small": SHORT}.get(engine, RAGGED)


class Serving:
    """Calls a function with the engine under test; what that does not serve is skipped."""

    def __init__(self, device, engine):
        self.device, self.engine = device, engine

    def __call__(self, function, *args, **common):
        try:
            return function(*args, engine=self.engine, **common)
        except NotImplementedError as error:
            if self.device == "cpu":
                raise
            leave_out(error)


def watched(names, *chosen):
    """Parameters of a test, of which the sanitizers run the chosen ones."""
    marks = {True: [pytest.mark.sanitizer], False: []}
    return [pytest.param(name, marks=marks[name in chosen], id=str(name)) for name in names]


def malformed(device, sentence):
    """Wrong contents: refused where the host sees them; a GPU runs, and reads nothing outside."""
    if device == "cpu":
        return pytest.raises(ValueError, match=rf"^sparse_attn(::|\.)\w+: expected {sentence}")
    return nullcontext()


def packed(parts, gap=0):
    """Sequences (1, heads, length, D) as (T, heads, D), with `gap` rows of NaN past the last."""
    heads, dim = parts[0].shape[1], parts[0].shape[3]
    tail = parts[0].new_full((gap, heads, dim), torch.nan)
    return torch.cat([*(part[0].transpose(0, 1) for part in parts), tail])


def split(out, lengths):
    """Packed rows (T, heads, D) as sequences (1, heads, length, D)."""
    return [part.transpose(0, 1)[None] for part in out[: sum(lengths)].split(list(lengths))]


def split_lse(lse, lengths):
    return [part[None] for part in lse[:, : sum(lengths)].split(list(lengths), 1)]


def assert_same(got, want):
    """Outputs, and lse where they are asked for, bit for bit."""
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


@dataclass
class Pages:
    """Caches of a batch: pages at random places, NaN wherever no sequence has a key."""

    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    used: torch.Tensor


def _caches(layout, pages, page_size, heads, dims, like):
    """Key and value caches (pages, page_size, heads, dim) full of NaN."""
    nan = torch.full((), torch.nan).to(like.dtype).to(like.device)
    if layout == "separate":
        return [nan.expand(pages, page_size, heads, dim).clone() for dim in dims]
    both = nan.expand(pages, heads, page_size, sum(dims)).clone()
    return both.transpose(1, 2).split(dims, -1)


def make_pages(keys, values, page_size, layout="separate", spare=2):
    """Caches that hold the keys and values (1, heads, length, D) of each sequence."""
    counts = [-(-key.shape[2] // page_size) for key in keys]
    width, total = max([*counts, 1]) + spare, sum(counts) + 3
    order = iter(torch.randperm(total).tolist())
    first = keys[0]
    dims = [first.shape[3], values[0].shape[3]]
    caches = _caches(layout, total, page_size, first.shape[1], dims, first)
    # Entries past a sequence's last page name pages that do not exist, or those of others.
    table = torch.randint(-(2**31), 2**31 - 1, (len(keys), width), dtype=torch.int64)
    table[:, 1::2] = 0
    for b, count in enumerate(counts):
        for entry in range(count):
            page = table[b, entry] = next(order)
            rows = slice(entry * page_size, (entry + 1) * page_size)
            for cache, source in zip(caches, (keys[b], values[b]), strict=True):
                part = source[0, :, rows].transpose(0, 1)
                cache[page, : part.shape[0]] = part
    used = torch.tensor([key.shape[2] for key in keys], dtype=torch.int32, device=first.device)
    return Pages(*caches, table.int().to(first.device), used)


def layout_for(rows, keys, device, heads=1, batch=1):
    """A random layout for sequences of up to `rows` queries and `keys` keys."""
    mask = torch.rand((batch, heads, -(-rows // 32), -(-keys // 16))) < 0.5
    return sa.BlockSparse(sa.BlockLayout.from_mask(mask.to(device), 32, 16))


def part_of_layout(pattern, b, rows, keys):
    """What a layout for longer sequences says to sequence b alone."""
    layout = pattern.layout
    blocks = layout.to_mask()[min(b, layout.counts.shape[0] - 1)][None]
    blocks = blocks[:, :, : -(-rows // layout.block_q), : -(-keys // layout.block_kv)]
    return sa.BlockSparse(sa.BlockLayout.from_mask(blocks, layout.block_q, layout.block_kv))


#: A pattern of every kind, for sequences of up to `rows` queries and `keys` keys.
RAGGED_PATTERNS = {
    "full": lambda rows, keys, device: sa.Full(),
    "band": lambda rows, keys, device: sa.Band((17, 5)),
    "band-sinks": lambda rows, keys, device: sa.Band((9, 0), sinks=3),
    "band-globals": lambda rows, keys, device: sa.Band(4, sinks=1, global_tokens=3),
    "band-scattered": lambda rows, keys, device: sa.Band(
        4, sinks=2, global_tokens=torch.tensor([50, 0, 33], device=device)
    ),
    "dilated": lambda rows, keys, device: sa.Dilated((5, 2), 3),
    "dilated-sinks": lambda rows, keys, device: sa.Dilated((7, None), 2, sinks=5),
    "strided": lambda rows, keys, device: sa.Strided(9, 8),
    "blocks": lambda rows, keys, device: layout_for(rows, keys, device),
    "blocks-of-all": lambda rows, keys, device: layout_for(rows, keys, device, 4, 6),
    "topk": lambda rows, keys, device: sa.TopK(7),
    "topk-in-blocks": lambda rows, keys, device: sa.TopK(7, layout_for(rows, keys, device)),
}


def alone(pattern, b, rows, keys):
    """The pattern of sequence b in a call of its own."""
    if isinstance(pattern, sa.TopK) and pattern.inside is not None:
        return sa.TopK(pattern.k, part_of_layout(pattern.inside, b, rows, keys))
    if isinstance(pattern, sa.BlockSparse):
        return part_of_layout(pattern, b, rows, keys)
    return pattern


def check_one_graph(device, pattern, batches):
    """Fail unless one compiled graph serves batches of any lengths, with the bits of plain calls.

    `batches` are pairs of the lengths of queries and of keys.
    """
    torch._dynamo.reset()
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(*call):
        return sa.varlen_attention(*call, pattern=pattern)

    for rows, keys in batches:
        ragged = Ragged(rows, keys)
        sequences = ragged.sequences(device, torch.float32)
        call = [packed(list(parts)) for parts in zip(*sequences, strict=True)]
        call += [ragged.starts(device, rows), ragged.starts(device, keys), max(rows), max(keys)]
        assert torch.equal(attend(*call), sa.varlen_attention(*call, pattern=pattern))
    assert len(compiles) == 1

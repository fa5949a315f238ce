"""The entries of a BlockLayout as a user gives them: checked, brought to rank, sorted.

Called by the constructors of ``layout.py`` that are given indices. Reads the tensors' contents, so
it waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from ._checks import (
    as_int64,
    check_dense,
    check_index,
    check_integer,
    check_kind,
    dtype_name,
    refuse,
)
from .layout_bits import Blocks

__all__ = [
    "OWNER",
    "Device",
    "Layout",
    "check_bits",
    "check_entries",
    "checked_mask",
    "entries_of_csr",
    "is_listed",
    "sorted_entries",
]

OWNER = "BlockLayout"
Device = torch.device | str | None


class Makes(Protocol):
    """What a layout brings to the classes of its constructors."""

    def __init__(
        self,
        counts: torch.Tensor,
        indices: torch.Tensor,
        block_q: int,
        block_kv: int,
        num_kv_blocks: int,
    ) -> None: ...

    @classmethod
    def from_mask(cls: type[Layout], mask: torch.Tensor, block_q: int, block_kv: int) -> Layout:
        """Build the lists from a mask of blocks."""

    @classmethod
    def _of_blocks(cls: type[Layout], blocks: Blocks, block_q: int, block_kv: int) -> Layout:
        """Build the lists and their bits."""

    def to_mask(self) -> torch.Tensor:
        """Return the mask of blocks."""


Layout = TypeVar("Layout", bound=Makes)


def is_listed(counts: torch.Tensor, width: int) -> torch.Tensor:
    """Whether an entry of a row is before the row's count, bool ``(*counts.shape, width)``."""
    return torch.arange(width, device=counts.device) < counts[..., None]


def check_entries(name: str, tensor: torch.Tensor) -> None:
    """Refuse what holds no integers."""
    check_dense(OWNER, name, tensor)
    check_index(OWNER, name, tensor)
    if tensor.is_meta:
        raise refuse(OWNER, f"{name} with contents", "a meta tensor")


def with_rank(tensor: torch.Tensor, rank: int, name: str, shape: str) -> torch.Tensor:
    """Add leading dimensions of size one."""
    if not rank - 2 <= tensor.dim() <= rank:
        raise refuse(OWNER, f"{name} of shape {shape}", f"shape {tuple(tensor.shape)}")
    return tensor[(None,) * (rank - tensor.dim())]


def checked_mask(mask: torch.Tensor, shape: str) -> torch.Tensor:
    """Return a mask of four dimensions; refuse other ranks, and what is not bool."""
    mask = with_rank(mask, 4, "mask", shape)
    if mask.dtype != torch.bool:
        raise refuse(OWNER, "mask of dtype bool", dtype_name(mask.dtype))
    return mask


def check_bits(
    partial: torch.Tensor | None, bits: torch.Tensor | None, block_q: int, block_kv: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check the kinds of what partial blocks bring; return a copy of the bits in int32."""
    if partial is None or bits is None:
        if partial is not bits:
            raise refuse(OWNER, "partial and bits together", "one of them")
        return None, None
    check_entries("partial", partial)
    check_entries("bits", bits)
    shape = (block_q, -(-block_kv // 32))
    if bits.dim() != 3 or bits.shape[1:] != shape or bits.dtype != torch.int32:
        want = f"bits of dtype int32 and shape (P, {shape[0]}, {shape[1]})"
        raise refuse(OWNER, want, f"{dtype_name(bits.dtype)} of shape {tuple(bits.shape)}")
    return partial, bits.clone(memory_format=torch.contiguous_format)


def _sorted_indices(
    counts: torch.Tensor, indices: torch.Tensor, num_kv_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the listed entries and sort them, with their places; those past the count become 0."""
    length = indices.shape[-1]
    wrong = (counts < 0) | (counts > length)
    if bool(wrong.any()):
        got = int(counts[wrong][0])
        raise refuse(OWNER, f"counts between 0 and the {length} indices of a row", got)
    listed = is_listed(counts, length)
    outside = listed & ((indices < 0) | (indices >= num_kv_blocks))
    if bool(outside.any()):
        got = int(indices[outside][0])
        raise refuse(OWNER, f"indices from 0 to {num_kv_blocks - 1}", got)
    ordered, places = torch.where(listed, indices, num_kv_blocks).sort(-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & listed[..., 1:]
    if bool(twice.any()):
        got = int(ordered[..., 1:][twice][0])
        raise refuse(OWNER, "indices without duplicates", f"block {got} twice in a row")
    return torch.where(listed, ordered, 0), places


def sorted_entries(
    counts: torch.Tensor,
    indices: torch.Tensor,
    num_kv_blocks: int,
    partial: torch.Tensor | None = None,
    num_bits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return int32 counts (B|1, H|1, NQ) and ascending indices (B|1, H|1, NQ, max).

    And `partial`, rows of `num_bits`, in the order of the indices.
    """
    # 64 bits: smaller and unsigned kinds wrap or cannot be compared.
    counts = with_rank(as_int64(OWNER, "counts", counts), 3, "counts", "(B|1, H|1, NQ)")
    indices = with_rank(as_int64(OWNER, "indices", indices), 4, "indices", "(B|1, H|1, NQ, max)")
    if counts.device != indices.device:
        raise refuse(OWNER, f"indices on counts' device {counts.device}", indices.device)
    fits = indices.shape[2] == counts.shape[2] and all(
        a == b or 1 in (a, b) for a, b in zip(indices.shape[:2], counts.shape[:2], strict=True)
    )
    if not fits:
        want = f"({', '.join(map(str, counts.shape))}, max)"
        raise refuse(OWNER, f"indices of shape {want}", f"shape {tuple(indices.shape)}")
    rows = torch.broadcast_shapes(counts.shape, indices.shape[:3])
    counts = counts.expand(rows)
    sizes = (*rows, indices.shape[-1])
    indices, places = _sorted_indices(counts, indices.expand(sizes), num_kv_blocks)
    if partial is not None:
        partial = _ordered_partial(partial, places, counts, num_bits)
    counts = counts.to(torch.int32, copy=True).contiguous()
    return counts, indices.to(torch.int32).contiguous(), partial


def _ordered_partial(
    partial: torch.Tensor, places: torch.Tensor, counts: torch.Tensor, num_bits: int
) -> torch.Tensor:
    """Check the rows of bits of the listed entries and bring them into order; others become -1."""
    partial = with_rank(as_int64(OWNER, "partial", partial), 4, "partial", "(B|1, H|1, NQ, max)")
    if partial.device != places.device:
        raise refuse(OWNER, f"partial on counts' device {places.device}", partial.device)
    if partial.shape != places.shape:
        what = f"partial of indices' shape {tuple(places.shape)}"
        raise refuse(OWNER, what, f"shape {tuple(partial.shape)}")
    listed = is_listed(counts, places.shape[-1])
    partial = torch.where(listed, partial.gather(-1, places), -1)
    wrong = (partial < -1) | (partial >= num_bits)
    if bool(wrong.any()):
        raise refuse(OWNER, f"partial from -1 to {num_bits - 1}", int(partial[wrong][0]))
    return partial.to(torch.int32).contiguous()


def entries_of_csr(
    crow: torch.Tensor, col: torch.Tensor, shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return counts, indices and the number of key blocks of a compressed sparse row matrix."""
    check_entries("crow", crow)
    check_entries("col", col)
    check_kind(OWNER, "shape", shape, Sequence, "a sequence of ints")
    if len(shape) < 2:
        raise refuse(OWNER, "shape (..., NQ, NKV)", tuple(shape))
    num_q, num_kv = (check_integer(OWNER, "shape", size, 0) for size in shape[-2:])
    batch = tuple(shape[:-2])
    for name, tensor, size in (("crow", crow, num_q + 1), ("col", col, col.shape[-1:].numel())):
        if tuple(tensor.shape) != (*batch, size):
            want, got = (*batch, size), tuple(tensor.shape)
            raise refuse(OWNER, f"{name} of shape {want}", f"shape {got}")
    crow, col = as_int64(OWNER, "crow", crow), as_int64(OWNER, "col", col)
    counts = crow.diff(dim=-1)
    nnz = col.shape[-1]
    ends = (crow[..., 0] == 0) & (crow[..., -1] == nnz)
    if not bool(ends.all() & (counts >= 0).all()):
        raise refuse(OWNER, f"crow that rises from 0 to {nnz}", crow.flatten().tolist())
    longest = int(counts.max()) if counts.numel() else 0
    entry = crow[..., :-1, None] + torch.arange(longest, device=crow.device)
    entry = entry.clamp(max=max(nnz - 1, 0)).flatten(-2)
    indices = col.gather(-1, entry) if nnz else entry
    indices = indices.reshape(*batch, num_q, longest)
    return counts, indices, num_kv

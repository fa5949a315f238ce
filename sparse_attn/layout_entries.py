"""The entries of a BlockLayout as a user gives them: checked, brought to rank, sorted.

Called by the constructors of ``layout.py`` that are given indices. Reads the tensors' contents, so
it waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._checks import check_integer, check_kind, check_tensor, refuse

OWNER = "BlockLayout"


def check_entries(name: str, tensor: torch.Tensor) -> None:
    """Refuse what holds no integers."""
    check_tensor(OWNER, name, tensor)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise refuse(OWNER, f"{name} of an integer dtype", tensor.dtype)
    if tensor.is_meta:
        raise refuse(OWNER, f"{name} with contents", "a meta tensor")


def with_rank(tensor: torch.Tensor, rank: int, name: str, shape: str) -> torch.Tensor:
    """Add leading dimensions of size one."""
    if not rank - 2 <= tensor.dim() <= rank:
        raise refuse(OWNER, f"{name} of shape {shape}", f"shape {tuple(tensor.shape)}")
    return tensor[(None,) * (rank - tensor.dim())]


def _sorted_indices(
    counts: torch.Tensor, indices: torch.Tensor, num_kv_blocks: int
) -> torch.Tensor:
    """Check the listed entries and sort them; entries past the count become 0."""
    length = indices.shape[-1]
    wrong = (counts < 0) | (counts > length)
    if bool(wrong.any()):
        got = int(counts[wrong][0])
        raise refuse(OWNER, f"counts between 0 and the {length} indices of a row", got)
    listed = torch.arange(length, device=indices.device) < counts[..., None]
    outside = listed & ((indices < 0) | (indices >= num_kv_blocks))
    if bool(outside.any()):
        got = int(indices[outside][0])
        raise refuse(OWNER, f"indices from 0 to {num_kv_blocks - 1}", got)
    ordered = torch.where(listed, indices, num_kv_blocks).sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & listed[..., 1:]
    if bool(twice.any()):
        got = int(ordered[..., 1:][twice][0])
        raise refuse(OWNER, "indices without duplicates", f"block {got} twice in a row")
    return torch.where(listed, ordered, 0)


def sorted_entries(
    counts: torch.Tensor, indices: torch.Tensor, num_kv_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 counts (B|1, Hq|1, NQ) and ascending indices (B|1, Hq|1, NQ, max)."""
    # 64 bits: smaller and unsigned kinds wrap or cannot be compared.
    counts = with_rank(counts, 3, "counts", "(B|1, Hq|1, NQ)").long()
    indices = with_rank(indices, 4, "indices", "(B|1, Hq|1, NQ, max)").long()
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
    indices = _sorted_indices(counts, indices.expand(*rows, -1), num_kv_blocks)
    return counts.to(torch.int32, copy=True).contiguous(), indices.to(torch.int32).contiguous()


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
    crow, col = crow.long(), col.long()
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

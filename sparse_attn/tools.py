"""Functions beside attention: block selection alone, and merging of partial results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from . import ops
from ._checks import (
    Integer,
    as_given,
    as_int32,
    check_dense,
    check_kind,
    check_tensor,
    clamped,
    is_dense,
    refuse,
)
from ._common import op_arguments
from ._head_calls import ListsByHead
from .layout import BlockLayout
from .patterns import BlockSparse, BlockTopK, Pattern, TopK

__all__ = ["merge_states", "select_blocks", "with_lists"]

#: What a selection of blocks takes of a call.
_SELECTING = (
    *("is_causal", "scale", "key_bounds", "query_offset", "key_origin", "softcap", "key_scale"),
    *("block_table", "seqused_k", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
)


def select_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    pattern: BlockTopK,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_bounds: torch.Tensor | None = None,
    query_offset: int | torch.Tensor | None = None,
    key_origin: torch.Tensor | None = None,
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cu_seq_q: torch.Tensor | None = None,
    cu_seq_k: torch.Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    key_scale: torch.Tensor | None = None,
) -> BlockLayout:
    """List the key blocks that `block_topk_attention` would visit, on the device, without a sync.

    Parameters
    ----------
    query, key : Tensor
        ``(B, Hq, Sq, D)`` and ``(B, Hkv, Skv, D)``; packed as in `varlen_attention`, or with
        `block_table` as in `paged_attention`. Keys of float8_e4m3fn choose as what they stand for
        does, ``key.float() * key_scale`` rounded to query's dtype.
    pattern : BlockTopK
        Budget, selector and forced blocks.
    is_causal, scale, key_bounds, query_offset, key_origin, softcap, key_scale
        As in the attention functions.
    block_table, seqused_k, cu_seq_q, cu_seq_k, max_q, max_k : Tensor or int, optional
        As in `varlen_attention` and `paged_attention`, which take the lists as ``BlockSparse``.

    Returns
    -------
    BlockLayout
        Lists ``(B, Hq, NQ, NKV)`` for `block_sparse_attention`; ``(B, Hkv, NQ, NKV)`` of a pattern
        with ``group="kv"``. Of sequences that differ in length each has its own blocks, from 0 on,
        and ``NQ`` and ``NKV`` follow from the upper bounds.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the attention functions.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import BlockTopK, select_blocks
    >>> q, k = torch.randn(2, 1, 2, 256, 16)
    >>> pattern = BlockTopK(32, mass=None, budget_blocks=3, local_blocks=1)
    >>> select_blocks(q, k, pattern).counts.unique().tolist()
    [3]
    """
    owner = "select_blocks"
    check_tensor(owner, "query", query)
    check_tensor(owner, "key", key)
    check_kind(owner, "pattern", pattern, BlockTopK, "a BlockTopK")
    common = {
        "is_causal": is_causal,
        "scale": scale,
        "key_bounds": key_bounds,
        "query_offset": query_offset,
        "key_origin": key_origin,
        "softcap": softcap,
        "key_scale": key_scale,
    }
    placing = op_arguments(owner, common)
    tensors = {
        "block_table": block_table,
        "seqused_k": seqused_k,
        "cu_seq_q": cu_seq_q,
        "cu_seq_k": cu_seq_k,
    }
    sequences: dict[str, Any] = {}
    for name, tensor in tensors.items():
        check_kind(owner, name, tensor, (torch.Tensor, type(None)), "a tensor or None")
        sequences[name] = None if tensor is None else as_int32(owner, name, tensor)
    for name, bound in {"max_q": max_q, "max_k": max_k}.items():
        check_kind(owner, name, bound, (*Integer, type(None)), "an int or None")
        sequences[name] = clamped(bound)
    arguments = pattern._arguments() | placing | sequences
    try:
        counts, indices = ops.call("select_blocks", (query, key), arguments)
    except ValueError as error:
        raise as_given(error, common | tensors) from None
    return BlockLayout._trusted(counts, indices, *pattern._blocks, indices.shape[-1])


def with_lists(
    pattern: Pattern, query: torch.Tensor, key: torch.Tensor, common: Mapping[str, object]
) -> Pattern:
    """Return a pattern whose blocks, where the data chooses them, are those of a call."""
    if isinstance(pattern, ListsByHead):
        calls = pattern.selections(query, key, common)
        return _one_list([with_lists(c.pattern, *c.tensors[:2], c.common) for c in calls])
    blocks = pattern._region
    if not isinstance(blocks, BlockTopK):
        return pattern
    placing: Any = {name: value for name, value in common.items() if name in _SELECTING}
    layout = select_blocks(query, key, blocks, **placing)
    if blocks._by_sketch and placing.get("block_table") is not None:
        # No key of a page is missing in its sketch, so that no list exceeds the budget but where a
        # score is NaN, of which the first blocks stay; engines cut their work by the width.
        rows = placing["max_q"] if placing.get("cu_seq_q") is not None else query.shape[2]
        indices = layout.indices[..., : blocks._most_blocks(rows)]
        layout = BlockLayout._trusted(layout.counts, indices, *blocks._blocks, layout.num_kv_blocks)
    listed = BlockSparse(layout)
    return replace(pattern, inside=listed) if isinstance(pattern, TopK) else listed


def _one_list(listed: list[Pattern]) -> BlockSparse:
    """Join the lists of neighbouring heads, all of one width."""
    layouts = [own.layout for own in listed if isinstance(own, BlockSparse)]
    first = layouts[0]
    counts = torch.cat([layout.counts for layout in layouts], 1)
    indices = torch.cat([layout.indices for layout in layouts], 1)
    sizes = first.block_q, first.block_kv, first.num_kv_blocks
    return BlockSparse(BlockLayout._trusted(counts, indices, *sizes))


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial results over disjoint keys into the result over both.

    ``lse = ln(exp(lse_a) + exp(lse_b))``, ``out = out_a exp(lse_a - lse) + out_b exp(lse_b -
    lse)``.

    Parameters
    ----------
    out_a, out_b : Tensor
        ``(B, Hq, Sq, D)``, or packed ``(T, Hq, D)``, of one dtype.
    lse_a, lse_b : Tensor
        float32 ``(B, Hq, Sq)``, or packed ``(Hq, T)``, natural logarithm; -inf where a part has no
        keys.

    Returns
    -------
    (Tensor, Tensor)
        The output and its lse; zeros and -inf where neither part has keys.

    Raises
    ------
    TypeError, ValueError
        Wrong kinds; shapes, dtypes or devices that do not fit.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import fused_attention, merge_states
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> a = fused_attention(q, k[:, :, :32], v[:, :, :32], return_lse=True)
    >>> b = fused_attention(q, k[:, :, 32:], v[:, :, 32:], return_lse=True)
    >>> out, lse = merge_states(*a, *b)
    >>> torch.allclose(out, fused_attention(q, k, v), atol=1e-6)
    True

    Notes
    -----
    The rule by which partial softmaxes merge: Milakov and Gimelshein 2018, section 3.1; Dao et al.
    2022 (FlashAttention), section 3.1.
    """
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, tensor in states.items():
        check_tensor("merge_states", name, tensor)
    is_packed = is_dense(out_a) and out_a.dim() == 3
    if is_packed:
        states = _as_batch(states)
    out, lse = ops.call("merge_states", (), states)
    return (out[:, :, 0], lse[..., 0].mT.contiguous()) if is_packed else (out, lse)


def _as_batch(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """View packed states as those of a batch with an entry a token, which copies no output."""
    shape = states["out_a"].shape
    made = {}
    for name, tensor in states.items():
        check_dense("merge_states", name, tensor)
        is_out = name.startswith("out")
        want = tuple(shape) if is_out else (shape[1], shape[0])
        if tensor.shape != want:
            what = f"{name} of shape {want} beside a packed out_a"
            raise refuse("merge_states", what, f"shape {tuple(tensor.shape)}")
        made[name] = tensor[:, :, None] if is_out else tensor.mT[..., None]
    return made

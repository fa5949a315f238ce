"""The attention functions: drop-in replacements for `scaled_dot_product_attention`.

One for each pattern, one that takes any pattern, and the naive baseline. Each makes its pattern,
which checks the pattern's arguments, and hands over to its op; nothing here looks into a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from ._checks import Number, check_kind, check_tensor, refuse, without
from ._common import Common, FusedCommon, Result, attend, documented
from ._pattern import check_pattern
from .by_head import ByHead, attend_by_head
from .layout import BlockLayout
from .patterns import (
    BUDGETS,
    Band,
    BlockSparse,
    BlockTopK,
    Dilated,
    Full,
    Pattern,
    Strided,
    TopK,
)
from .tools import select_blocks
from .windows import Window

__all__ = [
    "band_attention",
    "block_sparse_attention",
    "block_topk_attention",
    "dilated_attention",
    "fused_attention",
    "naive_attention",
    "sparse_attention",
    "strided_attention",
    "topk_attention",
]


def _by_head(
    owner: str,
    pattern: ByHead,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    common: Any,
    attend: Any,
) -> Result:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(owner, name, tensor)
    return attend_by_head(pattern, query, key, value, common, attend)


@documented
def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,  # not 0.0: compiled, a float default is an input and traces twice
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **common: Unpack[FusedCommon],
) -> Result:
    """Dense attention with SDPA's own signature, so that it swaps in by name.

    ``is_causal`` with ``Sq != Skv`` differs from SDPA: the mask is aligned to the lower right
    corner (query i stands at key ``i + Skv - Sq``), as a decode step needs it, not to the upper
    left.

    Parameters
    ----------
    {tensors}
    dropout_p : float
        Must be 0: inference only.
    enable_gqa : bool
        Accepted and never needed: fewer key heads are always shared.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import fused_attention
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> fused_attention(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 8, 16])

    Notes
    -----
    Online softmax over tiles (Dao et al. 2022, FlashAttention): scores are never stored.
    """
    owner = "fused_attention"
    check_kind(owner, "dropout_p", dropout_p, Number, "a float")
    check_kind(owner, "enable_gqa", enable_gqa, bool, "a bool")
    if dropout_p != 0:
        raise refuse(owner, "dropout_p of 0 (inference only)", dropout_p)
    arguments = dict(common, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    return attend(owner, Full(), query, key, value, arguments)


@documented
def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None = None,
    **common: Unpack[Common],
) -> Result:
    """Attention that stores all scores: the baseline and the oracle, for any pattern.

    Memory grows with ``B * Hq * Sq * Skv``. A pattern of your own is served by its `allows`.

    Parameters
    ----------
    {tensors}
    pattern : Pattern, optional
        Which keys each query sees; all by default.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, naive_attention
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> naive_attention(q, k, v, Band(2)).shape
    torch.Size([1, 2, 8, 16])
    """
    owner = "naive_attention"
    pattern = Full() if pattern is None else pattern
    check_pattern(owner, pattern)
    if isinstance(pattern, ByHead):
        return _by_head(owner, pattern, query, key, value, common, naive_attention)
    if isinstance(pattern, BlockTopK):
        placing = ("is_causal", "scale", "key_bounds", "query_offset", "softcap")
        given: Any = {name: value for name, value in common.items() if name in placing}
        pattern = BlockSparse(select_blocks(query, key, pattern, **given))
    return attend(owner, pattern, query, key, value, dict(common), op="naive")


@documented
def band_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: Window,
    *,
    sinks: int = 0,
    global_tokens: int | torch.Tensor | None = None,
    **common: Unpack[Common],
) -> Result:
    """Sliding window attention with sink columns and global tokens; see `Band`.

    Parameters
    ----------
    {tensors}
    window : int or (int or None, int or None)
        Keys ``-left <= j - p <= right``; an int is both sides, None has no limit.
    sinks : int
        Also every key ``j < sinks``.
    global_tokens : int or Tensor, optional
        Positions that see and are seen by all: the first g, or an index tensor ``(tokens,)``.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import band_attention
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> band_attention(q, k, v, (15, 0), sinks=4).shape
    torch.Size([1, 2, 64, 16])
    """
    pattern = Band(window, sinks, global_tokens)
    return attend("band_attention", pattern, query, key, value, dict(common))


@documented
def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: Window,
    dilation: int,
    *,
    sinks: int = 0,
    **common: Unpack[Common],
) -> Result:
    """Attention to every dilation-th key of a window; see `Dilated`.

    Parameters
    ----------
    {tensors}
    window : int or (int or None, int or None)
        Taps left and right: ``j = p + t * dilation`` with ``-left <= t <= right``.
    dilation : int
        Distance of neighbouring taps, at least 1.
    sinks : int
        Also every key ``j < sinks``, undilated.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import dilated_attention
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> dilated_attention(q, k, v, (7, 0), 2).shape
    torch.Size([1, 2, 64, 16])

    Notes
    -----
    The dilated sliding window of Beltagy et al. 2020 (Longformer), section 3.1.
    """
    pattern = Dilated(window, dilation, sinks)
    return attend("dilated_attention", pattern, query, key, value, dict(common))


@documented
def strided_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    local: int,
    stride: int,
    **common: Unpack[Common],
) -> Result:
    """Causal attention to a window and every stride-th column; see `Strided`.

    Parameters
    ----------
    {tensors}
    local, stride : int
        Keys ``0 <= p - j < local``, and ``j <= p`` with ``j mod stride == stride - 1``.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import strided_attention
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> strided_attention(q, k, v, 8, 16).shape
    torch.Size([1, 2, 64, 16])

    Notes
    -----
    A window and summary columns: Child et al. 2019 (Sparse Transformer), section 4.3's fixed
    pattern with one column a stride.
    """
    pattern = Strided(local, stride)
    return attend("strided_attention", pattern, query, key, value, dict(common))


@documented
def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    **common: Unpack[Common],
) -> Result:
    """Attention to the key blocks that a layout lists for each query block.

    Parameters
    ----------
    {tensors}
    layout : BlockLayout
        Query i sees key j when ``layout[b, h, i // block_q, j // block_kv]``.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import BlockLayout, block_sparse_attention
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> layout = BlockLayout.local(64, 64, 16, 16, (1, 0))
    >>> block_sparse_attention(q, k, v, layout, is_causal=True).shape
    torch.Size([1, 2, 64, 16])
    """
    pattern = BlockSparse(layout)
    return attend("block_sparse_attention", pattern, query, key, value, dict(common))


@documented
def topk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k: int,
    **common: Unpack[Common],
) -> Result:
    """Attention to the k keys with the highest scores of each query; see `TopK`.

    Parameters
    ----------
    {tensors}
    k : int
        Keys kept of the row's allowed keys by ``scale * q.k``; ties go to the lower key.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import topk_attention
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> topk_attention(q, k, v, 8).shape
    torch.Size([1, 2, 64, 16])

    Notes
    -----
    Top-k attention of Gupta et al. 2021.
    """
    return attend("topk_attention", TopK(k), query, key, value, dict(common))


@without(budget=BUDGETS)
@documented
def block_topk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int | tuple[int, int] = 128,
    mass: float | None = None,
    selector: str | torch.Tensor = "mean",
    budget_blocks: int | None = None,
    budget_share: float | None = None,
    group: str = "q",
    sink_blocks: int = 1,
    local_blocks: int | None = 1,
    groups: int | None = None,
    row_step: int = 32,
    stride: int = 8,
    **common: Unpack[Common],
) -> Result:
    """Attention to the best key blocks of each query block, chosen from the data; see `BlockTopK`.

    Parameters
    ----------
    {tensors}
    block_size, mass, selector, budget_blocks, budget_share, group, sink_blocks, local_blocks
        As in `BlockTopK`.
    groups, row_step, stride
        Settings of selectors, as in `BlockTopK`.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import block_topk_attention
    >>> q, k, v = torch.randn(3, 1, 2, 256, 16)
    >>> block_topk_attention(q, k, v, block_size=32, budget_share=0.25).shape
    torch.Size([1, 2, 256, 16])
    """
    pattern = BlockTopK(
        block_size,
        mass,
        selector,
        budget_blocks,
        budget_share,
        group,
        sink_blocks,
        local_blocks,
        groups,
        row_step,
        stride,
    )
    return attend("block_topk_attention", pattern, query, key, value, dict(common))


@documented
def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    **common: Unpack[Common],
) -> Result:
    """Attention with any pattern, chosen at run time.

    Parameters
    ----------
    {tensors}
    pattern : Pattern
        Such as ``Band(128)``; the pattern's own function gives the same bits. A `ByHead` runs the
        heads of each of its patterns on views.
    {common}

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Dilated, sparse_attention
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> sparse_attention(q, k, v, Dilated((7, 0), 2), is_causal=True).shape
    torch.Size([1, 2, 64, 16])
    """
    owner = "sparse_attention"
    check_pattern(owner, pattern)
    if isinstance(pattern, ByHead):
        return _by_head(owner, pattern, query, key, value, common, sparse_attention)
    return attend(owner, pattern, query, key, value, dict(common))

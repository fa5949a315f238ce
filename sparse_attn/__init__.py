"""Sparse attention for inference: fused C++/CUDA kernels behind drop-in functions.

A pattern is data (`Band`, `Dilated`, `BlockSparse`, ...), a function runs it
(`band_attention`, ..., or `sparse_attention` with any pattern), and a `Policy` says which pattern
runs in which layer of a model. ``integrations.transformers`` is imported only on demand.
"""

from torch.serialization import add_safe_globals as _add_safe_globals

from . import distributed, integrations, nn, quality
from ._common import Common
from ._nearest import nearest
from ._table import Table as _Table
from .advisor import Advice, Profile, advise, profile
from .by_head import ByHead
from .cache import append_to_cache, quantize_cache
from .capability import Capability, can_use
from .functional import (
    band_attention,
    block_sparse_attention,
    block_topk_attention,
    dilated_attention,
    fused_attention,
    naive_attention,
    paged_attention,
    sparse_attention,
    strided_attention,
    topk_attention,
    varlen_attention,
)
from .layout import BlockLayout
from .nn import restore_attention, swap_attention
from .patterns import Band, BlockSparse, BlockTopK, Dilated, Full, Pattern, Strided, TopK
from .policy import Policy
from .sdpa import PatchedSDPA, patch_sdpa
from .sketch import KeySketch
from .tools import merge_states, select_blocks

# Data alone, so that torch.load reads them back with its default weights_only=True.
_add_safe_globals(
    [
        *(Band, BlockLayout, BlockSparse, BlockTopK, ByHead, Dilated),
        *(Full, KeySketch, Policy, Strided, TopK, _Table),
    ]
)

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Band",
    "BlockLayout",
    "BlockSparse",
    "BlockTopK",
    "ByHead",
    "Capability",
    "Common",
    "Dilated",
    "Full",
    "KeySketch",
    "PatchedSDPA",
    "Pattern",
    "Policy",
    "Profile",
    "Strided",
    "TopK",
    "advise",
    "append_to_cache",
    "band_attention",
    "block_sparse_attention",
    "block_topk_attention",
    "can_use",
    "dilated_attention",
    "distributed",
    "fused_attention",
    "integrations",
    "merge_states",
    "naive_attention",
    "nearest",
    "nn",
    "paged_attention",
    "patch_sdpa",
    "profile",
    "quality",
    "quantize_cache",
    "restore_attention",
    "select_blocks",
    "sparse_attention",
    "strided_attention",
    "swap_attention",
    "topk_attention",
    "varlen_attention",
]

"""The attention functions: drop-in replacements for `scaled_dot_product_attention`.

One for each pattern, one that takes any pattern, and the naive baseline. Each makes its pattern,
which checks the pattern's arguments, and hands over to its op; nothing here looks into a tensor.
``scripts/write_functions.py`` writes them from templates: they share SDPA's and the common
arguments, spelled out in each with types and words, so that every editor shows them.
"""

from .band import band_attention
from .block_sparse import block_sparse_attention
from .block_topk import block_topk_attention
from .dilated import dilated_attention
from .fused import fused_attention
from .naive import naive_attention
from .paged import paged_attention
from .sparse import sparse_attention
from .strided import strided_attention
from .topk import topk_attention
from .varlen import varlen_attention

__all__ = [
    "band_attention",
    "block_sparse_attention",
    "block_topk_attention",
    "dilated_attention",
    "fused_attention",
    "naive_attention",
    "paged_attention",
    "sparse_attention",
    "strided_attention",
    "topk_attention",
    "varlen_attention",
]

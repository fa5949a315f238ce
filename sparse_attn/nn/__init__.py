"""Multi-head attention modules that run a pattern, and the swap that puts them into a model."""

from .multihead import SparseMultiheadAttention
from .swap import restore_attention, swap_attention

__all__ = ["SparseMultiheadAttention", "restore_attention", "swap_attention"]

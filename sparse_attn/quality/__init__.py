"""What a pattern keeps: of one attention call (`compare`)."""

from ._compare import Comparison, compare

__all__ = ["Comparison", "compare"]

"""What patterns keep: of one attention call (`compare`), of a model's own output (`model`)."""

from ._compare import Comparison, compare
from ._model import ModelQuality, PolicyQuality, model

__all__ = ["Comparison", "ModelQuality", "PolicyQuality", "compare", "model"]

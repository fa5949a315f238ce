"""How far one output of a model is from another: KL, top-1, perplexity; else error and cosine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .._binding import is_transformers_model
from .._origins import bool_mask

__all__ = ["Output", "Sums", "judged_by", "output_of"]

#: Numbers of an output that are compared at once, in float32: on a CPU few enough that the pages of
#: what is computed in between are used again and not asked for each time.
_AT_ONCE = {"cpu": 1 << 23, "cuda": 1 << 25}
_TORCH_MODULES = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
_PIECES = 16  # of the positions, between which agreement varies


class Output(NamedTuple):
    """What a model's call is judged by."""

    values: torch.Tensor
    may_be_logits: bool  # hidden states are none, however wide


def output_of(module: nn.Module, result: Any) -> Output:
    """Return what a call of a model is judged by: logits, hidden states, the first tensor."""
    is_mapping = isinstance(result, Mapping)
    for name in ("logits", "last_hidden_state", "sample"):
        found = result.get(name) if is_mapping else getattr(result, name, None)
        if isinstance(found, torch.Tensor):
            return Output(found, name == "logits")
    if isinstance(result, (tuple, list)) and result:
        return output_of(module, result[0])
    if isinstance(result, torch.Tensor):
        return Output(result, _has_head(module))
    kind = type(result).__name__
    what = "a model that returns a tensor, logits or last_hidden_state"
    raise TypeError(f"sparse_attn.quality: expected {what}, got {kind}")


def _has_head(module: Any) -> bool:
    """Whether a model may return logits over tokens; transformers models say it."""
    return not is_transformers_model(module) or module.get_output_embeddings() is not None


def judged_by(module: nn.Module, inputs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the ids and the mask of a call's output, and whether its logits are of the next token.

    An encoder-decoder's are of its decoder's ids. One without them moves its labels, or its input,
    on by one: what it predicts then stands at its own position. The mask is turned where torch's
    modules take (length, batch, ...).
    """
    predicts: bool = getattr(module, "can_generate", lambda: True)()
    if _is_length_first(module):
        mask = _not_padded(inputs)
        if mask is not None and mask.dim() == 2:
            return {"attention_mask": mask.mT}, predicts
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return inputs, predicts
    ids, mask = inputs.get("decoder_input_ids"), inputs.get("decoder_attention_mask")
    if isinstance(ids, torch.Tensor):
        return {"input_ids": ids, "attention_mask": mask}, predicts
    labels = inputs.get("labels")
    if isinstance(labels, torch.Tensor):
        return {"input_ids": labels, "attention_mask": labels >= 0}, False
    return inputs, False


def _is_length_first(module: nn.Module) -> bool:
    """Whether one of torch's modules takes (length, batch, ...)."""
    return isinstance(module, _TORCH_MODULES) and not any(
        getattr(part, "batch_first", False) for part in module.modules()
    )


def tokens_of(inputs: Any, output: Output) -> torch.Tensor | None:
    """Return the token ids ``(B, S)`` when the output is logits over them, else None."""
    ids, values = inputs.get("input_ids"), output.values
    if ids is None or not output.may_be_logits or values.dim() != 3:
        return None
    fits = values.shape[:2] == ids.shape and values.shape[-1] > int(ids.max())
    return ids if fits else None


def _not_padded(inputs: dict[str, Any]) -> torch.Tensor | None:
    """Return which positions are no padding, bool ``(B, S)``, by transformers' mask or torch's."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        if mask.dim() != 4:
            return mask.bool()
        seen = bool_mask(mask) if mask.is_floating_point() else mask.bool()
        return seen.flatten(1, 2).any(1)  # by a row of some head
    padding = inputs.get("tgt_key_padding_mask" if "tgt" in inputs else "src_key_padding_mask")
    return padding == 0 if isinstance(padding, torch.Tensor) else None  # False, or a term of 0


@dataclass
class Sums:
    """Running sums over positions, of one policy beside dense attention.

    Attributes
    ----------
    rows, judged, next_rows : int
        Positions, those with logits, and those with a next token.
    kl, same, own_loss : float
        Sums of KL(dense || own), of equal most likely tokens, of the next tokens' losses.
    error, size, cosine : float
        Sums of ``|own - dense|``, of ``|dense|`` and of the positions' cosines.
    agreement : list of Tensor
        By position: whether the most likely tokens are equal, the cosine where there are none.
    """

    rows: int = 0
    judged: int = 0
    next_rows: int = 0
    kl: float = 0.0
    same: float = 0.0
    own_loss: float = 0.0
    error: float = 0.0
    size: float = 0.0
    cosine: float = 0.0
    agreement: list[torch.Tensor] = field(default_factory=list)

    def add(self, own: Output, dense: Output, inputs: dict[str, Any], predicts: bool) -> None:
        """Add a call's output beside dense attention's; padded positions do not count.

        Parameters
        ----------
        own, dense : Output
            Values ``(..., features)``.
        inputs : dict
            For ``input_ids`` and the mask of their padding; see `judged_by`.
        predicts : bool
            Whether logits are those of the next token.
        """
        ids = tokens_of(inputs, dense)
        mine, theirs = own.values, dense.values
        real = torch.ones(theirs.shape[:-1], dtype=torch.bool, device=theirs.device)
        mask = _not_padded(inputs)
        if mask is not None and mask.dim() == 2 and mask.mT.shape == real.shape != mask.shape:
            mask = mask.mT  # of a model of (length, batch, ...)
        if mask is not None and mask.shape == real.shape:
            real = mask.to(real.device)
        follows = torch.full(real.shape, -1, device=real.device)
        if ids is not None and predicts:
            both = real[:, :-1] & real[:, 1:]
            follows[:, :-1] = ids[:, 1:].to(real.device).where(both, -1)
        real = real.flatten()
        mine, theirs, follows = mine.flatten(0, -2), theirs.flatten(0, -2), follows.flatten()
        at_once = _AT_ONCE.get(real.device.type, _AT_ONCE["cuda"])
        rows = max(1, at_once // max(1, theirs.shape[-1]))
        for part in torch.arange(len(real), device=real.device)[real].split(rows):
            self._add_rows(mine[part], theirs[part], follows[part], ids is not None)

    def _add_rows(
        self, own: torch.Tensor, dense: torch.Tensor, follows: torch.Tensor, is_logits: bool
    ) -> None:
        own, dense = own.float(), dense.float()
        self.rows += len(own)
        if is_logits:
            self._add_logits(own, dense, follows)
        if _has_neginf(dense):  # features that both leave out, as words are
            barred = own.isneginf() & dense.isneginf()
            own, dense = own.masked_fill(barred, 0.0), dense.masked_fill(barred, 0.0)
        self.error += _sum((own - dense).abs_())
        self.size += _sum(dense.abs())
        cosine = torch.cosine_similarity(own, dense, -1).double()
        cosine[(own == dense).all(-1)] = 1.0  # rows of zeros too
        self.cosine += cosine.sum().item()
        if not is_logits:
            self.agreement.append(cosine.cpu())

    def _add_logits(self, own: torch.Tensor, dense: torch.Tensor, follows: torch.Tensor) -> None:
        same = (own.argmax(-1) == dense.argmax(-1)).double()
        mine, theirs = own.log_softmax(-1), dense.log_softmax(-1)
        self.judged += len(own)
        self.same += same.sum().item()
        self.agreement.append(same.cpu())
        has = follows >= 0
        self.own_loss -= mine[has].gather(-1, follows[has, None]).double().sum().item()
        self.next_rows += int(has.sum())
        kl = theirs.exp().mul_(theirs - mine)
        if _has_neginf(theirs):  # these have no share of the mean
            kl.masked_fill_(theirs.isneginf(), 0.0)
        self.kl += _sum(kl)

    def perplexity(self) -> float | None:
        """Exp of the mean loss of the next tokens; None where none were predicted."""
        return math.exp(self.own_loss / self.next_rows) if self.next_rows else None

    def standard_error(self) -> float:
        """Return how far the mean agreement of such a text is from its kind's, by its pieces.

        Positions of a text resemble their neighbours, so the spread between pieces of it says more
        than a count of its positions would.
        """
        agreement = torch.cat(self.agreement) if self.agreement else torch.empty(0)
        pieces = [float(piece.mean()) for piece in agreement.tensor_split(_PIECES) if len(piece)]
        return statistics.stdev(pieces) / math.sqrt(len(pieces)) if len(pieces) > 1 else 0.0


def _has_neginf(numbers: torch.Tensor) -> bool:
    """Whether one is -inf, without a mask of them all; NaN hides it."""
    return bool(len(numbers)) and bool(numbers.amin().isneginf())


def _sum(numbers: torch.Tensor) -> float:
    """Return the sum of float32 numbers; rows in float32, since a float64 copy of all is slow."""
    return numbers.sum(-1).double().sum().item()

"""can_use: which engine serves a call, and why faster ones stand aside.

The op itself judges the call, with an output that stops it before anything is computed. The engine
comes from the capability table that the ops obey (``_info``, a compiled module, maybe missing).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Unpack

from . import ops
from ._autocast import autocast
from ._checks import check_tensor
from ._common import Common, op_arguments
from ._pattern import check_pattern
from .by_head import ByHead, parts_of
from .patterns import BlockTopK, Full, Pattern

__all__ = ["Capability", "can_use"]

_BY_SPEED = (None, "naive", "tiled", "portable", "hopper")
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Capability:
    """Answer of `can_use`: true when the call is served.

    Attributes
    ----------
    engine : str or None
        ``naive`` or ``tiled`` on the CPU; ``naive``, ``portable`` or ``hopper`` on CUDA; None when
        the call is refused, or when the table is missing.
    reasons : tuple of str
        Sentences: why faster engines stand aside and what slows the one that serves, or why the
        call is refused.
    served : bool
        The truth value.

    Examples
    --------
    >>> from sparse_attn import Capability
    >>> "served" if Capability("tiled", (), served=True) else "refused"
    'served'
    """

    engine: str | None
    reasons: tuple[str, ...]
    served: bool

    def __bool__(self) -> bool:
        return self.served


def _aligned(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    strides = [s for s, n in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if n > 1]
    return tensor.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in strides)


def _refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    common: dict[str, Any],
) -> str | None:
    """Return the op's sentence when it refuses the call.

    The op checks its last output after all else and before it computes: an output that no call
    takes stops it there, and is refused alone when the call is right.
    """
    arguments = op_arguments("can_use", common)
    arguments.pop("return_lse", None)
    last = "lse" if common.get("out") is not None else "out"
    arguments[last] = query.new_empty((0, 0, 0, 0), dtype=torch.bool)
    quiet = torch.no_grad() if last == "out" else contextlib.nullcontext()
    try:
        with quiet:
            ops.call(f"{pattern._op}_out", query, key, value, **pattern._arguments(), **arguments)
    except (ValueError, NotImplementedError) as error:
        right = str(error).startswith(f"sparse_attn::{pattern._op}: expected {last} of ")
        return None if right else str(error)
    if query.dtype not in _DTYPES:  # a meta tensor, which no kernel checks
        want, got = ", ".join(_DTYPES.values()), str(query.dtype).removeprefix("torch.")
        return f"sparse_attn::{pattern._op}: expected query of dtype {want}, got {got}"
    return None


def _of_all(answers: list[Capability]) -> Capability:
    """Join the answers for the heads of several patterns: a refusal, or the slowest engine."""
    for answer in answers:
        if not answer:
            return answer
    slowest = min(answers, key=lambda answer: _BY_SPEED.index(answer.engine))
    reasons = dict.fromkeys(reason for answer in answers for reason in answer.reasons)
    return Capability(slowest.engine, tuple(reasons), True)


def can_use(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern | None = None,
    **common: Unpack[Common],
) -> Capability:
    """Tell whether a call is served, by which engine, and why faster engines stand aside.

    Parameters
    ----------
    query, key, value : Tensor
        As in the attention functions; nothing is computed.
    pattern : Pattern, optional
        All keys by default.
    **common
        The common keywords of the call, ``engine`` among them.

    Returns
    -------
    Capability
        True when served, with ``.engine`` and ``.reasons``. A wrong call is refused with the
        sentence that it would raise.

    Raises
    ------
    TypeError
        An argument of a wrong kind.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import Band, can_use
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> can_use(q, k, v, Band(8))
    Capability(engine='tiled', reasons=(), served=True)
    >>> can_use(q, k[..., :8], v, Band(8)).served
    False
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor("can_use", name, tensor)
    pattern = Full() if pattern is None else pattern
    check_pattern("can_use", pattern)
    if isinstance(pattern, ByHead):
        parts = parts_of(pattern, query, key, value, dict(common))
        return _of_all([can_use(*part.tensors, part.pattern, **part.common) for part in parts])
    calls: dict[str, Any] = {"query": query, "key": key, "value": value, **common}
    if common.get("out") is None:
        calls = autocast(calls, query.device.type)
    query, key, value = (calls.pop(name) for name in ("query", "key", "value"))
    unserved = pattern._unserved()
    if unserved is not None:
        return Capability(None, (f"sparse_attn: not served: {unserved}",), False)
    refusal = _refusal(query, key, value, pattern, calls)
    if refusal is not None:
        return Capability(None, (refusal,), False)
    try:
        from . import _info
    except ImportError as error:
        return Capability(None, (f"the capability table is missing: {error}",), True)
    arguments = pattern._arguments()
    out = common.get("out")
    on_cuda = query.is_cuda
    major, minor = torch.cuda.get_device_capability(query.device) if on_cuda else (0, 0)
    block_q, block_kv = pattern._blocks if isinstance(pattern, BlockTopK) else (0, 0)
    scale = common.get("scale")
    engine, reasons = _info.choose_engine(
        common.get("engine", "auto"),
        cuda=on_cuda,
        sm=10 * major + minor,
        dtype=_DTYPES[query.dtype],
        head_dim=query.shape[-1],
        seq_q=query.shape[-2],
        seq_kv=key.shape[-2],
        aligned=all(_aligned(t) for t in (query, key, value, out) if t is not None),
        dense_mask=common.get("attn_mask") is not None,
        scattered_globals=arguments.get("global_tokens") is not None,
        topk=arguments.get("k") is not None,
        key_bounds=common.get("key_bounds") is not None,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=common.get("softcap", 0.0),
        block_q=arguments.get("block_q", block_q),
        block_kv=arguments.get("block_kv", block_kv),
    )
    return Capability(engine, tuple(reasons), engine is not None)

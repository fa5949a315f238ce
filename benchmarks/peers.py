"""Who computes a case: the package's engines and the peers, each as one function to time.

``contender(via, case, inputs)`` returns the call, or raises ``Unavailable`` (or the peer's own
error), whose sentence the report prints in place of figures. What a peer prepares once (a block
mask, a compiled kernel) is prepared here, outside the timing, and its time is kept apart.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparse_attn as sa

from .accuracy import allowed_rows
from .cases import Case, Inputs, select_blocks
from .masks import Band, Blocks, BlockTopK, Full

Attention = Callable[[], torch.Tensor]

LONGEST_DENSE_MASK = 16384
LONGEST_MASK_OF_PAIRS = 32768


class Unavailable(RuntimeError):
    """The peer cannot take part; the sentence says why."""


@dataclass(frozen=True)
class Contender:
    """A call to time."""

    call: Attention
    engine: str = ""  # which engine of the package serves it
    setup_ms: float | None = None  # building a mask, timed apart
    attends: bool = True  # the result is the case's attention, so its error can be measured


def contender(via: str, case: Case, inputs: Inputs) -> Contender:
    """Return the call that ``via`` names.

    Parameters
    ----------
    via
        ``ours``, ``ours/<engine>``, ``naive``, ``cudnn``, ``flash``, ``math``, ``sdpa``, ``flex``,
        ``fa3``, ``merged``, ``select`` or ``list``.
    case
        What to compute.
    inputs
        Its tensors.

    Returns
    -------
    Contender
        The call and what was prepared for it.
    """
    if via == "ours" or via.startswith("ours/"):
        return _ours(case, inputs, via.partition("/")[2] or "auto")
    return _VIA[via](case, inputs)


def _ours(case: Case, inputs: Inputs, engine: str) -> Contender:
    query, key, value = inputs.query, inputs.key, inputs.value
    pattern = case.spec.pattern(inputs.block_mask(case))
    served = sa.can_use(query, key, value, pattern, is_causal=case.causal, engine=engine)

    def call() -> torch.Tensor:
        out = sa.sparse_attention(query, key, value, pattern, is_causal=case.causal, engine=engine)
        assert isinstance(out, torch.Tensor)
        return out

    return Contender(call, engine=str(served.engine))


def _naive(case: Case, inputs: Inputs) -> Contender:
    query, key, value = inputs.query, inputs.key, inputs.value
    if isinstance(case.spec, BlockTopK):
        raise Unavailable("the naive engine takes block top-k as a block list only")
    pattern = case.spec.pattern(inputs.block_mask(case))

    def call() -> torch.Tensor:
        out = sa.naive_attention(query, key, value, pattern, is_causal=case.causal)
        assert isinstance(out, torch.Tensor)
        return out

    return Contender(call, engine="naive")


def _merged(case: Case, inputs: Inputs) -> Contender:
    """Leading global columns and a causal band as two calls, merged by their lse."""
    spec = case.spec
    if not (isinstance(spec, Band) and spec.global_tokens and case.causal):
        raise Unavailable("only a causal band with leading global tokens is merged from two calls")
    g, window = spec.global_tokens, (spec.left, spec.right)
    query, key, value = inputs.query, inputs.key, inputs.value

    def call() -> torch.Tensor:
        near = sa.band_attention(
            query,
            key[:, :, g:],
            value[:, :, g:],
            window,
            is_causal=True,
            query_offset=-g,
            return_lse=True,
        )
        lead = sa.fused_attention(
            query, key[:, :, :g], value[:, :, :g], is_causal=True, query_offset=0, return_lse=True
        )
        out = sa.merge_states(*near, *lead)[0]
        assert isinstance(out, torch.Tensor)
        return out

    return Contender(call)


def _select(case: Case, inputs: Inputs) -> Contender:
    spec = case.spec
    assert isinstance(spec, BlockTopK)
    return Contender(lambda: select_blocks(inputs, spec, case.causal).counts, attends=False)


def _list(case: Case, inputs: Inputs) -> Contender:
    """Build a block list from a dense block mask; a host synchronisation is a failure."""
    spec = case.spec
    mask = inputs.block_mask(case)
    assert isinstance(spec, Blocks) and mask is not None

    def call() -> torch.Tensor:
        counts = sa.BlockLayout.from_mask(mask, spec.block_q, spec.block_kv).counts
        assert isinstance(counts, torch.Tensor)
        return counts

    if inputs.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Contender(call, attends=False)


def _sdpa(backend: SDPBackend | None) -> Callable[[Case, Inputs], Contender]:
    def build(case: Case, inputs: Inputs) -> Contender:
        query, key, value = inputs.query, inputs.key, inputs.value
        mask = None if _plain(case) else _dense_mask(case, inputs)
        causal = case.causal and mask is None and case.rows > 1

        def attend() -> torch.Tensor:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal,
                enable_gqa=case.kv_heads is not None,
            )

        def forced() -> torch.Tensor:
            assert backend is not None
            with sdpa_kernel(backend):
                return attend()

        return Contender(attend if backend is None else forced)

    return build


def _plain(case: Case) -> bool:
    """Whether SDPA serves the case without a mask: dense, and causal from the same corner."""
    return isinstance(case.spec, Full) and (not case.causal or case.rows in (1, case.length))


def _dense_mask(case: Case, inputs: Inputs) -> torch.Tensor:
    if case.length > LONGEST_DENSE_MASK:
        raise Unavailable(f"a dense mask of {case.length} keys a row is not tried")
    if case.spec.variant in ("topk", "block_topk"):
        raise Unavailable("the mask depends on the scores")
    rows = torch.arange(case.rows, device=inputs.device)
    if not isinstance(case.spec, Blocks):
        return allowed_rows(case, inputs, 0, 0, rows)
    heads = [allowed_rows(case, inputs, 0, head, rows) for head in range(case.heads)]
    return torch.stack(heads)[None]


def _fa3(case: Case, inputs: Inputs) -> Contender:
    try:
        flash = importlib.import_module("flash_attn_interface")
    except ImportError as error:
        raise Unavailable(f"flash-attn 3 is not installed ({error})") from error
    spec = case.spec
    window = (-1, -1)
    if isinstance(spec, Band) and not (spec.sinks or spec.global_tokens):
        left, right = (-1 if side is None else side for side in (spec.left, spec.right))
        window = (left, 0 if case.causal else right)
    elif not isinstance(spec, Full):
        raise Unavailable("flash-attn 3 serves dense and windowed attention only")
    query, key, value = (t.transpose(1, 2) for t in (inputs.query, inputs.key, inputs.value))

    def call() -> torch.Tensor:
        out = flash.flash_attn_func(query, key, value, causal=case.causal, window_size=window)
        out = out[0] if isinstance(out, tuple) else out
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2)

    return Contender(call)


@cache
def _compiled_flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # One kernel a shape, as a user gets who compiles for his own; without this torch.compile turns
    # to dynamic shapes, and after eight of them to the eager form that materialises the scores.
    settings: Any = torch._dynamo.config
    settings.recompile_limit = 1000
    settings.accumulated_recompile_limit = 10000
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return attend, create_block_mask


def _flex(case: Case, inputs: Inputs) -> Contender:
    attend, create_block_mask = _compiled_flex()
    query, key, value = inputs.query, inputs.key, inputs.value
    spec, shift, on_gpu = case.spec, case.length - case.rows, inputs.device.type == "cuda"

    def allowed(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = spec.allowed(i + shift, j)
        return seen & (j <= i + shift) if case.causal else seen

    def build() -> Any:
        if isinstance(spec, Blocks) and not case.causal:
            mask = inputs.block_mask(case)
            assert mask is not None
            return sa.BlockLayout.from_mask(mask, spec.block_q, spec.block_kv).to_flex()
        if isinstance(spec, Blocks) or spec.variant in ("topk", "block_topk"):
            raise Unavailable("no FlexAttention mask is made for this case")
        if isinstance(spec, Full) and not case.causal:
            return None
        # Compiled it takes little memory and tens of seconds once; as it is, a byte for each pair.
        lean = on_gpu and case.length > LONGEST_MASK_OF_PAIRS
        return create_block_mask(
            allowed, None, None, case.rows, case.length, device=inputs.device, _compile=lean
        )

    block_mask = build()  # compiles what builds the mask
    began = time.perf_counter()
    if block_mask is not None:
        block_mask = build()
    if on_gpu:
        torch.cuda.synchronize(inputs.device)
    setup_ms = (time.perf_counter() - began) * 1e3

    def call() -> torch.Tensor:
        out = attend(query, key, value, block_mask=block_mask, enable_gqa=case.kv_heads is not None)
        assert isinstance(out, torch.Tensor)
        return out

    return Contender(call, setup_ms=None if block_mask is None else setup_ms)


_VIA: dict[str, Callable[[Case, Inputs], Contender]] = {
    "naive": _naive,
    "merged": _merged,
    "select": _select,
    "list": _list,
    "sdpa": _sdpa(None),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "math": _sdpa(SDPBackend.MATH),
    "fa3": _fa3,
    "flex": _flex,
}

"""Who computes a case: the package's engines and the peers, each as one function to time.

``contender(via, case, inputs)`` returns the call, or raises ``Unavailable`` (or the peer's own
error), whose sentence the report prints in place of figures. What a peer prepares once (a block
mask, a compiled kernel) is prepared here, outside the timing, and its time is kept apart.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparse_attn as sa

from .cases import Case
from .contender import Build, Contender, Unavailable
from .inputs import Inputs, allowed_rows, select_blocks
from .masks import Band, Blocks, BlockTopK, Full, Sketched
from .storage import STORED

PEERS = ("cudnn", "flash", "math", "sdpa", "flex", "tuned flex", "fa3", "fa4")
COMPILED = ("flex", "tuned flex")  # and their kernels are compiled ahead

LONGEST_DENSE_MASK = 16384
FLEX_TILE = 128
LONGEST_MASK_OF_PAIRS = 32768


def contender(via: str, case: Case, inputs: Inputs) -> Contender:
    """Return the call that ``via`` names.

    Parameters
    ----------
    via
        ``ours``, or a name of ``STORED`` (storage.py) or ``_VIA``; what follows a slash is a
        setting: an engine (``ours/portable``) or a page size (``paged/16``).
    case
        What to compute.
    inputs
        Its tensors.

    Returns
    -------
    Contender
        The call and what was prepared for it.
    """
    name, _, setting = via.partition("/")
    if name == "ours":
        return _ours(case, inputs, setting or "auto")
    if name in STORED:
        return STORED[name](case, inputs, int(setting or 0))
    return _VIA[name](case, inputs)


def _ours(case: Case, inputs: Inputs, engine: str) -> Contender:
    query, key, value = inputs.query, inputs.key, inputs.value
    pattern = inputs.pattern(case)
    common: dict[str, Any] = {"is_causal": case.causal, "engine": engine}
    common |= {"softcap": case.softcap} if case.softcap else {}
    common |= inputs.extras
    served = sa.can_use(query, key, value, pattern, **common)
    attend = partial(sa.sparse_attention, query, key, value, pattern, **common)
    return Contender(attend, engine=str(served.engine))


def _function(case: Case, inputs: Inputs) -> Contender:
    """Call the pattern's own function, with the arguments that a user writes."""
    spec, tensors = case.spec, (inputs.query, inputs.key, inputs.value)
    if isinstance(spec, Full):
        return Contender(partial(sa.fused_attention, *tensors, is_causal=case.causal))
    assert isinstance(spec, Band)
    window = (spec.left, spec.right)
    return Contender(partial(sa.band_attention, *tensors, window, is_causal=case.causal))


def _naive(case: Case, inputs: Inputs) -> Contender:
    query, key, value = inputs.query, inputs.key, inputs.value
    if isinstance(case.spec, BlockTopK | Sketched):
        raise Unavailable("the naive engine takes block top-k as a block list only")
    pattern = inputs.pattern(case)

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
    return Contender(lambda: select_blocks(inputs, case).counts, attends=False)


def _compare(case: Case, inputs: Inputs) -> Contender:
    """Judge the pattern beside dense attention."""
    tensors, pattern = (inputs.query, inputs.key, inputs.value), inputs.pattern(case)
    judged = partial(sa.quality.compare, *tensors, pattern, is_causal=case.causal)
    return Contender(lambda: judged().mass, attends=False)


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


def _sdpa(backend: SDPBackend | None) -> Build:
    def build(case: Case, inputs: Inputs) -> Contender:
        query, key, value = inputs.query, inputs.key, inputs.value
        if case.softcap:
            raise Unavailable("SDPA has no softcap")
        mask = inputs.extras.get("attn_mask")
        if case.option and (mask is None or not _plain(case) or case.causal):
            raise Unavailable(f"SDPA is not tried with {case.option} here")
        if mask is None and not _plain(case):
            mask = _dense_mask(case, inputs)
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


def _fa4_lists(spec: Blocks, case: Case, inputs: Inputs) -> Any:
    """Return the case's block lists as flash-attn 4 takes them: all blocks are seen whole."""
    mask = inputs.block_mask(case)
    assert mask is not None
    flex = sa.BlockLayout.from_mask(mask, spec.block_q, spec.block_kv).to_flex()
    lists = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    partial_blocks = flex.kv_num_blocks, flex.kv_indices
    whole_blocks = flex.full_kv_num_blocks, flex.full_kv_indices
    return lists(*partial_blocks, *whole_blocks, block_size=(spec.block_q, spec.block_kv))


def _flash_attn(
    name: str,
    module: str,
    unlimited: int | None,
    lists: Callable[[Blocks, Case, Inputs], Any] | None = None,
    **settings_of_all: Any,
) -> Build:
    """Return what builds flash-attn's call; a window's open side is ``unlimited``."""

    def build(case: Case, inputs: Inputs) -> Contender:
        own = dict(settings_of_all)
        try:
            flash = importlib.import_module(module)
        except ImportError as error:
            raise Unavailable(f"{name} is not installed ({error})") from error
        spec = case.spec
        window: tuple[int | None, int | None] = (unlimited, unlimited)
        if isinstance(spec, Band) and not (spec.sinks or spec.global_tokens):
            left, right = (unlimited if side is None else side for side in (spec.left, spec.right))
            window = (left, 0 if case.causal else right)
        elif isinstance(spec, Blocks) and lists is not None and not case.causal:
            own["block_sparse_tensors"] = lists(spec, case, inputs)
        elif not isinstance(spec, Full):
            raise Unavailable(f"{name} does not serve this pattern")
        if case.option:
            raise Unavailable(f"{name} is not tried with {case.option}")
        query, key, value = (t.transpose(1, 2) for t in (inputs.query, inputs.key, inputs.value))
        settings: dict[str, Any] = own | {"causal": case.causal, "window_size": window}
        settings |= {"softcap": case.softcap} if case.softcap else {}

        def call() -> torch.Tensor:
            out = flash.flash_attn_func(query, key, value, **settings)
            out = out[0] if isinstance(out, tuple) else out
            assert isinstance(out, torch.Tensor)
            return out.transpose(1, 2)

        return Contender(call)

    return build


@cache
def _compiled_flex(mode: str) -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # One kernel a shape, as a user gets who compiles for his own; without this torch.compile turns
    # to dynamic shapes, and after eight of them to the eager form that materialises the scores.
    settings: Any = torch._dynamo.config
    settings.recompile_limit = 1000
    settings.accumulated_recompile_limit = 10000
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)
    return attend, create_block_mask


def _flex(mode: str, case: Case, inputs: Inputs) -> Contender:
    attend, create_block_mask = _compiled_flex(mode)
    query, key, value = inputs.query, inputs.key, inputs.value
    spec, shift, on_gpu = case.spec, case.length - case.rows, inputs.device.type == "cuda"
    used, bias = inputs.used, inputs.query
    if case.option == "bias":
        bias = inputs.extras["attn_mask"][0, 0]
    elif case.option not in ("", "padding"):
        raise Unavailable(f"FlexAttention is not tried with {case.option}")

    def allowed(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = j < used[b] if case.option == "padding" else spec.allowed(i + shift, j)
        return seen & (j <= i + shift) if case.causal else seen

    def score(
        s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        if case.option == "bias":
            return s + bias[i, j]
        return case.softcap * torch.tanh(s / case.softcap)

    def build() -> Any:
        if isinstance(spec, Blocks) and not case.causal:
            mask = inputs.block_mask(case)
            assert mask is not None
            return sa.BlockLayout.from_mask(mask, spec.block_q, spec.block_kv).to_flex()
        if isinstance(spec, Blocks) or spec.variant in ("topk", "block_topk"):
            raise Unavailable("no FlexAttention mask is made for this case")
        if isinstance(spec, Full) and not case.causal and case.option != "padding":
            return None
        # Compiled it takes little memory and tens of seconds once; as it is, a byte for each pair.
        batch = case.batch if case.option == "padding" else None
        lean = on_gpu and case.length > LONGEST_MASK_OF_PAIRS
        return create_block_mask(
            allowed, batch, None, case.rows, case.length, device=inputs.device, _compile=lean
        )

    block_mask = build()  # compiles what builds the mask
    began = time.perf_counter()
    if block_mask is not None:
        block_mask = build()
    if on_gpu:
        torch.cuda.synchronize(inputs.device)
    setup_ms = (time.perf_counter() - began) * 1e3

    settings: dict[str, Any] = {}
    if case.softcap or case.option == "bias":
        settings["score_mod"] = score
    if isinstance(spec, Blocks) and min(spec.block_q, spec.block_kv) < FLEX_TILE:
        tiles = {"BLOCK_M": min(spec.block_q, FLEX_TILE), "BLOCK_N": min(spec.block_kv, FLEX_TILE)}
        settings["kernel_options"] = tiles  # its own choice does not divide small blocks
    settings |= {"block_mask": block_mask, "enable_gqa": case.kv_heads is not None}

    def call() -> torch.Tensor:
        out = attend(query, key, value, **settings)
        assert isinstance(out, torch.Tensor)
        return out

    return Contender(call, setup_ms=None if block_mask is None else setup_ms)


_VIA: dict[str, Build] = {
    "function": _function,
    "naive": _naive,
    "merged": _merged,
    "select": _select,
    "compare": _compare,
    "list": _list,
    "sdpa": _sdpa(None),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "math": _sdpa(SDPBackend.MATH),
    "fa3": _flash_attn("flash-attn 3", "flash_attn_interface", -1, num_splits=0),  # its choice
    "fa4": _flash_attn("flash-attn 4", "flash_attn.cute", None, _fa4_lists),
    "flex": partial(_flex, "default"),
    "tuned flex": partial(_flex, "max-autotune-no-cudagraphs"),
}

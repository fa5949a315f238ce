"""`KeySketch`: every key in 2 or 4 bits a channel, to choose the pages that queries need."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.compiler import is_compiling

from . import ops
from ._checks import (
    Integer,
    as_int64,
    check_dense,
    check_kind,
    check_length,
    dtype_name,
    refuse,
)
from ._sketched import dequantized, ends_of_groups

__all__ = ["KeySketch"]

_OWNER = "KeySketch"
#: Tokens of a group; channels to whose multiple codes are padded (csrc/sketch_params.h).
GROUP = 64
CHANNELS = 64
#: Bits of a word of codes.
_WORD = 32
#: Slots that are sketched as they come. On a CPU more are sorted: a slot is compared with all
#: others unless the next one is of its group.
_FEW_SLOTS = 1024


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _dtype_of_ranges(key: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a sketch's ranges; keys of 8 bits leave a choice."""
    check_kind(_OWNER, "dtype", dtype, (torch.dtype, type(None)), "a torch.dtype or None")
    codes = key.dtype == torch.float8_e4m3fn
    served = (torch.bfloat16, torch.float16) if codes else (key.dtype,)
    if dtype is not None and dtype not in served:
        of_key = f"key's dtype {dtype_name(key.dtype)}"
        what = "dtype float16 or bfloat16 beside keys of float8_e4m3fn" if codes else of_key
        raise refuse(_OWNER, what, dtype_name(dtype))
    return served[0] if dtype is None else dtype


class KeySketch:
    """Every key in 2 or 4 bits a channel, for `BlockTopK` by ``sketch``, ``minmax`` or ``mean``.

    Of a group of 64 tokens it holds, by channel, the least and the greatest value (of which
    ``minmax`` makes its bounds), and of each token ``round((k - least) / (greatest - least) *
    (2**bits - 1))`` (of which ``mean`` makes its means). A last group of fewer tokens is sketched
    again whenever tokens come: appending gives what sketching all at once would. Nothing waits for
    the device, and lengths stay there, so decoding steps may be captured in a CUDA graph.

    Parameters
    ----------
    key : Tensor
        ``(B, Hkv, S, D)``, float32, float16, bfloat16 or float8_e4m3fn, D a multiple of 8 up to
        256; with ``paged=True`` a cache ``(pages, page_size, Hkv, D)``. Its last dimension is
        contiguous. Of float8_e4m3fn the sketch is of ``key.float() * key_scale``, rounded to
        `dtype`.
    bits : {2, 4}
        Of a channel's code.
    capacity : int, optional
        Tokens that it has room for, rounded up to a multiple of 64, at most 2^29 - 1. By default
        it grows, into new tensors.
    paged : bool
        A page has groups of its own (of 16 or 32 tokens where its size is no multiple of 64), so
        pages may be shared and reused. Its tokens come by `append_to_cache` with ``sketch=``.
    block_table, seqused_k : Tensor, optional
        As in `paged_attention`: what a paged cache holds already.
    key_scale : Tensor, optional
        What keys of float8_e4m3fn are multiplied by, as in `append`.
    dtype : torch.dtype, optional
        Of the ranges, which is that of the queries to come: float16 or bfloat16 (the default)
        beside keys of float8_e4m3fn, else key's.

    Attributes
    ----------
    bits : int
    paged : bool
    codes : Tensor
        int32, ``(B, Hkv, capacity, words)`` or ``(pages, Hkv, page_size, words)``.
    ranges : Tensor
        Of `dtype`, ``(B, Hkv, capacity / 64, 2, D)`` or ``(pages, Hkv, groups of a page, 2, D)``:
        least and greatest values.
    lengths : Tensor
        int32 ``(B,)``: tokens held; of a paged sketch ``(pages, groups of a page)``: tokens of each
        group that are held, from its start.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind, shape or dtype; bits other than 2 and 4; no room.

    Notes
    -----
    Codes between a group's extremes, by channel, as Liu et al. 2024 (KIVI) round keys; here they
    only rank, and the chosen keys are read in full.

    Examples
    --------
    >>> import torch
    >>> from sparse_attn import BlockTopK, KeySketch, block_topk_attention
    >>> query, key, value = torch.randn(1, 4, 1, 32), *torch.randn(2, 1, 2, 300, 32)
    >>> sketch = KeySketch(key[:, :, :299])
    >>> sketch.append(key[:, :, 299:])
    >>> pattern = dict(selector="sketch", block_size=16, budget_tokens=128, sketch=sketch)
    >>> block_topk_attention(query, key, value, **pattern).shape
    torch.Size([1, 4, 1, 32])
    """

    def __init__(
        self,
        key: torch.Tensor,
        bits: int = 2,
        *,
        capacity: int | None = None,
        paged: bool = False,
        block_table: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        key_scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dense(_OWNER, "key", key)
        check_kind(_OWNER, "bits", bits, Integer, "an int")
        check_kind(_OWNER, "paged", paged, bool, "a bool")
        if bits not in (2, 4):
            raise refuse(_OWNER, "bits of 2 or 4", bits)
        if key.dim() != 4:
            shape = "(pages, page_size, heads, head_dim)" if paged else "(batch, heads, length, D)"
            raise refuse(_OWNER, f"key of shape {shape}", tuple(key.shape))
        self.bits, self.paged = int(bits), paged
        dtype = _dtype_of_ranges(key, dtype)
        self._fixed = capacity is not None
        self._tokens = 0
        self.lengths: torch.Tensor
        self._open: torch.Tensor | None = None
        if paged:
            if capacity is not None:
                raise refuse(_OWNER, "capacity without paged=True", capacity)
            self._take_pages(key, key_scale, dtype, block_table, seqused_k)
            return
        if block_table is not None or seqused_k is not None:
            raise refuse(_OWNER, "paged=True with block_table and seqused_k", "paged=False")
        self._take_entries(key, key_scale, dtype, capacity)

    def _take_entries(
        self,
        key: torch.Tensor,
        key_scale: torch.Tensor | None,
        dtype: torch.dtype,
        capacity: int | None,
    ) -> None:
        """Sketch keys of batch entries, with room for more."""
        batch, heads, rows, head_dim = key.shape
        if capacity is not None:
            tokens, rows = rows, check_length(_OWNER, "capacity", capacity, 1)
            if tokens > _rounded(rows, GROUP):
                what = f"capacity of at least {tokens}, the tokens of key"
                raise refuse(_OWNER, what, capacity)
        self._allocate(key, dtype, (batch, heads), _rounded(max(rows, 1), GROUP), GROUP)
        self.lengths = key.new_zeros(batch, dtype=torch.int32)
        self._open = key.new_zeros(batch, heads, GROUP, head_dim, dtype=dtype)
        self.append(key, None, key_scale)

    def _take_pages(
        self,
        key: torch.Tensor,
        key_scale: torch.Tensor | None,
        dtype: torch.dtype,
        block_table: torch.Tensor | None,
        seqused_k: torch.Tensor | None,
    ) -> None:
        """Sketch what a paged cache holds; without a table it holds nothing yet."""
        pages, page_size, heads, _ = key.shape
        group = next(size for size in (64, 32, 16, max(page_size, 1)) if page_size % size == 0)
        self._allocate(key, dtype, (pages, heads), page_size, group)
        self.lengths = key.new_zeros(pages, page_size // group, dtype=torch.int32)
        if block_table is None and seqused_k is None:
            self.append(key, key.new_empty(0, dtype=torch.int64), key_scale)
            return
        check_dense(_OWNER, "block_table", block_table)
        check_dense(_OWNER, "seqused_k", seqused_k)
        assert block_table is not None and seqused_k is not None
        ends = ends_of_groups(_OWNER, key, block_table, seqused_k, group)
        self.append(key, ends, key_scale)

    def _allocate(
        self,
        key: torch.Tensor,
        dtype: torch.dtype,
        entries: tuple[int, int],
        rows: int,
        group: int,
    ) -> None:
        head_dim = key.shape[-1]
        words = _rounded(head_dim, CHANNELS) * self.bits // _WORD
        self.codes = key.new_zeros(*entries, rows, words, dtype=torch.int32)
        self.ranges = key.new_zeros(*entries, rows // group, 2, head_dim, dtype=dtype)

    @property
    def _tokens(self) -> int:
        """Tokens that the host knows of: a size, since traced code takes an int for a constant."""
        return self._count.shape[0]

    @_tokens.setter
    def _tokens(self, tokens: int) -> None:
        self._count = torch.empty(tokens, 0)

    @property
    def capacity(self) -> int:
        """Tokens that each batch entry, or page, has room for."""
        return self.codes.shape[2]

    def append(
        self,
        key: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
        key_scale: torch.Tensor | None = None,
    ) -> None:
        """Take in new tokens, in place.

        Parameters
        ----------
        key : Tensor
            The new keys ``(B, Hkv, n, D)``; of a paged sketch the cache itself, into which they
            have been written.
        slot_mapping : Tensor, optional
            ``(n,)``, int64 or converted to it, of a paged sketch: the slots of the new tokens, in
            any order. Pages are filled from their start: what lies after a new token in its group
            counts as unused.
        key_scale : Tensor, optional
            What keys of float8_e4m3fn are multiplied by, float32: 0-d or ``(Hkv,)``, of batch
            entries ``(B, Hkv)`` too; 1 by default.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; shapes, dtypes or devices that do not fit; no room for the
            tokens. In the replays of a CUDA graph, tokens past the capacity are left out, and the
            blocks that hold them are always kept.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import KeySketch
        >>> key = torch.randn(1, 2, 100, 16)
        >>> sketch = KeySketch(key[:, :, :70])
        >>> sketch.append(key[:, :, 70:])
        >>> torch.equal(sketch.codes, KeySketch(key).codes)
        True
        """
        owner = f"{_OWNER}.append"
        check_dense(owner, "key", key)
        key = key.detach()
        if key_scale is not None:
            check_dense(owner, "key_scale", key_scale)
            key_scale = key_scale.detach()
        if self.paged:
            check_dense(owner, "slot_mapping", slot_mapping)
            assert slot_mapping is not None
            slots = as_int64(owner, "slot_mapping", slot_mapping)
            # A traced length is not asked about: that would narrow the graph.
            if not is_compiling() and slots.device.type == "cpu" and slots.numel() > _FEW_SLOTS:
                # Of one dimension torch sorts on all threads, which wait for each other at length.
                slots = slots[None].sort().values[0]
            stored = (self.codes, self.ranges, self.lengths)
            ops.call("sketch_pages", (key, slots, *stored, key_scale), {}, written=stored)
            return
        if slot_mapping is not None:
            raise refuse(owner, "slot_mapping with paged=True alone", "one")
        tokens = self._tokens + (key.shape[2] if key.dim() == 4 else 0)
        if tokens > self.capacity:
            if self._fixed:
                raise refuse(owner, f"up to {self.capacity} tokens (the capacity)", tokens)
            self._grow(tokens)
        held: Any = (self.codes, self.ranges, self._open, self.lengths)
        key = dequantized(owner, key, key_scale, self.ranges.dtype)
        ops.call("append_to_sketch", (key, *held), {}, written=held)
        self._tokens = tokens

    def crop(self, key: torch.Tensor, key_scale: torch.Tensor | None = None) -> None:
        """Give up the tokens past the end of `key`, in place: those that a draft proposed in vain.

        A paged sketch needs no such call: tokens written to a slot replace what was there.

        Parameters
        ----------
        key : Tensor
            The keys that stay ``(B, Hkv, n, D)``, as many in each entry. Those of the last group
            are read. Tokens that replays of a CUDA graph took in are not counted among those held.
        key_scale : Tensor, optional
            As in `append`.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind, shape, dtype or device; more tokens than are held; a paged
            sketch.

        Examples
        --------
        >>> import torch
        >>> from sparse_attn import KeySketch
        >>> key = torch.randn(1, 2, 100, 16)
        >>> sketch = KeySketch(key)
        >>> sketch.crop(key[:, :, :90])
        >>> sketch.lengths
        tensor([90], dtype=torch.int32)
        """
        owner = f"{_OWNER}.crop"
        check_dense(owner, "key", key)
        if self.paged:
            raise refuse(owner, "a sketch that is not paged", repr(self))
        if key.dim() != 4 or key.shape[2] > self._tokens:
            what = f"key of shape (batch, heads, length, D) with a length up to {self._tokens}"
            raise refuse(owner, what, tuple(key.shape))
        whole = key.shape[2] // GROUP * GROUP  # tokens of groups that stay as they are
        # Refuses other keys while nothing has changed.
        self.append(key[:, :, :0], key_scale=key_scale)
        with torch.inference_mode():  # wherever the sketch was made
            self.lengths.clamp_(max=whole)
        self._tokens = whole
        self.append(key[:, :, whole:], key_scale=key_scale)

    def _grow(self, tokens: int) -> None:
        """Make room for `tokens`, twice of what there is at least."""
        codes, ranges = self.codes, self.ranges
        rows = _rounded(max(tokens, 2 * self.capacity), GROUP)
        self._allocate(ranges, ranges.dtype, (codes.shape[0], codes.shape[1]), rows, GROUP)
        self.codes[:, :, : codes.shape[2]] = codes
        self.ranges[:, :, : ranges.shape[2]] = ranges

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of the ops that select."""
        return {
            "sketch_codes": self.codes,
            "sketch_ranges": self.ranges,
            "sketch_lengths": self.lengths,
        }

    def __copy__(self) -> KeySketch:
        """Return a sketch of its own: tokens that one takes in are not those of the other."""
        return deepcopy(self)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.codes.shape[:3]))
        kind = "pages" if self.paged else "tokens"
        return f"KeySketch({shape} {kind}, bits={self.bits})"

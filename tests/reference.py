"""Inputs and patterns that the tests share; the float64 reference is ``sparse_attn.testing``."""

from dataclasses import dataclass, replace

import torch

import sparse_attn as sa

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Batch, query heads, key heads, queries, keys, head dim; the least height of listed blocks.

    Values have a head dim of their own where `Dv` is given.
    """

    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Sq: int = 65
    Skv: int = 65
    D: int = 64
    block: int = 16
    Dv: int | None = None

    def make(self, device, dtype=torch.float32, memory="contiguous"):
        """Random normal query, key and value."""
        q = (self.B, self.Hq, self.Sq, self.D)
        k = (self.B, self.Hkv, self.Skv, self.D)
        v = (*k[:3], self.Dv or self.D)
        if memory == "fused":
            return fused_projection(replace(self, Skv=self.Sq), device, dtype)
        return tuple(MEMORY[memory](shape, device, dtype) for shape in (q, k, v))


def contiguous(shape, device, dtype):
    return torch.randn(shape, device=device).to(dtype)


def transposed(shape, device, dtype):
    """A (B, S, H, D) tensor seen as (B, H, S, D)."""
    batch, heads, length, head_dim = shape
    return torch.randn((batch, length, heads, head_dim), device=device).to(dtype).transpose(1, 2)


def gaps(shape, device, dtype):
    """Strides and an offset that are no multiples of 16 bytes."""
    batch, heads, length, head_dim = shape
    buffer = torch.randn((batch, heads + 1, length + 2, head_dim + 3), device=device).to(dtype)
    return buffer[:, 1:, 2:, 1 : head_dim + 1]


def fused_projection(shape, device, dtype):
    """Query, key and value as slices of one (B, S, (Hq + 2 Hkv) D) buffer."""
    heads = shape.Hq + 2 * shape.Hkv
    buffer = torch.randn((shape.B, shape.Sq, heads, shape.D), device=device).to(dtype)
    return buffer.transpose(1, 2).split([shape.Hq, shape.Hkv, shape.Hkv], dim=1)


MEMORY = {"contiguous": contiguous, "transposed": transposed, "gaps": gaps}


def placed(offset, device):
    """A query_offset on the device, where it is a tensor."""
    return offset.to(device) if isinstance(offset, torch.Tensor) else offset


def random_layout(Sq, Skv, block_q, block_kv, device, batch=1, heads=1, density=0.5):
    mask = torch.rand((batch, heads, -(-Sq // block_q), -(-Skv // block_kv))) < density
    return sa.BlockLayout.from_mask(mask.to(device), block_q, block_kv)


def with_bits(layout, rows=5):
    """The layout with random bits in most of its blocks, of a few rows that they share."""
    words = -(-layout.block_kv // 32)
    size = (rows, layout.block_q, words)
    bits = torch.randint(-(2**31), 2**31, size, dtype=torch.int32)
    partial = torch.randint(-1, rows, layout.indices.shape, dtype=torch.int32)
    bits, partial = (tensor.to(layout.indices.device) for tensor in (bits, partial))
    sizes = (layout.block_q, layout.block_kv, layout.num_kv_blocks)
    return sa.BlockLayout._trusted(layout.counts, layout.indices, *sizes, partial, bits)


#: One pattern of every kind and feature, made for a shape and device.
PATTERNS = {
    "full": lambda s, device: sa.Full(),
    "band": lambda s, device: sa.Band((17, 5)),
    "band-unlimited": lambda s, device: sa.Band((None, 0)),
    "band-sinks": lambda s, device: sa.Band((9, 0), sinks=3),
    "band-globals": lambda s, device: sa.Band(4, sinks=1, global_tokens=3),
    "band-scattered": lambda s, device: sa.Band(
        4, sinks=2, global_tokens=torch.tensor([50, 0, 33], device=device)
    ),
    "dilated": lambda s, device: sa.Dilated((5, 2), 3),
    "dilated-sinks": lambda s, device: sa.Dilated((7, None), 2, sinks=5),
    "strided": lambda s, device: sa.Strided(9, 8),
    "blocks": lambda s, device: sa.BlockSparse(random_layout(s.Sq, s.Skv, s.block, 32, device)),
    "blocks-of-heads": lambda s, device: sa.BlockSparse(
        random_layout(s.Sq, s.Skv, max(s.block, 64), 16, device, s.B, s.Hq)
    ),
    "partial-blocks": lambda s, device: sa.BlockSparse(
        with_bits(random_layout(s.Sq, s.Skv, s.block, 48, device, heads=s.Hkv))
    ),
    "topk": lambda s, device: sa.TopK(7),
    "topk-in-blocks": lambda s, device: sa.TopK(
        7, inside=random_layout(s.Sq, s.Skv, s.block, 32, device)
    ),
    "block-topk": lambda s, device: sa.BlockTopK(s.block, budget_share=0.4, local_blocks=1),
}

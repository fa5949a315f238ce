"""`SparseMultiheadAttention` exported and compiled."""

import pytest
import torch
from test_nn import BATCH, EMBED, LENGTH, attn_mask, close, padding, tokens, twins
from torch import nn

import sparse_attn as sa

pytestmark = pytest.mark.usefixtures("on_device")


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("mask", ["none", "bool", "heads"])
def test_exports_with_masks_of_all_lengths(mask, strict):
    _, ours = twins(batch_first=True)
    ours.policy = sa.Policy(sa.Band((2, 0)), dense_below=0)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = ours

        def forward(self, x, pad, blocked=None):
            options = dict(key_padding_mask=pad, attn_mask=blocked, need_weights=False)
            return self.attend(x, x, x, **options)[0]

    def inputs(batch, length):
        blocked = attn_mask(mask, length, length, batch)
        tensors = tokens(batch, length, EMBED), padding("bool", length, batch)
        return tensors if blocked is None else (*tensors, blocked)

    layer, example = Layer().eval(), inputs(3, LENGTH)
    free = torch.export.Dim.DYNAMIC
    shapes = [{0: free, 1: free}] * 2
    if mask != "none":
        shapes.append(dict.fromkeys(range(example[2].dim()), free))
    program = torch.export.export(
        layer, example, dynamic_shapes=tuple(shapes), strict=strict
    ).module()
    for batch, length in [(3, LENGTH), (2, 41), (5, 7)]:
        close(program(*inputs(batch, length)), layer(*inputs(batch, length)))


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_an_exported_cross_attention_takes_equal_lengths_too(strict):
    _, ours = twins(batch_first=True)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = ours

        def forward(self, x, memory):
            return self.attend(x, memory, memory, need_weights=False)[0]

    layer, free = Layer().eval(), {1: torch.export.Dim.DYNAMIC}
    example = tokens(2, 20, EMBED), tokens(2, 50, EMBED)
    program = torch.export.export(layer, example, dynamic_shapes=(free, free), strict=strict)
    for lengths in [(20, 50), (33, 33), (50, 20)]:
        inputs = [tokens(2, length, EMBED) for length in lengths]
        close(program.module()(*inputs), layer(*inputs))


@torch.no_grad()
def test_compiles_to_one_graph():
    torch._dynamo.reset()
    _, ours = twins(batch_first=True)
    ours.policy = sa.Policy(sa.Band((2, 0)), decode=sa.Full())
    x = tokens(BATCH, LENGTH, EMBED)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    options = dict(key_padding_mask=padding("bool", LENGTH), need_weights=False)
    close(compiled(x, x, x, **options)[0], ours(x, x, x, **options)[0])

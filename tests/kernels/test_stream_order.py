"""Kernels overlap, those of one call and of short calls: each waits for what is in front of it."""

import pytest
import torch
from reference import Shape

import sparse_attn as sa
from sparse_attn.testing import assert_close_to_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def only_fused_engines(device, engine):
    if device != "cuda" or engine == "naive":
        pytest.skip("shows what fused kernels do on a GPU: run with --device cuda")


def spoil_free_memory():
    """Fill the memory that tensors are made of next, an engine's workspace among them."""
    torch.cuda.empty_cache()
    sizes = 1 << 20, 1 << 20, 20 << 20
    fillings = [torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda") for size in sizes]
    del fillings


def test_tiles_wait_for_their_order(attend, device):
    """Ordering so many tiles takes longer than the first of them, whose lists are empty."""
    shape = Shape(1, 32, 1, 32768, 4096, 128)
    query, key, value = shape.make(device, torch.bfloat16)
    mask = torch.zeros(1, 32, 512, 64, dtype=torch.bool, device=device)
    mask[..., ::7, 5] = True
    layout = sa.BlockLayout.from_mask(mask, 64, 64)
    out = torch.full_like(query, torch.nan)
    spoil_free_memory()
    attend(sa.BlockSparse(layout), query, key, value, out=out)
    keys, values = key[..., 320:384, :], value[..., 320:384, :]
    for head in (0, 20, 31):
        rows = query[:, head].unflatten(1, (512, 64))[:, ::7].flatten(1, 2)[:, None]
        got = out[:, head].unflatten(1, (512, 64))[:, ::7].flatten(1, 2)[:, None]
        assert_close_to_reference(got, rows, keys, values, sa.Full())
    assert not torch.isnan(out).any()


def test_merge_waits_for_its_chunks(attend, device):
    """So few tiles leave room for the merge while they run."""
    tensors = Shape(1, 4, 1, 100, 60000, 128).make(device, torch.bfloat16)
    pattern = sa.Band(60, global_tokens=100)
    for _ in range(3):
        spoil_free_memory()
        out = attend(pattern, *tensors, query_offset=0)
        assert_close_to_reference(out, *tensors, pattern, query_offset=0)


@pytest.mark.parametrize(
    ("Sq", "Skv", "heads"), [(60, 128, 4), (16, 4096, 8), (17, 4096, 8), (64, 4096, 32)]
)
def test_calls_wait_for_each_other(attend, device, Sq, Skv, heads):
    """Each reads what the one before has written, and writes what that one has read."""
    query, key, value = Shape(1, heads, heads // 4, Sq, Skv, 128).make(device, torch.bfloat16)
    buffers = [torch.empty_like(query), torch.empty_like(query)]

    def chain(between=lambda: None):
        buffers[0].copy_(query)
        for step in range(40):
            attend(sa.Full(), buffers[step % 2], key, value, scale=1.0, out=buffers[1 - step % 2])
            between()

    chain(torch.cuda.synchronize)
    expected = buffers[0].clone()
    graph = torch.cuda.CUDAGraph()  # in which the host keeps no call waiting
    with torch.cuda.graph(graph):
        chain()
    for _ in range(5):
        graph.replay()
        assert torch.equal(buffers[0], expected)

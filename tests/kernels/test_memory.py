"""What calls allocate: outputs, lists and scratch, but nothing with an entry for each pair."""

import pytest
import torch
from reference import PATTERNS, Shape

import sparse_attn as sa

MIB = 2**20


@pytest.fixture(autouse=True)
def counted(device, engine):
    if device != "cuda" or engine == "naive":
        pytest.skip("counts the memory of fused engines on a GPU: run with --device cuda")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_no_scores_are_stored(device, attend, name, dtype):
    """A bit for each pair would be 128 MiB."""
    shape = attend.fit(Shape(1, 1, 1, 32768, 32768, 64))
    tensors = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend(pattern, *tensors, return_lse=True)
    assert torch.cuda.max_memory_allocated() - before < 64 * MIB


def test_calls_of_mixed_lengths_reserve_no_more(device, attend):
    patterns = (
        sa.Full(),
        sa.Band((100, 0), sinks=4),
        sa.TopK(50),
        sa.BlockTopK(64, budget_share=0.2, local_blocks=1),
    )

    def calls():
        for length in (1, 17, 500, 3000, 9, 1200):
            query, key, value = Shape(2, 4, 2, length, length + 700, 64).make(
                device, torch.bfloat16
            )
            for pattern in patterns:
                attend(pattern, query, key, value, is_causal=True)
        return torch.cuda.memory_reserved()

    reserved = calls()
    assert all(calls() == reserved for _ in range(5))

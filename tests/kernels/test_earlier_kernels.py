"""A call waits for the kernel before it in the stream, also for one that lets dependents begin."""

import pytest
import torch
from reference import PATTERNS, Shape

import sparse_attn as sa

#: Lets dependents begin at once (PTX ISA, "griddepcontrol"), and writes its output late.
SOURCE = """
extern "C" __global__ void copy_late(float* to, const float* from, int count, int cycles) {
  asm volatile("griddepcontrol.launch_dependents;");
  long long start = clock64();
  while (clock64() - start < cycles) {
  }
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""
CYCLES = 20_000_000  # some 10 ms: longer than a call takes to its first kernel
SIZES = {"few": Shape(1, 4, 2, 4, 2100, 64), "tiles": Shape(2, 32, 2, 700, 700, 64)}


@pytest.fixture(scope="module")
def copy_late():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels let dependents begin from compute capability 9.0 on")
    kernel = torch.cuda._compile_kernel(SOURCE, "copy_late")

    def copy(tensors):
        """Tensors that get the values of `tensors` late."""
        values = torch.cat([tensor.flatten() for tensor in tensors])
        late = torch.zeros_like(values)
        words = values.view(torch.float32), late.view(torch.float32)
        torch.cuda.synchronize()
        kernel((1, 1, 1), (1024, 1, 1), [words[1], words[0], words[0].numel(), CYCLES])
        parts = late.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", PATTERNS)
def test_attention_waits(device, attend, copy_late, name, shape, dtype):
    shape = attend.fit(shape)
    tensors = shape.make(device, dtype)
    pattern = PATTERNS[name](shape, device)
    want = attend(pattern, *tensors, return_lse=True)
    got = attend(pattern, *copy_late(tensors), return_lse=True)
    assert all(map(torch.equal, got, want))
    late = copy_late(tensors)
    attend(pattern, *tensors)  # waits too, though it reads nothing late
    got = attend(pattern, *late, return_lse=True)
    assert all(map(torch.equal, got, want))


def test_tools_wait(device, copy_late):
    query, key, value = Shape(1, 4, 4, 300, 300, 64).make(device)
    state = (query, query[..., 0].contiguous(), key, key[..., 0].contiguous())
    want = sa.merge_states(*state)
    assert all(map(torch.equal, sa.merge_states(*copy_late(state)), want))
    pattern = sa.BlockTopK(16, budget_share=0.3, local_blocks=1)
    want = sa.select_blocks(query, key, pattern)
    assert sa.select_blocks(*copy_late((query, key)), pattern) == want
    mask = value > 0
    layout = sa.BlockLayout.from_mask(mask, 16, 16)
    assert sa.BlockLayout.from_mask(*copy_late((mask,)), 16, 16) == layout

// Kernels of a stream that overlap (PTX ISA, "griddepcontrol"; launch_dependent in launch.cuh).
// Code for older devices has no such instruction and is launched after its primary.
#pragma once

namespace sparse_attn::cuda::ptx {

/// blockIdx.x, read again: what is computed from it takes no registers across a loop.
__device__ __forceinline__ uint32_t block_number() {
  uint32_t number;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
  return number;
}

/// Once every thread block has called this or has ended, the blocks of a dependent may begin. A
/// kernel that is a dependent itself waits for its own primary first: else all kernels of a stream
/// begin at once, and those that wait take the places of those that work.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernel that this one depends on has ended; what it wrote is visible then. Every
/// thread block must call this, or the kernels after it would not wait for that one either.
__device__ __forceinline__ void wait_for_primary() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace sparse_attn::cuda::ptx

// Prefetch of global memory (PTX ISA, "prefetch"): a hint without a result, so that nobody waits.
#pragma once

namespace sparse_attn::cuda::ptx {

/// Brings the line of `address` to the multiprocessor's own cache.
__device__ __forceinline__ void prefetch_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

}  // namespace sparse_attn::cuda::ptx

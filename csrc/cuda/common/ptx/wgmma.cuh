// wgmma: matrix products of a warpgroup on shared-memory operands (PTX ISA, "Asynchronous Warpgroup
// Level Matrix Multiply-Accumulate"). The instructions themselves, one per width, are generated at
// build time. sm_90a.
#pragma once

#include <cstdint>

#include "../slab.h"
#include "wgmma_generated.cuh"

namespace sparse_attn::cuda::ptx {

/// Orders register and shared-memory accesses before the next products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most `kPending` committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving accesses of these registers across this point: wgmma reads and
/// writes them without its knowledge.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

/// Keeps the compiler from making what follows from the descriptor ahead of this point.
__device__ __forceinline__ void pin(uint64_t& descriptor) {
  uint32_t low = static_cast<uint32_t>(descriptor);
  asm volatile("" : "+r"(low));
  descriptor = descriptor >> 32 << 32 | low;
}

/// Widths in bytes of the swizzled rows of a shared-memory tile, with the descriptor's layout code.
enum class Swizzle : uint32_t { k128Bytes = 1, k64Bytes = 2 };

/// Descriptor of a swizzled tile at `address`. `stride` is the distance in bytes of groups of 8
/// rows; `leading` that of neighbouring slabs, read for operands whose rows are the summed
/// dimension.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading,
                                                     uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         static_cast<uint64_t>((leading >> 4) & 0x3FFF) << 16 |
         static_cast<uint64_t>((stride >> 4) & 0x3FFF) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

/// Descriptor of a tile in slabs (slab.h) whose columns are summed over.
__device__ __forceinline__ uint64_t slab_descriptor(uint32_t address) {
  return wgmma_descriptor(address, 16, 8 * kSlabRowBytes, Swizzle::k128Bytes);
}

/// The descriptor of a tile `bytes` further on.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

}  // namespace sparse_attn::cuda::ptx

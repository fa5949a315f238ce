// mbarrier: phases of arrivals in shared memory, on which the copy engine counts bytes (PTX ISA,
// "Parallel Synchronization and Communication Instructions: mbarrier"). sm_90.
#pragma once

#include <cstdint>

#include "shared.cuh"

namespace sparse_attn::cuda::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/// Makes initialised barriers visible to the copy engine, before the block synchronises.
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// One arrival for the calling warp.
__device__ __forceinline__ void mbarrier_arrive_warp(uint64_t& barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

/// Arrives, and lets the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace sparse_attn::cuda::ptx

// cp.async: copies of 8 or 16 bytes from global to shared memory that run on while the thread does
// other work (PTX ISA 9.7.9.25). Before sm_80 the copy is made at once, and waiting does nothing.
#pragma once

#include "shared.cuh"

namespace sparse_attn::cuda::ptx {

/// Copies 16 bytes, both sides 16-byte aligned; writes zeros and reads nothing unless `valid`.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  store_shared_16(to, valid ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0});
#endif
}

/// Copies the first `bytes` of 16 that are read once, zeros after them: their lines are the first
/// to leave the L2 cache.
__device__ __forceinline__ void cp_async_some_once(uint32_t to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
      "l"(from), "r"(bytes), "l"(policy)
      : "memory");
#else
  const auto* from_words = static_cast<const uint2*>(from);
  const uint2 low = bytes > 0 ? from_words[0] : uint2{}, high = bytes > 8 ? from_words[1] : uint2{};
  store_shared_16(to, {low.x, low.y, high.x, high.y});
#endif
}
/// The same for all of them, or for none.
__device__ __forceinline__ void cp_async_16_once(uint32_t to, const void* from, bool valid) {
  cp_async_some_once(to, from, valid ? 16 : 0);
}

/// Closes the group of the copies made since the last one.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most kPending of the thread's newest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace sparse_attn::cuda::ptx

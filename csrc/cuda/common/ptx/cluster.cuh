// Clusters of thread blocks, which see each other's shared memory (PTX ISA, "mapa",
// "barrier.cluster"). Code for older devices has a cluster of one.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda::ptx {

#if __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

/// Thread blocks of the cluster, and this one's place among them.
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

/// What lies at `pointer`'s place in the shared memory of thread block `rank`.
template <typename T>
__device__ __forceinline__ T* at_rank(T* pointer, [[maybe_unused]] uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t place = 0;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(place) : "l"(pointer), "r"(rank));
  return reinterpret_cast<T*>(place);
#else
  return pointer;
#endif
}

/// Waits for all threads of the cluster; what they wrote before is visible.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#else
  __syncthreads();
#endif
}

}  // namespace sparse_attn::cuda::ptx

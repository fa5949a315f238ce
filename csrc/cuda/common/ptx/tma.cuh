// TMA: copies of boxes of a 5-D tensor between global and shared memory by the copy engine (PTX
// ISA, "cp.async.bulk.tensor"). Elements outside the tensor load as zeros and are not stored.
// sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace sparse_attn::cuda::ptx {

/// L2 eviction priorities, as createpolicy encodes them.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

/// Coordinates of a box's first element, innermost dimension first.
struct BoxCoordinates {
  int32_t x[5];
};

/// Copies the box to shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map,
                                         const BoxCoordinates& at, uint32_t barrier,
                                         uint64_t eviction) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(at.x[0]), "r"(at.x[1]), "r"(at.x[2]), "r"(at.x[3]), "r"(at.x[4]),
      "l"(eviction)
      : "memory");
}

/// Brings `bytes` consecutive bytes to L2; address and bytes are multiples of 16.
__device__ __forceinline__ void prefetch_to_l2(const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

/// Copies a box from shared memory, in this thread's open group of stores.
__device__ __forceinline__ void tma_store(uint32_t source, const CUtensorMap* map,
                                          const BoxCoordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(source), "r"(at.x[0]), "r"(at.x[1]), "r"(at.x[2]), "r"(at.x[3]), "r"(at.x[4])
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until this thread's stores have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Waits until this thread's stores are complete.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Orders this thread's shared-memory accesses before those of the copy engine and of wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace sparse_attn::cuda::ptx

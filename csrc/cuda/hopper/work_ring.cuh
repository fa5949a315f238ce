// The ring of query tiles' plans: how a warp takes the next one and gives it back.
#pragma once

#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/shared.cuh"
#include "config.h"

namespace sparse_attn::cuda::hopper {

template <class C>
using WorkRing = Ring<SharedStorage<C>::kWorkSlots>;

/// Waits for the plan at the ring's position; past the last tile it has no batch entry.
template <class C>
__device__ __forceinline__ const auto& wait_work(const SharedStorage<C>& smem,
                                                 const WorkRing<C>& ring) {
  ptx::mbarrier_wait(ptx::shared_address(&smem.work_full[ring.index]), ring.parity);
  return smem.work[ring.index];
}

/// Gives the plan back, and goes on to the next one; all lanes of the warp call it.
template <class C>
__device__ __forceinline__ void release_work(SharedStorage<C>& smem, WorkRing<C>& ring, int lane) {
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem.work_empty[ring.index]));
  ring.advance();
}

}  // namespace sparse_attn::cuda::hopper

// Prefix sums over the threads of a block: where each thread's share of a list begins.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda {

/// The sum of `value` over the threads before this one, of a block of `kThreads`. All of them call
/// it, and meet before they call it again.
template <int kThreads>
__device__ __forceinline__ int32_t sum_before(int32_t value) {
  __shared__ int32_t of_warps[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t before = value;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) of_warps[warp] = before;
  __syncthreads();
  before -= value;
  for (int w = 0; w < warp; ++w) before += of_warps[w];
  return before;
}

}  // namespace sparse_attn::cuda

// Prefix sums over the threads of a block: where each thread's share of a list begins.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda {

/// The sum of a number over the threads before one, and over all.
struct Sums {
  int32_t before, all;
};

/// Those of `value` over a block of `kThreads`. All of them call it, and meet before they call it
/// again.
template <int kThreads>
__device__ __forceinline__ Sums sums_of_block(int32_t value) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32, "a lane reads the sum of each warp");
  __shared__ int32_t of_warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t before = value;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) of_warps[warp] = before;
  __syncthreads();
  int32_t all = lane < kWarps ? of_warps[lane] : 0;
  int32_t of_before = lane < warp ? all : 0;
  for (int step = 16; step > 0; step /= 2) {
    all += __shfl_xor_sync(~0u, all, step);
    of_before += __shfl_xor_sync(~0u, of_before, step);
  }
  return {before - value + of_before, all};
}

}  // namespace sparse_attn::cuda

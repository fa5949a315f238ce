// From the masses of tiles to shares of blocks: each row's share of a block is that of its tiles in
// the row's sum, and a list's estimate adds up its rows. A thread block a query head.
#include "../common/launch.cuh"
#include "sketch.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kShareThreads = 512;
constexpr int kShareWarps = kShareThreads / 32;

/// The logarithm of the sum of exp(mass) over those that are numbers; one order of additions.
__device__ float sum_of_masses(const float* masses, int32_t tiles, float2 (&warps)[kShareWarps]) {
  float m = -INFINITY, l = 0.0f;
  auto merge = [&](float other_m, float other_l) {
    const float top = fmaxf(m, other_m);
    if (top == -INFINITY) return;
    l = l * expf(m - top) + other_l * expf(other_m - top);
    m = top;
  };
  for (int32_t tile = threadIdx.x; tile < tiles; tile += kShareThreads) {
    if (!isnan(masses[tile])) merge(masses[tile], 1.0f);
  }
  for (int step = 16; step > 0; step /= 2) {
    const float other_m = __shfl_xor_sync(~0u, m, step);
    const float other_l = __shfl_xor_sync(~0u, l, step);
    merge(other_m, other_l);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = {m, l};
  __syncthreads();
  m = warps[0].x;
  l = warps[0].y;
  for (int warp = 1; warp < kShareWarps; ++warp) merge(warps[warp].x, warps[warp].y);
  return l > 0.0f ? m + logf(l) : 0.0f;
}

__global__ void __launch_bounds__(kShareThreads)
    add_shares(const SelectParams params, const float* masses, float* shares) {
  __shared__ float sums[kSketchQueries];
  __shared__ float2 warps[kShareWarps];
  const int64_t head = blockIdx.x;  // of [B, Hq]
  const int32_t rows = params.rows(head / params.problem.heads_q);
  const int32_t tiles = ceil_div(params.problem.seq_kv, kSketchTile);
  masses += head * params.problem.seq_q * tiles;
  for (int32_t row = 0; row < rows; ++row) {
    const float sum = sum_of_masses(masses + row * tiles, tiles, warps);
    if (threadIdx.x == 0) sums[row] = sum;
  }
  __syncthreads();
  const int32_t per_block = params.block_kv / kSketchTile;
  for (int32_t block = threadIdx.x; block < params.num_kv; block += kShareThreads) {
    float share = 0.0f;
    const int32_t end = imin((block + 1) * per_block, tiles);
    for (int32_t row = 0; row < rows; ++row) {
      for (int32_t tile = block * per_block; tile < end; ++tile) {
        share += expf(masses[row * tiles + tile] - sums[row]);
      }
    }
    shares[head * params.num_kv + block] = share;
  }
}

}  // namespace

Status launch_sketch_shares(const SelectParams& params, const float* masses, float* shares) {
  const auto heads = static_cast<uint32_t>(params.problem.batch * params.problem.heads_q);
  add_shares<<<heads, kShareThreads, 0, to_stream(params.stream)>>>(params, masses, shares);
  return launched();
}

}  // namespace sparse_attn::cuda

// Sorts query tiles by the lengths of their lists, coarsely, so that tiles of one head stay
// together: class c holds lists of up to 1 / 2^c of the longest that may be. One thread block; each
// thread counts the classes in its stretch of tiles, a prefix sum over (class, thread) says where
// its tiles go.
#include "../common/launch.cuh"
#include "../common/ptx/grid.cuh"
#include "tile_order.h"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int kThreads = 1024;
constexpr int kClasses = 8;

__device__ __forceinline__ int32_t class_of(const Arguments& args, int32_t block_q, int32_t tile) {
  const AttentionParams& params = args.params;
  const BlockList& list = params.pattern.list;
  const TilePlace place = place_of(args, tile);
  const int32_t count =
      list.runs(place.problem / params.problem.heads_q, place.problem % params.problem.heads_q,
                place.row_block * block_q / list.block_q, list.block_kv)
          .count;
  int32_t c = 0;
  while (c < kClasses - 1 && count <= list.max_count >> (c + 1)) ++c;
  return c;
}

/// Replaces the thread's `kClasses` entries of an array of the block's by the sums of all before.
__device__ __forceinline__ void prefix_sums(int32_t* entries) {
  __shared__ int32_t of_warps[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* own = entries + threadIdx.x * kClasses;
  int32_t sum = 0;
  for (int i = 0; i < kClasses; ++i) sum += own[i];
  int32_t before = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) of_warps[warp] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += of_warps[w];
  for (int i = 0; i < kClasses; ++i) {
    const int32_t entry = own[i];
    own[i] = before;
    before += entry;
  }
}

__global__ void __launch_bounds__(kThreads)
    order_kernel(const __grid_constant__ Arguments args, int32_t block_q, int32_t dealt) {
  ptx::launch_dependents();
  __shared__ int32_t next[kClasses * kThreads];  // [class, thread]
  const int32_t stretch = ceil_div(args.num_tiles - dealt, kThreads);
  const int32_t begin = dealt + static_cast<int32_t>(threadIdx.x) * stretch;
  const int32_t end = imin(begin + stretch, args.num_tiles);
  int32_t* own = next + threadIdx.x;
  for (int c = 0; c < kClasses; ++c) own[c * kThreads] = 0;
  for (int32_t tile = begin; tile < end; ++tile) ++own[class_of(args, block_q, tile) * kThreads];
  if (threadIdx.x == 0) *args.counter = 0;
  __syncthreads();
  prefix_sums(next);
  __syncthreads();
  for (int32_t tile = begin; tile < end; ++tile) {
    args.order[own[class_of(args, block_q, tile) * kThreads]++] = tile;
  }
}

__global__ void zero_kernel(int32_t* counter) {
  ptx::launch_dependents();
  *counter = 0;
}

}  // namespace

Status order_tiles(const Arguments& args, int32_t block_q, int32_t dealt) {
  cudaStream_t stream = to_stream(args.params.stream);
  if (args.order != nullptr) {
    order_kernel<<<1, kThreads, 0, stream>>>(args, block_q, dealt);
  } else {
    zero_kernel<<<1, 1, 0, stream>>>(args.counter);
  }
  return launched();
}

}  // namespace sparse_attn::cuda::hopper

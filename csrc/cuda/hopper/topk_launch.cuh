// Token top-k by two kernels: thresholds of the rows, then the plain kernel that keeps the scores
// above them.
#pragma once

#include <algorithm>

#include "../portable/query_tile.cuh"
#include "../topk/rank.cuh"
#include "launch.cuh"
#include "topk_scores.cuh"

namespace sparse_attn::cuda::hopper {

template <typename C>
struct alignas(1024) RankMemory {
  uint8_t tiles[C::kShape.smem_bytes()];
  topk::RankStorage<C> storage;
  uint64_t full[C::kShape.slots];
  int32_t next;  // tile of the block
};

/// What the ranking kernel is launched with: as many blocks as run at once, which claim tiles.
struct RankLaunch {
  portable::GridPlan plan;
  uint2 grid;  // of the plan, whose places are numbered row by row
  CUtensorMap keys;
  Threshold* thresholds;
  int32_t* counter;  // zeroed; null where each block has one tile
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    rank_kernel(const __grid_constant__ AttentionParams params,
                const __grid_constant__ RankLaunch launch) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  char* smem = portable::held_address(dynamic_smem);
  auto& memory = *reinterpret_cast<RankMemory<C>*>(smem);
  const uint32_t full = ptx::shared_address(memory.full);
  portable::QueryTile<C> tile(params, smem, true);
  WgmmaScores<C> scores(tile, launch.keys, ptx::shared_address(smem), full);
  if (threadIdx.x == 0) WgmmaScores<C>::init(full);
  const uint2 grid = launch.grid;
  for (uint32_t at = blockIdx.x; at < grid.x * grid.y;) {
    if (tile.find(launch.plan, {at % grid.x, at / grid.x})) {
      tile.prepare();
      scores.start();
      topk::rank_rows<C>(scores, memory.storage, launch.thresholds);
    }
    if (launch.counter == nullptr) break;
    if (threadIdx.x == 0) memory.next = gridDim.x + atomicAdd(launch.counter, 1);
    __syncthreads();
    at = memory.next;
  }
}

template <Dtype kDtype, int HEAD_DIM>
Status launch_topk(const Arguments& args) {
  using T = std::conditional_t<kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;
  using Rank = RankConfig<T, HEAD_DIM>;
  static_assert(sizeof(RankMemory<Rank>) <= kSharedBytesOfSm - kReservedBytes,
                "shared memory of a block");
  const AttentionParams& params = args.params;
  RankLaunch rank = {};
  rank.plan = portable::plan_grid(params, Rank::BLOCK_Q);
  rank.thresholds = args.thresholds;
  TensorMaps maps;
  TileCoordinates coordinates;
  const BoxShape box = {kWarpgroup / 2, HEAD_DIM,       kConsumerRows, kWarpRows,
                        Rank::BLOCK_KV, Rank::BLOCK_KV, Rank::BLOCK_KV};
  Status status = make_tensor_maps(params, box, &maps, &coordinates);
  if (!status.ok()) return status;
  rank.keys = maps.key[kShortClass];
  rank.grid = {static_cast<uint32_t>(rank.plan.tiles) * rank.plan.heads_at_once,
               static_cast<uint32_t>(ceil_div(rank.plan.heads, rank.plan.heads_at_once))};
  int32_t multiprocessors = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  if (error != cudaSuccess) return to_status(error);
  const uint32_t tiles = rank.grid.x * rank.grid.y;
  const uint32_t blocks = std::min(static_cast<uint32_t>(multiprocessors), tiles);
  cudaStream_t stream = to_stream(params.stream);
  if (blocks < tiles) {
    rank.counter = static_cast<int32_t*>(params.workspace);
    error = cudaMemsetAsync(rank.counter, 0, sizeof(int32_t), stream);
    if (error != cudaSuccess) return to_status(error);
  }
  constexpr int kBytes = sizeof(RankMemory<Rank>);
  status = allow_shared_bytes(hopper::rank_kernel<Rank>, kBytes);
  if (!status.ok()) return status;
  hopper::rank_kernel<Rank><<<blocks, Rank::kThreads, kBytes, stream>>>(params, rank);
  status = launched();
  if (!status.ok()) return status;
  constexpr Entry kTop = find_kernel(HEAD_DIM, {Features::of(Feature::kTopK)});
  static_assert(kTop.keys() == Rank::BLOCK_KV, "both passes have the same tiles");
  return launch<Config<kDtype, HEAD_DIM, kTop.kernel>>(args);
}

}  // namespace sparse_attn::cuda::hopper

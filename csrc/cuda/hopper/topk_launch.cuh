// Token top-k by two kernels: thresholds of the rows, then the plain kernel that keeps the scores
// above them.
#pragma once

#include "../portable/topk_rank.cuh"
#include "launch.cuh"
#include "topk_scores.cuh"

namespace sparse_attn::cuda::hopper {

template <typename C>
struct alignas(1024) RankMemory {
  uint8_t tiles[C::kShape.smem_bytes()];
  portable::RankStorage<C> storage;
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    rank_kernel(const __grid_constant__ AttentionParams params,
                const __grid_constant__ portable::GridPlan plan, Threshold* thresholds) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  char* smem = portable::held_address(dynamic_smem);
  auto& memory = *reinterpret_cast<RankMemory<C>*>(smem);
  portable::QueryTile<C> tile(params, smem, true);
  if (!tile.find(plan)) return;
  WgmmaScores<C> scores(tile, ptx::shared_address(smem));
  tile.prepare();
  scores.plan();
  portable::rank_rows<C>(scores, memory.storage, thresholds);
  ptx::cp_async_wait<0>();  // of queries that had no score to make
}

template <Dtype kDtype, int HEAD_DIM>
Status launch_topk(const Arguments& args, Threshold* thresholds) {
  using T = std::conditional_t<kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;
  using Rank = RankConfig<T, HEAD_DIM>;
  static_assert(sizeof(RankMemory<Rank>) <= kSharedBytesOfSm - kReservedBytes,
                "shared memory of a block");
  const AttentionParams& params = args.params;
  const portable::GridPlan plan = portable::plan_grid<Rank::BLOCK_Q>(params);
  const dim3 blocks(static_cast<uint32_t>(plan.tiles) * plan.heads_at_once,
                    ceil_div(plan.heads, plan.heads_at_once));
  constexpr int kBytes = sizeof(RankMemory<Rank>);
  cudaError_t error = cudaFuncSetAttribute(hopper::rank_kernel<Rank>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return to_status(error);
  hopper::rank_kernel<Rank>
      <<<blocks, Rank::kThreads, kBytes, to_stream(params.stream)>>>(params, plan, thresholds);
  Status status = launched();
  if (!status.ok()) return status;
  Arguments top = args;
  top.thresholds = thresholds;
  return launch<Config<kDtype, HEAD_DIM, Rank::BLOCK_KV, 2, KernelKind::kTop>>(top);
}

}  // namespace sparse_attn::cuda::hopper

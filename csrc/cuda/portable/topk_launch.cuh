// Plain token top-k by its two kernels, for the files that instantiate them.
#pragma once

#include "../topk/rank.cuh"
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    rank_kernel(const __grid_constant__ AttentionParams params,
                const __grid_constant__ GridPlan plan, Threshold* thresholds) {
  extern __shared__ __align__(128) char dynamic_smem[];
  char* smem = held_address(dynamic_smem);
  auto& storage = *reinterpret_cast<topk::RankStorage<Config>*>(smem + Config::kShape.smem_bytes());
  QueryTile<Config> tile(params, smem, true);
  if (!tile.find(plan)) return;
  const uint32_t ring = ptx::shared_address(smem);
  tile.load_queries(ring);
  ptx::cp_async_commit();
  tile.prepare();
  ptx::cp_async_wait<0>();
  __syncthreads();
  typename Config::Products products;
  products.start(ring + threadIdx.x / 32 * Config::kWarpRows * Config::kPitch);
  __syncthreads();
  ScoreSource<Config> scores{tile, products, ring};
  topk::rank_rows<Config>(scores, storage, thresholds);
}

template <typename T, int HEAD_DIM>
Status launch_topk_as(const AttentionParams& params, const LaunchChoice& choice) {
  using Rank = Config<T, KernelKind::kRank, HEAD_DIM>;
  using Top = Config<T, KernelKind::kTop, HEAD_DIM>;
  static_assert(Rank::BLOCK_Q == Top::BLOCK_Q, "both walk the same grid");
  constexpr int32_t kRankBytes = kRankRowBytes * Rank::BLOCK_Q;
  static_assert(sizeof(topk::RankStorage<Rank>) == kRankBytes,
                "topk_fits counts what the pass holds");
  GridPlan plan = plan_grid(params, Rank::BLOCK_Q);
  const dim3 blocks(static_cast<uint32_t>(plan.tiles) * plan.heads_at_once,
                    ceil_div(plan.heads, plan.heads_at_once));
  Threshold* thresholds = static_cast<Threshold*>(choice.thresholds);
  Status status = launch_kernel(rank_kernel<Rank>, blocks, Rank::kThreads,
                                Rank::kShape.smem_bytes() + kRankBytes, params.stream, params, plan,
                                thresholds);
  if (!status.ok()) return status;
  return launch_kernel(attention_kernel<Top>, blocks, Top::kThreads,
                       Top::kShape.smem_bytes() + kTopRowBytes * Top::BLOCK_Q, params.stream,
                       params, plan, thresholds, true, NoPartials{});
}

template <int HEAD_DIM>
Status launch_topk(const AttentionParams& params, const LaunchChoice& choice) {
  if (params.problem.dtype == Dtype::kFloat16)
    return launch_topk_as<__half, HEAD_DIM>(params, choice);
  return launch_topk_as<__nv_bfloat16, HEAD_DIM>(params, choice);
}

}  // namespace sparse_attn::cuda::portable

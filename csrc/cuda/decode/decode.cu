// The decode engine: few queries, split over their keys. The workspace of the partial results and
// the two launches: chunks, then the merge.
#include "../common/launch.cuh"
#include "../engines.h"
#include "config.cuh"
#include "launch.h"
#include "row_tile.cuh"

namespace sparse_attn::cuda {
namespace decode {
namespace {

int32_t attribute(cudaDeviceAttr name, int32_t device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

/// The shape of the kernel that serves a head dim; it is the same for both dtypes.
template <typename Function>
auto with_config(int32_t head_dim, const Function& function) {
  switch (head_dim_bucket(head_dim)) {
    case 64:
      return function(Config<__half, 64, kFragmentRows>{});
    case 128:
      return function(Config<__half, 128, kFragmentRows>{});
    default:
      return function(Config<__half, 256, kFragmentRows>{});
  }
}

SplitGrid grid_of(const AttentionParams& params) {
  return with_config(params.problem.widest_dim(), [&](auto config) {
    using Shape = decltype(config);
    DeviceShape device;
    device.resident =
        attribute(cudaDevAttrMultiProcessorCount, params.device) * Shape::kBlocksPerSm;
    const int32_t smem = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, params.device);
    if constexpr (has_tall_tiles(Shape::HEAD_DIM)) {
      using Tall = Config<typename Shape::T, Shape::HEAD_DIM, kTallRows>;
      constexpr int32_t kTallBytes = Tall::kSmemBytes + sizeof(TileState<Tall>);
      device.tall = smem >= kTallBytes;
    }
    return plan_grid(params, device);
  });
}

int64_t rows_of(const AttentionParams& params) {
  return int64_t{params.problem.batch} * params.problem.heads_q * params.problem.seq_q;
}

int64_t out_bytes(const AttentionParams& params, const SplitGrid& grid) {
  return aligned_bytes(rows_of(params) * grid.max_chunks * params.problem.value_dim *
                       static_cast<int64_t>(sizeof(float)));
}

int64_t state_bytes(const AttentionParams& params, const SplitGrid& grid) {
  return aligned_bytes(rows_of(params) * grid.max_chunks * static_cast<int64_t>(sizeof(float2)));
}

int64_t count_bytes(const AttentionParams& params) {
  return aligned_bytes(rows_of(params) * static_cast<int64_t>(sizeof(int32_t)));
}

int64_t workspace_bytes(const AttentionParams& params) {
  SplitGrid grid = grid_of(params);
  return out_bytes(params, grid) + state_bytes(params, grid) + count_bytes(params);
}

Status run(const AttentionParams& params) {
  LaunchPlan plan;
  plan.grid = grid_of(params);
  plan.aligned = !params.features.has(Feature::kUnaligned);
  char* memory = static_cast<char*>(params.workspace);
  plan.partials.out = reinterpret_cast<float*>(memory);
  memory += out_bytes(params, plan.grid);
  plan.partials.state = reinterpret_cast<float2*>(memory);
  memory += state_bytes(params, plan.grid);
  plan.partials.chunks = reinterpret_cast<int32_t*>(memory);
  plan.partials.rows = params.problem.seq_q;
  plan.partials.heads = params.problem.batch * params.problem.heads_q;
  plan.partials.max_chunks = plan.grid.max_chunks;
  plan.partials.columns = params.problem.value_dim;

  Status status = with_config(params.problem.widest_dim(), [&](auto config) {
    return launch<decltype(config)::HEAD_DIM>(params, plan);
  });
  return status.ok() ? merge_chunks(params, plan.partials) : status;
}

}  // namespace
}  // namespace decode

const Engine kDecode = {"decode", decode::workspace_bytes, decode::run};

}  // namespace sparse_attn::cuda

// The small engine: sequences of up to 128 keys, a launch without a workspace.
#include "../common/launch.cuh"
#include "../engines.h"
#include "kernel.cuh"

namespace sparse_attn::cuda {
namespace small {
namespace {

template <typename Config>
Status launch(const AttentionParams& params, const Grid& grid) {
  const bool plain = has_plain_scores(params) && params.features.within(kIntervals);
  auto kernel = plain ? small_kernel<Config, true> : small_kernel<Config, false>;
  const int32_t shared_bytes = grid.shared_bytes(Config::kPitch);
  const Status status = allow_shared_bytes(kernel, shared_bytes);
  if (!status.ok()) return status;
  const LaunchShape shape = {static_cast<uint32_t>(grid.blocks()),
                             static_cast<uint32_t>(grid.threads()),
                             static_cast<size_t>(shared_bytes), to_stream(params.stream)};
  return launch_dependent(kernel, shape, params, grid);
}

template <typename T, int HEAD_DIM>
Status launch_for_keys(const AttentionParams& params, const Grid& grid) {
  switch (kernel_keys(params.problem.seq_kv)) {
    case 32:
      return launch<Config<T, HEAD_DIM, 32>>(params, grid);
    case 64:
      return launch<Config<T, HEAD_DIM, 64>>(params, grid);
    default:
      return launch<Config<T, HEAD_DIM, 128>>(params, grid);
  }
}

template <typename T>
Status launch_for_head_dim(const AttentionParams& params, const Grid& grid) {
  switch (kernel_head_dim(params.problem.widest_dim())) {
    case 32:
      return launch_for_keys<T, 32>(params, grid);
    case 64:
      return launch_for_keys<T, 64>(params, grid);
    default:
      return launch_for_keys<T, 128>(params, grid);
  }
}

int64_t workspace_bytes(const AttentionParams&) { return 0; }

Status run(const AttentionParams& params) {
  const Grid grid = plan_grid(params.problem);
  return params.problem.dtype == Dtype::kFloat16 ? launch_for_head_dim<__half>(params, grid)
                                                 : launch_for_head_dim<__nv_bfloat16>(params, grid);
}

}  // namespace
}  // namespace small

const Engine kSmall = {"small", small::workspace_bytes, small::run};

}  // namespace sparse_attn::cuda

// The definition of launch (launch.h), for the files that instantiate it.
#pragma once

#include "../common/launch.cuh"
#include "kernel.cuh"
#include "launch.h"
#include "topk.cuh"

namespace sparse_attn::cuda::portable {

/// Sets the kernel's shared memory and the grid, and launches.
template <typename Kernel, typename... Arguments>
Status launch_kernel(Kernel kernel, dim3 blocks, int32_t threads, int32_t smem_bytes, void* stream,
                     const Arguments&... arguments) {
  const Status status = allow_shared_bytes(kernel, smem_bytes);
  if (!status.ok()) return status;
  kernel<<<blocks, threads, smem_bytes, to_stream(stream)>>>(arguments...);
  return launched();
}

template <typename Config>
Status launch_config(const AttentionParams& params, const LaunchChoice& choice) {
  constexpr TileShape kShape = Config::kShape;
  GridPlan plan = plan_grid(params, Config::BLOCK_Q);
  uint32_t chunks = 1;
  typename Config::Partials partials = {};
  if constexpr (Config::kChunks) {
    partials = choice.partials;
    chunks = partials.max_chunks;
  }
  const dim3 blocks(static_cast<uint32_t>(plan.tiles) * plan.heads_at_once,
                    ceil_div(plan.heads, plan.heads_at_once), chunks);
  Threshold* thresholds = static_cast<Threshold*>(choice.thresholds);
  if constexpr (Config::kGeneral && !Config::kChunks) {
    if (thresholds != nullptr) {
      constexpr int kMostBits = 8;
      constexpr int kLeastBits = 5;
      int bits = kMostBits;
      while (bits > kLeastBits &&
             kShape.smem_bytes() + selection_bytes<Config::BLOCK_Q>(bits) > choice.smem_limit) {
        --bits;
      }
      Status status = launch_kernel(threshold_kernel<Config>, blocks, Config::kThreads,
                                    kShape.smem_bytes() + selection_bytes<Config::BLOCK_Q>(bits),
                                    params.stream, params, plan, thresholds, choice.aligned, bits);
      if (!status.ok()) return status;
    }
  }
  Status status =
      launch_kernel(attention_kernel<Config>, blocks, Config::kThreads, kShape.smem_bytes(),
                    params.stream, params, plan, thresholds, choice.aligned, partials);
  if constexpr (Config::kChunks) {
    if (status.ok() && chunks > 1) return join_chunks(params, partials);
  }
  return status;
}

template <KernelKind kKind, int HEAD_DIM>
Status launch(const AttentionParams& params, const LaunchChoice& choice) {
  if constexpr (is_float(kKind)) {
    return launch_config<Config<float, kKind, HEAD_DIM>>(params, choice);
  } else if (params.problem.dtype == Dtype::kFloat16) {
    return launch_config<Config<__half, kKind, HEAD_DIM>>(params, choice);
  } else {
    return launch_config<Config<__nv_bfloat16, kKind, HEAD_DIM>>(params, choice);
  }
}

}  // namespace sparse_attn::cuda::portable

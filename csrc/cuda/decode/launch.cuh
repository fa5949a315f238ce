// The definition of launch<HEAD_DIM> (launch.h), for the files that instantiate it.
#pragma once

#include "../common/launch.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace sparse_attn::cuda::decode {

template <typename Config>
Status launch_config(const AttentionParams& params, const LaunchPlan& plan) {
  const Pattern& pattern = params.pattern;
  bool strided = pattern.dilation > 1 || pattern.lead.step > 1;
  auto kernel = strided ? split_kernel<Config, true> : split_kernel<Config, false>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes);
  if (error != cudaSuccess) return to_status(error);
  int64_t blocks = int64_t{params.batch} * params.heads_kv * plan.grid.tiles * plan.grid.splits;
  kernel<<<static_cast<uint32_t>(blocks), Config::kThreads, Config::kSmemBytes,
           to_stream(params.stream)>>>(params, plan.grid, plan.partials, plan.aligned);
  return launched();
}

template <int HEAD_DIM>
Status launch(const AttentionParams& params, const LaunchPlan& plan) {
  if (params.dtype == Dtype::kFloat16) {
    return launch_config<Config<__half, HEAD_DIM>>(params, plan);
  }
  return launch_config<Config<__nv_bfloat16, HEAD_DIM>>(params, plan);
}

}  // namespace sparse_attn::cuda::decode

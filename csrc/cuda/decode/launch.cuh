// The definition of launch<T, HEAD_DIM> (launch.h), for the files that instantiate it.
#pragma once

#include "../common/launch.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace sparse_attn::cuda::decode {

template <typename Config, Kind kKind>
Status launch_kernel(const AttentionParams& params, const LaunchPlan& plan) {
  auto kernel = split_kernel<Config, kKind>;
  const int32_t smem_bytes = Config::kSmemBytes + (has_clusters() ? Config::kKeptBytes : 0);
  Status status = allow_shared_bytes(kernel, smem_bytes);
  const SplitGrid& grid = plan.grid;
  const int64_t batch = params.problem.batch;
  const int64_t blocks = (grid.shares > 0 ? grid.shares + batch : batch * grid.splits) *
                         params.problem.heads_kv * grid.tiles;
  LaunchShape shape = {static_cast<uint32_t>(blocks), Config::kThreads,
                       static_cast<size_t>(smem_bytes), to_stream(params.stream)};
  if (plan.grid.merging == Merging::kByCluster) shape.cluster = plan.grid.splits;
  constexpr uint32_t kPortableCluster = 8;
  if (status.ok() && shape.cluster > kPortableCluster) status = allow_large_clusters(kernel);
  if (!status.ok()) return status;
  return launch_dependent(kernel, shape, params, plan.grid, plan.partials, plan.aligned);
}

template <typename T, int HEAD_DIM>
Status launch(const AttentionParams& params, const LaunchPlan& plan) {
  using Flat = Config<T, HEAD_DIM, kFragmentRows>;
  const Kind kind = kind_of(params);
  if (params.keys.dtype == Dtype::kFloat8) {
    using Codes = Config<HalfOfEitherKind, HEAD_DIM, kFragmentRows>;
    if constexpr (has_tall_tiles(HEAD_DIM)) {
      using TallCodes = Config<HalfOfEitherKind, HEAD_DIM, kTallRows>;
      if (plan.grid.tile_rows == kTallRows) {
        return launch_kernel<TallCodes, Kind::kSequences>(params, plan);
      }
    }
    if (kind == Kind::kSequences) return launch_kernel<Codes, Kind::kSequences>(params, plan);
    if (kind == Kind::kListed) return launch_kernel<Codes, Kind::kListed>(params, plan);
    return launch_kernel<Codes, Kind::kGeneral>(params, plan);
  }
  if (kind == Kind::kStrided) return launch_kernel<Flat, Kind::kStrided>(params, plan);
  if constexpr (has_tall_tiles(HEAD_DIM)) {
    using Tall = Config<T, HEAD_DIM, kTallRows>;
    if (plan.grid.tile_rows == kTallRows) {
      if (kind == Kind::kPlain) return launch_kernel<Tall, Kind::kPlain>(params, plan);
      if (kind == Kind::kSequences) return launch_kernel<Tall, Kind::kSequences>(params, plan);
      return launch_kernel<Tall, Kind::kGeneral>(params, plan);
    }
  }
  if (kind == Kind::kPlain) return launch_kernel<Flat, Kind::kPlain>(params, plan);
  if (kind == Kind::kSequences) return launch_kernel<Flat, Kind::kSequences>(params, plan);
  if (kind == Kind::kListed) return launch_kernel<Flat, Kind::kListed>(params, plan);
  return launch_kernel<Flat, Kind::kGeneral>(params, plan);
}

}  // namespace sparse_attn::cuda::decode

// The split kernels of one head dim, a file each so that they compile side by side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/partial_rows.cuh"
#include "plan.h"

namespace sparse_attn::cuda::decode {

/// What a launch needs beside the call: the grid, where partial results go, alignment.
struct LaunchPlan {
  SplitGrid grid;
  PartialRows partials;
  bool aligned = true;
};

/// T is the dtype of the queries; keys and values have it too, or are codes.
template <typename T, int HEAD_DIM>
Status launch(const AttentionParams& params, const LaunchPlan& plan);

/// Whether the device runs code that knows clusters.
bool has_clusters();

extern template Status launch<__half, 64>(const AttentionParams&, const LaunchPlan&);
extern template Status launch<__half, 128>(const AttentionParams&, const LaunchPlan&);
extern template Status launch<__half, 256>(const AttentionParams&, const LaunchPlan&);
extern template Status launch<__nv_bfloat16, 64>(const AttentionParams&, const LaunchPlan&);
extern template Status launch<__nv_bfloat16, 128>(const AttentionParams&, const LaunchPlan&);
extern template Status launch<__nv_bfloat16, 256>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode

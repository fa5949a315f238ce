// The split kernels of one compiled head dim, a file each so that they compile side by side.
#pragma once

#include "../common/partial.cuh"
#include "plan.h"

namespace sparse_attn::cuda::decode {

/// What a launch is told beside the call: the grid, where partial results go, alignment.
struct LaunchPlan {
  SplitGrid grid;
  Partials partials;
  bool aligned = true;
};

template <int HEAD_DIM>
Status launch(const AttentionParams& params, const LaunchPlan& plan);

/// Whether the device runs code that knows clusters.
bool has_clusters();

extern template Status launch<64>(const AttentionParams&, const LaunchPlan&);
extern template Status launch<128>(const AttentionParams&, const LaunchPlan&);
extern template Status launch<256>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode

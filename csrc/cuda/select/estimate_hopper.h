// Estimates by wgmma (estimate_hopper.cu), for what estimate.cu hands over.
#pragma once

#include "estimate.cuh"

namespace sparse_attn::cuda {

bool serves_estimate_hopper(const SelectParams& params, const Estimate& estimate);
Status launch_estimate_hopper(const SelectParams& params, const Estimate& estimate,
                              const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda

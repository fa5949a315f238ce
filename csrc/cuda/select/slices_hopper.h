// Estimates of `antidiagonal` by wgmma (slices_hopper.cu), for what estimate.cu hands over.
#pragma once

#include "estimate.cuh"

namespace sparse_attn::cuda {

constexpr int32_t kSliceKeys = 256;  // key vectors of a tile

/// Masses of a query vector, one a key block.
inline int64_t slice_masses(const SelectParams& params) {
  const int32_t per_block = params.block_kv / params.stride;
  return int64_t{ceil_div(params.num_kv * per_block, kSliceKeys)} * (kSliceKeys / per_block);
}

bool serves_slices_hopper(const SelectParams& params, const Estimate& estimate);
Status launch_slices_hopper(const SelectParams& params, const Estimate& estimate,
                            const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda

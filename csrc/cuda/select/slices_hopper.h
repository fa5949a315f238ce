// Estimates of vectors of several slices by wgmma (slices_hopper.cu), for what estimate.cu hands
// over.
#pragma once

#include "estimate.cuh"

namespace sparse_attn::cuda {

constexpr int32_t kSliceKeys = 256;  // key vectors of a tile

/// Masses of a query vector: one a key block, or with single key vectors one a tile.
inline int64_t slice_masses(const SelectParams& params) {
  if (params.selector == Selector::kMinMax) return ceil_div(params.num_kv, kSliceKeys);
  const int32_t per_block = params.block_kv / params.stride;
  return int64_t{ceil_div(params.num_kv * per_block, kSliceKeys)} * (kSliceKeys / per_block);
}
/// The same of a query head; 0 where the selector has no slices.
inline int64_t slice_masses_of_head(const SelectParams& params) {
  if (params.selector != Selector::kMinMax && params.selector != Selector::kAntidiagonal) return 0;
  const int32_t rows = params.selector == Selector::kMinMax ? 1 : params.stride;
  return slice_masses(params) * ceil_div(params.problem.seq_q, rows);
}

bool serves_slices_hopper(const SelectParams& params, const Estimate& estimate);
Status launch_slices_hopper(const SelectParams& params, const Estimate& estimate,
                            const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda

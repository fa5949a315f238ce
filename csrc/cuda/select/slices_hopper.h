// Estimates of vectors of several slices by wgmma (slices_hopper.cu), for what estimate.cu hands
// over.
#pragma once

#include "estimate.cuh"

namespace sparse_attn::cuda {

constexpr int32_t kSliceKeys = 256;  // key vectors of a tile

/// Key vectors of a key block; 0 where the selector has no slices.
inline int32_t slice_vectors(const SelectParams& params) {
  if (params.selector == Selector::kMinMax) return 1;
  return params.selector == Selector::kAntidiagonal ? params.block_kv / params.stride : 0;
}
/// Masses of a query vector: one a key block, or with single vectors one a tile.
inline int64_t slice_masses(const SelectParams& params) {
  const int32_t per_block = slice_vectors(params);
  const int64_t tiles = ceil_div(params.num_kv * per_block, kSliceKeys);
  return tiles * (per_block == 1 ? 1 : kSliceKeys / per_block);
}
/// The same of a query head.
inline int64_t slice_masses_of_head(const SelectParams& params) {
  const int32_t rows = params.selector == Selector::kMinMax ? 1 : params.stride;
  return slice_masses(params) * ceil_div(params.seq_q, rows);
}

bool serves_slices_hopper(const SelectParams& params, const Estimate& estimate);
Status launch_slices_hopper(const SelectParams& params, const Estimate& estimate,
                            const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda

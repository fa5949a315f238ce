// Estimates of `minmax` by wgmma (extremes_hopper.cu), for what estimate.cu hands over.
#pragma once

#include "estimate.cuh"

namespace sparse_attn::cuda {

/// Key blocks of a tile, whose extremes stay in shared memory.
constexpr int32_t extreme_columns(int32_t head_dim) { return head_dim <= 128 ? 256 : 128; }

/// Masses of a query: one a tile.
inline int64_t extreme_masses(const SelectParams& params) {
  return ceil_div(params.num_kv, extreme_columns(params.problem.head_dim));
}

/// Whether this walk serves the call. It reads an element's greatest and least value side by side.
bool serves_extremes_hopper(const SelectParams& params);
/// `key` has the extremes, [B, Hkv, num_kv, D, 2].
Status launch_extremes_hopper(const SelectParams& params, const TensorView& key,
                              const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda

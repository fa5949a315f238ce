// Estimates of `minmax` by wgmma (extremes_hopper.cu), for what estimate.cu hands over.
#pragma once

#include "tools.h"

namespace sparse_attn::cuda {

/// Whether this walk serves the call. It reads an element's greatest and least value side by side.
bool serves_extremes_hopper(const SelectParams& params);
/// `key` has the extremes, [B, Hkv, num_kv, D, 2].
Status launch_extremes_hopper(const SelectParams& params, const TensorView& key,
                              const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda

// The question that every CUDA engine asks of a call's scores. On the host it chooses the kernel,
// on the device the way through it.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda {

/// What brings more than a scaled product to the softmax.
constexpr Features kTransforms =
    Features::of(Feature::kMask, Feature::kSoftcap, Feature::kOddScale, Feature::kAlibi);

/// Whether the softmax takes q.k times a positive scale of common size and nothing else: no
/// softcap, attn_mask or ALiBi.
SPARSE_ATTN_HD bool has_plain_scores(const AttentionParams& params) {
  return !params.features.any(kTransforms);
}

}  // namespace sparse_attn::cuda

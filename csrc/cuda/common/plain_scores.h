// The question that every CUDA engine asks of a call's scores. On the host it chooses the kernel,
// on the device the way through it.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda {

/// With these alone the softmax takes q.k times a positive scale of common size: they say where
/// tensors lie, which keys a row sees and what else the softmax sums. Others, also later ones,
/// count as a transform of scores.
constexpr Features kScaledScores = Features::of(
    Feature::kFloat32, Feature::kUnaligned, Feature::kKeyBounds, Feature::kQueryOffsets,
    Feature::kKeyOrigins, Feature::kSinkLogits, Feature::kWindow, Feature::kDilation,
    Feature::kLead, Feature::kColumns, Feature::kGlobalRows, Feature::kGlobalIndices,
    Feature::kList, Feature::kPartialBlocks, Feature::kTopK, Feature::kValueDim, Feature::kPacked,
    Feature::kUsedKeys, Feature::kPaged, Feature::kFloat8Keys);

/// Whether nothing transforms the scores: no softcap, attn_mask or ALiBi. A kernel that has no code
/// for transforms serves calls within kScaledScores alone.
SPARSE_ATTN_HD bool has_plain_scores(const AttentionParams& params) {
  return params.features.within(kScaledScores);
}

}  // namespace sparse_attn::cuda

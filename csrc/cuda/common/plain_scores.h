// The question that every CUDA engine asks of a call's scores. On the host it chooses the kernel,
// on the device the way through it.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda {

/// Whether nothing transforms the scores: no softcap, attn_mask or ALiBi. A kernel that has no code
/// for transforms serves calls within kScaledScores alone.
SPARSE_ATTN_HD bool has_plain_scores(const AttentionParams& params) {
  return params.features.within(kScaledScores);
}

}  // namespace sparse_attn::cuda

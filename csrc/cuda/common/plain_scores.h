// The question that every CUDA engine asks of a call's scores. On the host it chooses the kernel,
// on the device the way through it.
#pragma once

#include "../../params.h"
#include "log2_units.h"

namespace sparse_attn::cuda {

/// Whether the softmax takes q.k times a positive scale of common size and nothing else: no
/// softcap, no attn_mask.
SPARSE_ATTN_HD bool has_plain_scores(const AttentionParams& params) {
  return is_common_scale(params.scale) && params.softcap == 0.0f &&
         params.mask.kind == MaskKind::kNone;
}

}  // namespace sparse_attn::cuda

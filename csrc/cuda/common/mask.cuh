// attn_mask in kernels: a boolean mask decides what is allowed, an additive one is added to the
// scaled scores, where -inf means not allowed.
#pragma once

#include "../../params.h"
#include "types.cuh"

namespace sparse_attn::cuda {

/// What attn_mask adds to the score of (batch, head, i, j): 0 and -inf for boolean masks.
__device__ inline float mask_bias(const MaskView& mask, int64_t batch, int64_t head, int64_t i,
                                  int64_t j) {
  int64_t at = batch * mask.stride_b + head * mask.stride_h + i * mask.stride_q + j * mask.stride_k;
  switch (mask.kind) {
    case MaskKind::kBool:
      return static_cast<const uint8_t*>(mask.data)[at] != 0 ? 0.0f : -INFINITY;
    case MaskKind::kFloat32:
      return static_cast<const float*>(mask.data)[at];
    case MaskKind::kFloat16:
      return to_float(static_cast<const __half*>(mask.data)[at]);
    case MaskKind::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(mask.data)[at]);
    default:
      return 0.0f;
  }
}

/// softcap * tanh(score / softcap), or the score where softcap is 0.
__device__ __forceinline__ float capped(float score, float softcap) {
  return softcap == 0.0f ? score : softcap * tanhf(score / softcap);
}

}  // namespace sparse_attn::cuda

// attn_mask in kernels: a boolean mask decides what is allowed, an additive one is added to the
// scaled scores, where -inf means not allowed.
#pragma once

#include "../../params.h"
#include "types.cuh"

namespace sparse_attn::cuda {

/// use(load) where there is a mask: load(index) is what the element there adds to its score, 0 and
/// -inf for boolean masks.
template <typename Use>
__device__ __forceinline__ void with_mask(MaskKind kind, const void* data, const Use& use) {
  switch (kind) {
    case MaskKind::kBool:
      return use([=](int64_t at) {
        return static_cast<const uint8_t*>(data)[at] != 0 ? 0.0f : -INFINITY;
      });
    case MaskKind::kFloat32:
      return use([=](int64_t at) { return static_cast<const float*>(data)[at]; });
    case MaskKind::kFloat16:
      return use([=](int64_t at) { return to_float(static_cast<const __half*>(data)[at]); });
    case MaskKind::kBFloat16:
      return use([=](int64_t at) { return to_float(static_cast<const __nv_bfloat16*>(data)[at]); });
    default:
      return;
  }
}

/// What attn_mask adds to the score of (batch, head, i, j).
__device__ inline float mask_bias(const MaskView& mask, int64_t batch, int64_t head, int64_t i,
                                  int64_t j) {
  const int64_t at =
      batch * mask.stride_b + head * mask.stride_h + i * mask.stride_q + j * mask.stride_k;
  float bias = 0.0f;
  with_mask(mask.kind, mask.data, [&](const auto& load) { bias = load(at); });
  return bias;
}

/// softcap * tanh(score / softcap), or the score where softcap is 0.
__device__ __forceinline__ float capped(float score, float softcap) {
  return softcap == 0.0f ? score : softcap * tanhf(score / softcap);
}

}  // namespace sparse_attn::cuda

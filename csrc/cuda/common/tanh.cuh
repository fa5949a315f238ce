// tanh without branches, for softcap.
#pragma once

#include "ptx/math.cuh"

namespace sparse_attn::cuda {

/// tanh(y) as y P(y^2) / Q(y^2), fitted to the least relative error, 4e-7 in float32: an absolute
/// one would show in the lse of rows of few keys. Beyond kTanhEnd it is 1 but for 2e-7.
__device__ __forceinline__ float tanh_rational(float y) {
  constexpr float kTanhEnd = 8.0f;
  y = ptx::clamp(y, kTanhEnd);
  const float z = y * y;
  float p = fmaf(1.14750436e-5f, z, 2.95580062e-3f);
  p = fmaf(p, z, 0.129303485f);
  p = fmaf(p, z, 1.0f);
  float q = fmaf(2.47321168e-7f, z, 2.39313973e-4f);
  q = fmaf(q, z, 2.38357559e-2f);
  q = fmaf(q, z, 0.462636024f);
  q = fmaf(q, z, 1.0f);
  return y * p * ptx::reciprocal_approx(q);
}

}  // namespace sparse_attn::cuda

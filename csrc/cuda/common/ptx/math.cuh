// Single instructions of float32, on the special function unit and beside it.
#pragma once

namespace sparse_attn::cuda::ptx {

/// 2^x within 2^-22 (PTX ISA 9.7.3.21); 2^-inf is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x within an ulp (PTX ISA 9.7.3.14).
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// x between -bound and bound; NaN stays, unlike with fminf and fmaxf.
__device__ __forceinline__ float clamp(float x, float bound) {
#if __CUDA_ARCH__ < 800
  return isnan(x) ? x : fmaxf(fminf(x, bound), -bound);
#else
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(bound));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(-bound));
  return y;
#endif
}

}  // namespace sparse_attn::cuda::ptx

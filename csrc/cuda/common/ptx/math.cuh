// Single instructions of float32, on the special function unit and beside it.
#pragma once

#include <cstdint>

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

/// Makes x -inf where no bit of `mask` is set in `word`. A select may write to another register.
__device__ __forceinline__ void hide_unless_set(float& x, uint32_t word, uint32_t mask) {
  asm volatile(
      "{\n.reg .pred hides;\n.reg .b32 bits;\nand.b32 bits, %1, %2;\n"
      "setp.eq.u32 hides, bits, 0;\n@hides mov.f32 %0, 0fFF800000;\n}"
      : "+f"(x)
      : "r"(word), "r"(mask));
}

}  // namespace sparse_attn::cuda::ptx

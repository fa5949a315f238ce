// ex2.approx: 2^x on the special function unit, within 2^-22 (PTX ISA 9.7.3.21); 2^-inf is 0.
#pragma once

namespace sparse_attn::cuda::ptx {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace sparse_attn::cuda::ptx

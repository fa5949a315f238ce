// Conversions between small floats (PTX ISA, "cvt").
#pragma once

#include <cstdint>

namespace sparse_attn::cuda::ptx {

#if __CUDA_ARCH__ >= 890
/// Four codes of float8 (e4m3) as float16.
__device__ __forceinline__ uint2 half_of_float8(uint32_t codes) {
  uint2 numbers;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(numbers.x), "=r"(numbers.y)
      : "r"(codes));
  return numbers;
}
#endif

}  // namespace sparse_attn::cuda::ptx

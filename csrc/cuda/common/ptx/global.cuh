// Accesses of global memory under a predicate, where a branch would end what runs in parallel: the
// compiler waits for wgmma before lanes part.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda::ptx {

__device__ __forceinline__ void store_global_if(bool stores, float* to, float x) {
  asm volatile(
      "{\n.reg .pred stores;\nsetp.ne.b32 stores, %0, 0;\n@stores st.global.f32 [%1], %2;\n}" ::"r"(
          static_cast<int>(stores)),
      "l"(to), "f"(x)
      : "memory");
}

/// A word of read-only memory where it `loads`, else `otherwise`.
__device__ __forceinline__ uint32_t load_global_if(bool loads, const uint32_t* from,
                                                   uint32_t otherwise) {
  asm volatile(
      "{\n.reg .pred loads;\nsetp.ne.b32 loads, %1, 0;\n@loads ld.global.nc.b32 %0, [%2];\n}"
      : "+r"(otherwise)
      : "r"(static_cast<int>(loads)), "l"(from));
  return otherwise;
}

/// Four floats where it `loads`, else zeros.
__device__ __forceinline__ float4 load_float4_if(bool loads, const float4* from) {
  float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile(
      "{\n.reg .pred loads;\nsetp.ne.b32 loads, %4, 0;\n"
      "@loads ld.global.v4.f32 {%0, %1, %2, %3}, [%5];\n}"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "r"(static_cast<int>(loads)), "l"(from)
      : "memory");
  return x;
}

}  // namespace sparse_attn::cuda::ptx

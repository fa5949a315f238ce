// Accesses of global memory under a predicate, where a branch would end what runs in parallel: the
// compiler waits for wgmma before lanes part.
#pragma once

namespace sparse_attn::cuda::ptx {

__device__ __forceinline__ void store_global_if(bool stores, float* to, float x) {
  asm volatile(
      "{\n.reg .pred stores;\nsetp.ne.b32 stores, %0, 0;\n@stores st.global.f32 [%1], %2;\n}" ::"r"(
          static_cast<int>(stores)),
      "l"(to), "f"(x)
      : "memory");
}

}  // namespace sparse_attn::cuda::ptx

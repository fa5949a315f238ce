// ld.shared and st.shared: a number, 8 or 16 bytes at an address of shared memory that is held as a
// number (PTX ISA 9.7.9.8, 9.7.9.11).
#pragma once

#include <cstdint>

namespace sparse_attn::cuda::ptx {

/// The 32-bit address of shared memory that every instruction of this folder takes.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 data) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(data.x), "r"(data.y),
               "r"(data.z), "r"(data.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t to, uint2 data) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(data.x), "r"(data.y) : "memory");
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 data;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(data.x), "=r"(data.y)
               : "r"(from)
               : "memory");
  return data;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 data;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "r"(from)
               : "memory");
  return data;
}

/// A store that no branch surrounds.
__device__ __forceinline__ void store_shared_if(bool stores, uint32_t to, float value) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n"
      "setp.ne.u32 stores, %0, 0;\n"
      "@stores st.shared.f32 [%1], %2;\n"
      "}" ::"r"(static_cast<uint32_t>(stores)),
      "r"(to), "f"(value)
      : "memory");
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from));
  return x;
}

}  // namespace sparse_attn::cuda::ptx

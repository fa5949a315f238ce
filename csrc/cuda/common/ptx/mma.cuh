// mma.sync m16n8k16: D += A B with float32 sums (PTX ISA 9.7.14.5.8). Before sm_80 float16 takes
// two products of its own shape m16n8k8, and bfloat16, which has none there, is multiplied on FMA
// units.
//   lane = 4 g + t   A: rows g, g + 8   B, D: columns 8-wide, D columns 2 t, 2 t + 1
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace sparse_attn::cuda::ptx {

namespace detail {

#if __CUDA_ARCH__ < 800
__device__ __forceinline__ void mma_16x8x8_half(float (&d)[4], uint32_t a0, uint32_t a1,
                                                uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

/// The product by shuffles and FMA: every lane gathers its two rows of A and its two columns of B.
/// A function of its own, since a tile has hundreds of these.
static __device__ __noinline__ float4 mma_16x8x16_fma(float4 d, uint4 a, uint32_t b0, uint32_t b1) {
  int lane = threadIdx.x % 32;
  int quad = lane & ~3;
  int column = lane % 4 * 2;
#pragma unroll
  for (int k = 0; k < 8; ++k) {  // depth 2 k and 2 k + 1
    int holder = k % 4;
    uint32_t b = k < 4 ? b0 : b1;
    float2 top = unpack(__shfl_sync(~0u, k < 4 ? a.x : a.z, quad + holder));
    float2 bottom = unpack(__shfl_sync(~0u, k < 4 ? a.y : a.w, quad + holder));
    float2 left = unpack(__shfl_sync(~0u, b, column * 4 + holder));
    float2 right = unpack(__shfl_sync(~0u, b, column * 4 + 4 + holder));
    d.x = fmaf(top.y, left.y, fmaf(top.x, left.x, d.x));
    d.y = fmaf(top.y, right.y, fmaf(top.x, right.x, d.y));
    d.z = fmaf(bottom.y, left.y, fmaf(bottom.x, left.x, d.z));
    d.w = fmaf(bottom.y, right.y, fmaf(bottom.x, right.x, d.w));
  }
  return d;
}
#endif

}  // namespace detail

template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
#if __CUDA_ARCH__ >= 800
  if constexpr (kHalf) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else
  if constexpr (kHalf) {
    detail::mma_16x8x8_half(d, a[0], a[1], b0);
    detail::mma_16x8x8_half(d, a[2], a[3], b1);
  } else {
    float4 sum =
        detail::mma_16x8x16_fma({d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, b0, b1);
    d[0] = sum.x;
    d[1] = sum.y;
    d[2] = sum.z;
    d[3] = sum.w;
  }
#endif
}

}  // namespace sparse_attn::cuda::ptx

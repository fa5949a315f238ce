// stmatrix: a warp stores four 8x8 matrices of 16-bit elements (PTX ISA, "stmatrix"). Lane l names
// the row l % 8 of matrix l / 8; the registers hold what mma leaves in an accumulator. sm_90.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2,
                                            uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace sparse_attn::cuda::ptx

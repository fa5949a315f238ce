// red: an addition in shared memory whose result nobody reads (PTX ISA, "red"). Lanes of a warp
// that count in the same word do so at once.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda::ptx {

__device__ __forceinline__ void count_shared(uint32_t word) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(word) : "memory");
}

}  // namespace sparse_attn::cuda::ptx

// The roles of warpgroups in the kernels of products: one loads, the others consume.
#pragma once

#include "../common/ptx/warpgroup.cuh"
#include "../common/slab.h"

namespace sparse_attn::cuda {

/// One thread of a block's first warpgroup calls `load`, those of the others `consume` with their
/// warpgroup's number among these; each role with so many registers.
template <int kLoaderRegisters, int kConsumerRegisters, class Load, class Consume>
__device__ __forceinline__ void split_roles(const Load& load, const Consume& consume) {
  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers_back<kLoaderRegisters>();
    if (threadIdx.x == 0) load();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    consume(__shfl_sync(~0u, threadIdx.x / kWarpgroup, 0) - 1);
  }
}

}  // namespace sparse_attn::cuda

// Roles of warpgroups: named barriers between some of a block's warps (PTX ISA, "bar") and the
// register budget of each role (PTX ISA, "setmaxnreg"). bar on any GPU, setmaxnreg on sm_90a.
#pragma once

namespace sparse_attn::cuda::ptx {

/// Waits until `threads` threads, this one's warp among them, have arrived at the barrier.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Counts this thread's warp at the barrier and goes on.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sparse_attn::cuda::ptx

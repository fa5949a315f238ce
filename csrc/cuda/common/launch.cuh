// From CUDA's errors to Status, and the few helpers that every launcher needs.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace sparse_attn::cuda {

inline Status to_status(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {static_cast<int32_t>(error), cudaGetErrorString(error)};
}

/// What the launch just made reports.
inline Status launched() { return to_status(cudaGetLastError()); }

inline cudaStream_t to_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

/// Lets a kernel have this much dynamic shared memory.
template <typename Kernel>
Status allow_shared_bytes(Kernel* kernel, int bytes) {
  return to_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

/// A one-dimensional launch.
struct LaunchShape {
  uint32_t blocks, threads;
  size_t shared_bytes;
  cudaStream_t stream;
};

/// Launches a kernel that may begin before the one in front of it in the stream has ended, and that
/// calls ptx::wait_for_primary() in every thread block before it touches anything of that one's.
/// Code that was made for a level without that instruction is launched as any other.
template <typename... Parameters, typename... Values>
Status launch_dependent(void (*kernel)(Parameters...), LaunchShape shape, const Values&... values) {
  constexpr int kLeastLevel = 90;
  cudaFuncAttributes code;
  if (cudaError_t error = cudaFuncGetAttributes(&code, kernel)) return to_status(error);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = &early;
  config.numAttrs = code.ptxVersion >= kLeastLevel ? 1 : 0;
  return to_status(cudaLaunchKernelEx(&config, kernel, values...));
}

SPARSE_ATTN_HD constexpr int64_t ceil_div64(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Bytes rounded up so that the next region of a workspace stays aligned.
constexpr int64_t aligned_bytes(int64_t bytes) { return ceil_div64(bytes, 256) * 256; }

/// Blocks of a one-dimensional grid whose threads loop over `items`.
inline uint32_t grid_for(int64_t items, int32_t threads) {
  constexpr int64_t kMostBlocks = 1 << 20;
  int64_t blocks = ceil_div64(items, threads);
  return static_cast<uint32_t>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

}  // namespace sparse_attn::cuda

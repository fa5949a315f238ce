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

namespace driver {  // asks CUDA once for each kernel and device (kernel_facts.cu)
Status allow_shared_bytes(const void* kernel, int32_t bytes);
Status allow_large_clusters(const void* kernel);
int32_t code_level(const void* kernel);
}  // namespace driver

/// Lets a kernel have this much dynamic shared memory on the current device.
template <typename Kernel>
Status allow_shared_bytes(Kernel* kernel, int32_t bytes) {
  return driver::allow_shared_bytes(reinterpret_cast<const void*>(kernel), bytes);
}

/// Lets a kernel have clusters of more than 8 thread blocks on the current device.
template <typename Kernel>
Status allow_large_clusters(Kernel* kernel) {
  return driver::allow_large_clusters(reinterpret_cast<const void*>(kernel));
}

/// The architecture of the code that the current device runs a kernel by, as 80; 0 where it runs
/// none.
template <typename Kernel>
int32_t code_level(Kernel* kernel) {
  return driver::code_level(reinterpret_cast<const void*>(kernel));
}

/// Whether that code knows dependent launches and clusters.
template <typename Kernel>
bool knows_clusters(Kernel* kernel) {
  return code_level(kernel) >= 90;
}

/// A one-dimensional launch.
struct LaunchShape {
  uint32_t blocks, threads;
  size_t shared_bytes;
  cudaStream_t stream;
  uint32_t cluster = 1;    // thread blocks of a cluster
  bool knows_all = false;  // the kernel has no code for older devices
};

/// Launches a kernel that may begin before the one in front of it in the stream has ended, and that
/// calls ptx::wait_for_primary() in every thread block before it touches anything of that one's.
/// Code that does not know that instruction is launched as any other, and has no clusters.
template <typename... Parameters, typename... Values>
Status launch_dependent(void (*kernel)(Parameters...), LaunchShape shape, const Values&... values) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = attributes;
  const bool knows = shape.knows_all || knows_clusters(kernel);
  config.numAttrs = knows ? 1 + (shape.cluster > 1) : 0;
  return to_status(cudaLaunchKernelEx(&config, kernel, values...));
}

/// Blocks of a one-dimensional grid whose threads loop over `items`.
inline uint32_t grid_for(int64_t items, int32_t threads) {
  constexpr int64_t kMostBlocks = 1 << 20;
  int64_t blocks = ceil_div64(items, threads);
  return static_cast<uint32_t>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

}  // namespace sparse_attn::cuda

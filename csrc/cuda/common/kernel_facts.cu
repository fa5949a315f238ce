// What the driver has answered about kernels, and what was set, kept for each kernel and device: a
// call of the driver takes more than half a microsecond of a launch.
#include <map>
#include <mutex>
#include <utility>

#include "launch.cuh"

namespace sparse_attn::cuda::driver {
namespace {

struct KernelFacts {
  int32_t shared_bytes = 0;
  bool large_clusters = false;
  int32_t code_level = 0;  // not known yet
};

std::mutex facts_mutex;
std::map<std::pair<const void*, int>, KernelFacts> facts_of_kernels;

/// The facts of a kernel on the current device, while their lock is held.
struct LockedFacts {
  explicit LockedFacts(const void* kernel) : lock(facts_mutex) {
    int device = 0;
    status = to_status(cudaGetDevice(&device));
    facts = &facts_of_kernels[{kernel, device}];
  }

  std::lock_guard<std::mutex> lock;
  Status status;
  KernelFacts* facts;
};

}  // namespace

Status allow_shared_bytes(const void* kernel, int32_t bytes) {
  const LockedFacts known(kernel);
  if (!known.status.ok() || bytes <= known.facts->shared_bytes) return known.status;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) known.facts->shared_bytes = bytes;
  return to_status(error);
}

Status allow_large_clusters(const void* kernel) {
  const LockedFacts known(kernel);
  if (!known.status.ok() || known.facts->large_clusters) return known.status;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  known.facts->large_clusters = error == cudaSuccess;
  return to_status(error);
}

int32_t code_level(const void* kernel) {
  const LockedFacts known(kernel);
  if (!known.status.ok() || known.facts->code_level > 0) return known.facts->code_level;
  cudaFuncAttributes code;
  if (cudaFuncGetAttributes(&code, kernel) != cudaSuccess) return 0;  // to be asked again
  known.facts->code_level = code.ptxVersion;
  return code.ptxVersion;
}

}  // namespace sparse_attn::cuda::driver

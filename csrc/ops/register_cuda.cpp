// CUDA kernels of all ops; the schemas come with the CPU library, which is loaded first.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include <stdexcept>

#include "../cuda/engines.h"
#include "dispatch.h"
#include "namespace.h"

namespace sparse_attn {
namespace {

class CudaBackend : public Backend {
 public:
  const Engine& engine(const std::string& name) const override {
    for (const Engine* engine :
         {&cuda::kHopper, &cuda::kDecode, &cuda::kSmall, &cuda::kPortable, &cuda::kNaive}) {
      if (name == engine->name) return *engine;
    }
    throw std::logic_error("no engine " + name);  // capability.cpp lists one that is not here
  }
  const Tools& tools() const override { return cuda::kTools; }
  std::shared_ptr<void> enter(int32_t device) const override {
    if (device < 0) return nullptr;  // of a CPU tensor beside CUDA ones, which checks refuse
    namespace accelerator = torch::stable::accelerator;
    // None where it is torch's current one, which the driver's may not be yet.
    std::shared_ptr<void> guard;
    if (accelerator::getCurrentDeviceIndex() != device) {
      guard = std::make_shared<accelerator::DeviceGuard>(device);
    }
    // A thread's first call has no context yet, which the driver's functions, unlike the runtime's,
    // do not make.
    cudaSetDevice(device);
    return guard;
  }
  void* stream(int32_t device) const override {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return stream;
  }
  int32_t compute_capability(int32_t device) const override {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return major * 10 + minor;
  }
};

}  // namespace

const Backend& backend() {
  static const CudaBackend kBackend;
  return kBackend;
}

}  // namespace sparse_attn

SPARSE_ATTN_KERNELS(CUDA, library) { sparse_attn::register_kernels(library); }

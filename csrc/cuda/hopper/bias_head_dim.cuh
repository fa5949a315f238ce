// The kernels of one head dim that add attn_mask or ALiBi; included by the files that CMake writes
// (bias_head_dim.cu.in).
#pragma once

#include <utility>

#include "launch.cuh"

namespace sparse_attn::cuda::hopper {

template <Dtype kDtype, int HEAD_DIM, int kKernel>
void launch_if_biased(int32_t kernel, const Arguments& args, Status* status) {
  if constexpr (kKernels[kKernel].is_biased() && kKernels[kKernel].keys_at(HEAD_DIM) > 0) {
    if (kernel == kKernel) *status = launch<Config<kDtype, HEAD_DIM, kKernel>>(args);
  }
}

template <Dtype kDtype, int HEAD_DIM, int... kKernel>
Status launch_biased(int32_t kernel, const Arguments& args,
                     std::integer_sequence<int, kKernel...>) {
  Status status = {cudaErrorNotSupported, "the hopper engine has no such kernel with a bias"};
  (launch_if_biased<kDtype, HEAD_DIM, kKernel>(kernel, args, &status), ...);
  return status;
}

template <Dtype kDtype, int HEAD_DIM>
Status launch_biased(int32_t kernel, const Arguments& args) {
  return launch_biased<kDtype, HEAD_DIM>(kernel, args,
                                         std::make_integer_sequence<int, kNumKernels>());
}

}  // namespace sparse_attn::cuda::hopper

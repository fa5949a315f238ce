// The kernels of one head dim; included by the files that CMake writes, one for each
// (head_dim.cu.in).
#pragma once

#include <utility>

#include "launch.cuh"

namespace sparse_attn::cuda::hopper {

template <Dtype kDtype, int HEAD_DIM, int kKernel>
Status launch_kernel(const Arguments& args) {
  if constexpr (kKernels[kKernel].keys_at(HEAD_DIM) == 0) {
    return {cudaErrorNotSupported, "the hopper engine has no such kernel for this head dim"};
  } else if constexpr (kKernels[kKernel].is_top()) {
    return launch_topk<kDtype, HEAD_DIM>(args);
  } else if constexpr (kKernels[kKernel].is_biased()) {
    return launch_biased<kDtype, HEAD_DIM>(kKernel, args);
  } else {
    return launch<Config<kDtype, HEAD_DIM, kKernel>>(args);
  }
}

template <Dtype kDtype, int HEAD_DIM, int... kKernel>
Status launch_kernel(int32_t kernel, const Arguments& args,
                     std::integer_sequence<int, kKernel...>) {
  Status status;
  ((kernel == kKernel ? void(status = launch_kernel<kDtype, HEAD_DIM, kKernel>(args)) : void()),
   ...);
  return status;
}

template <Dtype kDtype, int HEAD_DIM>
Status launch_head_dim(int32_t kernel, const Arguments& args) {
  constexpr auto kAll = std::make_integer_sequence<int, kNumKernels>();
  return launch_kernel<kDtype, HEAD_DIM>(kernel, args, kAll);
}

}  // namespace sparse_attn::cuda::hopper

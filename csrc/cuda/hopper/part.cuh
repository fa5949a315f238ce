// The kernels of one part of a head dim's; included by the files that CMake writes, one for each
// (part.cu.in).
#pragma once

#include <utility>

#include "launch.cuh"

namespace sparse_attn::cuda::hopper {

template <Part kPart, Dtype kDtype, int HEAD_DIM, int kKernel>
void launch_if_named(int32_t kernel, const Arguments& args, Status* status) {
  constexpr Kernel kOwn = kKernels[kKernel];
  if constexpr (kOwn.part() == kPart && kOwn.keys_at(HEAD_DIM) > 0) {
    if (kernel != kKernel) return;
    if constexpr (kOwn.is_top()) {
      *status = launch_topk<kDtype, HEAD_DIM>(args);
    } else {
      *status = launch<Config<kDtype, HEAD_DIM, kKernel>>(args);
    }
  }
}

template <Part kPart, Dtype kDtype, int HEAD_DIM, int... kKernel>
Status launch_part(int32_t kernel, const Arguments& args, std::integer_sequence<int, kKernel...>) {
  Status status = {cudaErrorNotSupported, "the hopper engine has no such kernel for this head dim"};
  (launch_if_named<kPart, kDtype, HEAD_DIM, kKernel>(kernel, args, &status), ...);
  return status;
}

template <Part kPart, Dtype kDtype, int HEAD_DIM>
Status launch_part(int32_t kernel, const Arguments& args) {
  constexpr auto kAll = std::make_integer_sequence<int, kNumKernels>();
  return launch_part<kPart, kDtype, HEAD_DIM>(kernel, args, kAll);
}

}  // namespace sparse_attn::cuda::hopper

// New tensors by torch's C functions: the dispatcher's calls by name cost several times as much.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <vector>

#include "arguments.h"

namespace sparse_attn {

using torch::headeronly::ScalarType;

/// An uninitialised tensor on the device of `like`.
inline Tensor empty_strided(const Tensor& like, ScalarType dtype, const std::vector<int64_t>& sizes,
                            const std::vector<int64_t>& strides) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), code, device_type,
                                                  like.get_device_index(), &made));
  return Tensor(made);
}

/// The same, contiguous.
inline Tensor empty(const Tensor& like, ScalarType dtype, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * (sizes[d] > 1 ? sizes[d] : 1);
  }
  return empty_strided(like, dtype, sizes, strides);
}

}  // namespace sparse_attn

// The driver's entry point, looked up once, and how tensor_map.h's views are told to it.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "tensor_map.h"

namespace sparse_attn::cuda {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                         cudaEnableDefault, &found);
    bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry) : nullptr;
  }();
  return function;
}

}  // namespace

Status encode_tensor_map(Dtype dtype, const void* data, const TensorMapShape& shape,
                         CUtensorMap* map) {
  constexpr int64_t kElementBytes = 2, kLeastStride = 16;
  constexpr int32_t kWideBox = 64;
  cuuint64_t sizes[5], strides[4];
  cuuint32_t box[5], steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; ++i) {
    sizes[i] = shape.sizes[i] > 1 ? shape.sizes[i] : 1;
    box[i] = shape.box[i];
    if (i == 0) continue;
    // The stride of a dimension of one element must be valid too.
    strides[i - 1] = shape.sizes[i] > 1 ? shape.strides[i - 1] * kElementBytes : kLeastStride;
  }
  // In pairs of lines rows of odd multiples of 8 columns take up to 1.13 times as long.
  const auto fetched =
      shape.wide ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  auto function = encode_function();
  if (function == nullptr) {
    return {CUDA_ERROR_NOT_FOUND, "the CUDA driver has no cuTensorMapEncodeTiled"};
  }
  CUresult result = function(
      map,
      dtype == Dtype::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      5, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      shape.box[0] == kWideBox ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, fetched,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {static_cast<int32_t>(result), "the CUDA driver refused a tensor map"};
}

}  // namespace sparse_attn::cuda

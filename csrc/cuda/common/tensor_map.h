// Tensor maps of 5-D views for the copy engine, encoded through the driver, whose entry point the
// runtime looks up: nothing links libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../params.h"

namespace sparse_attn::cuda {

/// A view of elements of two bytes, innermost dimension first, and the box that one copy brings.
/// Strides are in elements; that of the innermost dimension is 1. A box row is as wide as a
/// swizzle: 64 or 32 elements. Of a `wide` view, whose boxes lie side by side in a row, L2 fetches
/// two lines at once.
struct TensorMapShape {
  int64_t sizes[5];
  int64_t strides[4];
  int32_t box[5];
  bool wide = false;
};

Status encode_tensor_map(Dtype dtype, const void* data, const TensorMapShape& shape,
                         CUtensorMap* map);

}  // namespace sparse_attn::cuda

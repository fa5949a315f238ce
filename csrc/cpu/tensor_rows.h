// Rows of one head of a tensor, whatever engine reads them: where they lie, some of them, and
// copies as contiguous float32.
#pragma once

#include <cstdint>

#include "cpu/vector/vector_math.h"
#include "params.h"

namespace sparse_attn::cpu {

constexpr int32_t bytes_of(Element element) { return size_of(static_cast<Dtype>(element)); }

inline Rows rows_of(const TensorView& view, Dtype dtype, int64_t batch, int64_t head) {
  const char* data = static_cast<const char*>(view.data);
  return {data + (batch * view.stride_b + head * view.stride_h) * size_of(dtype), view.stride_s,
          static_cast<Element>(dtype)};
}

/// Rows first, first + step, ... of `rows`.
inline Rows strided(const Rows& rows, int64_t first, int64_t step) {
  return {static_cast<const char*>(rows.data) + first * rows.stride * bytes_of(rows.element),
          rows.stride * step, rows.element};
}

/// Copies `count` rows to contiguous float32 rows.
inline void copy_rows(const VectorMath& math, const Rows& rows, int64_t count, int32_t head_dim,
                      float* target) {
  if (rows.stride == head_dim) {
    math.to_float(rows.element, rows.data, target, count * head_dim);
    return;
  }
  for (int64_t row = 0; row < count; ++row) {
    math.to_float(rows.element, strided(rows, row, 1).data, target + row * head_dim, head_dim);
  }
}

}  // namespace sparse_attn::cpu

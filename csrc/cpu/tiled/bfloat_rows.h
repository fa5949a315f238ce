// bfloat16 keys and values as products of tiles take them (bfloat_product.cpp): two elements that
// one sum takes together lie side by side. Packed as raw bits; nothing is computed here.
//
//   keys    panels of 16: [head_dim / 2][16 keys][2 elements]
//   values  pairs of rows: [rows / 2][head_dim][2 rows]
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {

constexpr int32_t kMaxHeadDim = 256;

inline const uint16_t* bfloat_row(const Rows& rows, int64_t row) {
  return static_cast<const uint16_t*>(rows.data) + row * rows.stride;
}

/// A pair of elements moves as one float would, so that float panels of half the head dim do.
inline void copy_bfloat_panels(const VectorMath& math, const Rows& keys, int64_t count,
                               int32_t head_dim, uint16_t* target) {
  for (int64_t first = 0; first < count; first += kPanelKeys, target += kPanelKeys * head_dim) {
    alignas(64) uint16_t rows[kPanelKeys * kMaxHeadDim];
    int64_t bytes = head_dim * int64_t{sizeof(uint16_t)};
    for (int64_t i = 0; i < kPanelKeys; ++i) {
      uint16_t* row = rows + i * head_dim;
      if (first + i < count) {
        std::memcpy(row, bfloat_row(keys, first + i), bytes);
      } else {
        std::memset(row, 0, bytes);
      }
    }
    math.pack_panel(reinterpret_cast<const float*>(rows), head_dim / 2, head_dim / 2,
                    reinterpret_cast<float*>(target));
  }
}

/// Copies rows to pairs; the last is filled up with a row of zeros.
inline void copy_bfloat_pairs(const Rows& values, int64_t count, int32_t head_dim,
                              uint16_t* target) {
  static constexpr uint16_t kZeros[kMaxHeadDim] = {};
  for (int64_t row = 0; row < count; row += 2, target += 2 * head_dim) {
    const uint16_t* first = bfloat_row(values, row);
    const uint16_t* second = row + 1 < count ? bfloat_row(values, row + 1) : kZeros;
    for (int32_t d = 0; d < head_dim; ++d) {
      target[2 * d] = first[d];
      target[2 * d + 1] = second[d];
    }
  }
}

/// Writes zeros for the pairs of rows that follow `count` copied ones, to `end`.
inline void clear_pairs(int64_t count, int64_t end, int32_t head_dim, uint16_t* pairs) {
  const int64_t copied = (count + 1) / 2 * 2;
  std::memset(pairs + copied * head_dim, 0, (end - copied) * head_dim * sizeof(uint16_t));
}

/// Copies the pairs that hold rows [begin, end) of a block, with zeros for its other rows.
inline void copy_inside(const uint16_t* block, Span inside, int32_t block_rows, int32_t head_dim,
                        uint16_t* target) {
  std::memset(target, 0, sizeof(uint16_t) * block_rows * head_dim);
  for (int32_t row = inside.begin; row < inside.end; ++row) {
    int64_t pair = int64_t{row / 2} * 2 * head_dim + row % 2;
    for (int32_t d = 0; d < head_dim; ++d) target[pair + 2 * d] = block[pair + 2 * d];
  }
}

}  // namespace sparse_attn::cpu

// Keys and values as products of bfloat16 tiles take them (bfloat_product.cpp): two elements that
// one sum takes together lie side by side. An element of float16 is exactly the sum of two parts in
// bfloat16, one of float32 the sum of three, so that a row of them becomes a row of two or three
// times as many elements: all first parts, then all second ones. A head dim that is no multiple of
// 32 is filled up with zeros, which are elements too. `elements` counts those of such rows.
//
//   keys    panels of 16: [elements / 2][16 keys][2 elements]
//   values  pairs of rows: [rows / 2][elements][2 rows]
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/tensor_rows.h"
#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {

constexpr int32_t kMaxElements = kMaxParts * kMaxHeadDim;

/// Numbers of bfloat16 that make an element.
constexpr int32_t parts_of(Element element) {
  return element == Element::kFloat32 ? 3 : element == Element::kFloat16 ? 2 : 1;
}
/// Elements of a row of `dim`.
constexpr int32_t elements_of(Element element, int32_t dim) {
  return bfloat_columns(dim) * parts_of(element);
}

/// Copies a row of `head_dim`, of which as many numbers are read, and the zeros after it.
inline void copy_bfloat_row(const VectorMath& math, const Rows& rows, int64_t row, int32_t head_dim,
                            uint16_t* target) {
  const void* source = strided(rows, row, 1).data;
  const int32_t columns = bfloat_columns(head_dim), bytes = bytes_of(rows.element);
  alignas(64) char filled[kMaxHeadDim * sizeof(float)];
  if (head_dim < columns) {
    std::memcpy(filled, source, head_dim * bytes);
    std::memset(filled + head_dim * bytes, 0, (columns - head_dim) * bytes);
    source = filled;
  }
  if (rows.element == Element::kBFloat16) {
    std::memcpy(target, source, columns * sizeof(uint16_t));
  } else {
    math.bfloat->split(rows.element, source, columns, target);
  }
}

/// A pair of elements moves as one float would, so that float panels of half as many columns do.
inline void copy_bfloat_panels(const VectorMath& math, const Rows& keys, int64_t count,
                               int32_t head_dim, uint16_t* target) {
  const int32_t elements = elements_of(keys.element, head_dim);
  for (int64_t first = 0; first < count; first += kPanelKeys, target += kPanelKeys * elements) {
    alignas(64) uint16_t rows[kPanelKeys * kMaxElements];
    for (int64_t i = 0; i < kPanelKeys; ++i) {
      uint16_t* row = rows + i * elements;
      if (first + i < count) {
        copy_bfloat_row(math, keys, first + i, head_dim, row);
      } else {
        std::memset(row, 0, elements * sizeof(uint16_t));
      }
    }
    math.pack_panel(reinterpret_cast<const float*>(rows), elements / 2, elements / 2,
                    reinterpret_cast<float*>(target));
  }
}

/// Copies rows to pairs, the first to place 0 or 1 of its pair; places without a row become zeros.
inline void copy_bfloat_pairs(const VectorMath& math, const Rows& values, int64_t count,
                              int32_t value_dim, int32_t place, uint16_t* target) {
  const int32_t elements = elements_of(values.element, value_dim);
  for (int64_t row = -place; row < count; row += 2, target += 2 * elements) {
    uint16_t pair[2][kMaxElements];
    for (int64_t i = 0; i < 2; ++i) {
      if (row + i >= 0 && row + i < count) {
        copy_bfloat_row(math, values, row + i, value_dim, pair[i]);
      } else {
        std::memset(pair[i], 0, elements * sizeof(uint16_t));
      }
    }
    for (int32_t d = 0; d < elements; ++d) {
      target[2 * d] = pair[0][d];
      target[2 * d + 1] = pair[1][d];
    }
  }
}

/// Writes zeros for the pairs that follow those of the first `count` places, to place `end`.
inline void clear_pairs(int64_t count, int64_t end, int32_t elements, uint16_t* pairs) {
  const int64_t copied = (count + 1) / 2 * 2;
  std::memset(pairs + copied * elements, 0, (end - copied) * elements * sizeof(uint16_t));
}

/// Copies the pairs that hold rows [begin, end) of a block, with zeros for its other rows.
inline void copy_inside(const uint16_t* block, Span inside, int32_t block_rows, int32_t elements,
                        uint16_t* target) {
  std::memset(target, 0, sizeof(uint16_t) * block_rows * elements);
  for (int32_t row = inside.begin; row < inside.end; ++row) {
    int64_t pair = int64_t{row / 2} * 2 * elements + row % 2;
    for (int32_t d = 0; d < elements; ++d) target[pair + 2 * d] = block[pair + 2 * d];
  }
}

}  // namespace sparse_attn::cpu

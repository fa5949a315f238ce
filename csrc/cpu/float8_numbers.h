// Codes of float8 as numbers of 16 bits, looked up.
#pragma once

#include <cstdint>

#include "cpu/vector/vector_math.h"
#include "float8.h"
#include "params.h"

namespace sparse_attn::cpu {

/// What each code stands for, times a factor, rounded to a dtype; other dtypes than those of 16
/// bits have none.
class Float8Numbers {
 public:
  Float8Numbers(Dtype dtype, float factor) {
    if (size_of(dtype) != sizeof(uint16_t)) return;
    float numbers[256];
    for (int32_t code = 0; code < 256; ++code) {
      numbers[code] = float_from_float8(static_cast<uint8_t>(code));
    }
    vector_math().from_float(static_cast<Element>(dtype), numbers, factor, numbers_, 256);
  }
  /// Writes those of `columns` codes.
  void write(const char* codes, int32_t columns, void* target) const {
    auto* numbers = static_cast<uint16_t*>(target);
    for (int32_t d = 0; d < columns; ++d) numbers[d] = numbers_[static_cast<uint8_t>(codes[d])];
  }

 private:
  uint16_t numbers_[256];
};

}  // namespace sparse_attn::cpu

// Division by a number that is known before the many numbers that it divides: a product and a
// shift, where a processor without an integer divider takes some twenty instructions.
#pragma once

#include <cstdint>

#include "interval.h"

namespace sparse_attn {

/// Divides numbers from 0 to 2^31 - 1 by a positive one. With 2^s the least power of 2 that is no
/// less than it, the multiplier is 2^(31 + s) over it, rounded up by less than 1: the product errs
/// by less than 2^31, which is less than one part of the divisor.
struct Divisor {
  int32_t divisor = 1;
  uint32_t multiplier = 1u << 31;
  int32_t shift = 31;

  constexpr Divisor() = default;
  constexpr explicit Divisor(int32_t divisor) : divisor(divisor) {
    while (int64_t{1} << (shift - 31) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  SPARSE_ATTN_HD constexpr int32_t divide(int32_t number) const {
    return static_cast<int32_t>((static_cast<uint64_t>(number) * multiplier) >> shift);
  }
  SPARSE_ATTN_HD constexpr int32_t remainder(int32_t number) const {
    return number - divide(number) * divisor;
  }
};

}  // namespace sparse_attn

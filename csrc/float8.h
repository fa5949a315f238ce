// float8 e4m3fn: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinities, NaN is
// 0x7f. Every number is exact in float16. Rounding is to nearest even and saturates at 448.
#pragma once

#include <cstdint>
#include <cstring>

#include "interval.h"

namespace sparse_attn {

constexpr float kLargestFloat8 = 448.0f;

SPARSE_ATTN_HD uint8_t float8_from_float(float x) {
  constexpr uint32_t kSign = 0x80000000u;
  constexpr float kLeastNormal = 0.015625f;     // 2^-6
  constexpr float kSubnormalToUnit = 16384.0f;  // 2^14
  constexpr int32_t kDropped = 20;              // of the 23 bits of a float's mantissa
  constexpr uint32_t kBias = (127u - 7u) << 3;
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  auto sign = static_cast<uint8_t>((bits & kSign) >> 24);
  bits &= ~kSign;
  float size;
  memcpy(&size, &bits, sizeof(size));
  if (size != size) return sign | 0x7f;
  if (size >= kLargestFloat8) return sign | 0x7e;
  if (size < kLeastNormal) {
    // The sum's last bit is 2^-9, so that the addition rounds.
    float sum = size + kSubnormalToUnit;
    memcpy(&bits, &sum, sizeof(bits));
    return sign | static_cast<uint8_t>(bits & 0xf);
  }
  bits += (1u << (kDropped - 1)) - 1 + ((bits >> kDropped) & 1);
  return sign | static_cast<uint8_t>((bits >> kDropped) - kBias);
}

SPARSE_ATTN_HD float float_from_float8(uint8_t code) {
  uint32_t magnitude = code & 0x7f;
  float size;
  if (magnitude < 8) {
    size = static_cast<float>(magnitude) * 0.001953125f;  // 2^-9
  } else {
    uint32_t bits = magnitude == 0x7f ? 0x7fc00000u : (magnitude + ((127u - 7u) << 3)) << 20;
    memcpy(&size, &bits, sizeof(size));
  }
  return code & 0x80 ? -size : size;
}

}  // namespace sparse_attn

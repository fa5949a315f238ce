// Softmax in units of log2, in which the special function unit has its exponential.
#pragma once

#include "../../interval.h"

namespace sparse_attn::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// From this scale on the maximum is taken off scores in their own units: as fma(s, scale, -m *
/// scale) their difference would drown in the rounding of m * scale.
constexpr float kLargeScale = 1024.0f;

/// A scale that changes no order of scores and that the exponent takes in one product.
SPARSE_ATTN_HD bool is_common_scale(float scale) { return scale > 0.0f && scale < kLargeScale; }

}  // namespace sparse_attn::cuda

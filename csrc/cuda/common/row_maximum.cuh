// The maximum of a row of scores that a quad, four lanes, shares, as mma's and wgmma's accumulators
// are laid out: a lane holds columns 8i and 8i + 1 of its rows r = 0, 1 in s[4i + 2r], s[4i + 2r +
// 1]. By the bits of scores an instruction takes two: floats without a sign have the order of their
// bits, and those with one come before them as integers too. Of floats that all have a sign it
// finds the lowest one; then they are ordered as floats.
#pragma once

#include "quad.cuh"

namespace sparse_attn::cuda {

/// Octaves by which a row's highest score may lie above what engines take for its maximum, so that
/// it seldom moves: P stays within 2^8.
constexpr float kMostLag = 8.0f;

/// The float whose bits are the least integer: a maximum by bits of no scores.
constexpr float kLeastBits = -0.0f;

__device__ __forceinline__ float quad_max_by_bits(float x) {
  int bits = __float_as_int(x);
  bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
  return __int_as_float(max(bits, __shfl_xor_sync(~0u, bits, 2)));
}

__device__ __forceinline__ bool has_sign(float x) { return __float_as_int(x) < 0; }

/// The highest of a lane's scores of row r.
template <int kCount>
__device__ __forceinline__ float highest(const float (&s)[kCount], int r) {
  float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
  for (int i = 1; i < kCount / 4; ++i) {
    even = fmaxf(even, s[4 * i + 2 * r]);
    odd = fmaxf(odd, s[4 * i + 2 * r + 1]);
  }
  return fmaxf(even, odd);
}

/// The highest of those and m by their bits, in kChains that do not wait for each other. NaN
/// without a sign is the highest.
template <int kChains, int kCount>
__device__ __forceinline__ float highest_by_bits(float m, const float (&s)[kCount], int r) {
  int top[kChains];
#pragma unroll
  for (int& x : top) x = __float_as_int(m);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    int& x = top[i % kChains];
    x = __vimax3_s32(x, __float_as_int(s[4 * i + 2 * r]), __float_as_int(s[4 * i + 2 * r + 1]));
  }
  return __int_as_float(max(top[0], top[kChains - 1]));
}

}  // namespace sparse_attn::cuda

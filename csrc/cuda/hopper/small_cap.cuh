// Softcap of key tiles whose scores are all small beside it: a polynomial that ends in the product
// that the exponential takes anyhow. Other tiles take cap_scores() of softmax.cuh.
#pragma once

#include "softmax.cuh"

namespace sparse_attn::cuda::hopper {

/// Softcap where all scores of a tile are small beside it: cap tanh(s / cap) as s P(s^2), of which
/// the exponent of 2 is one product more. The highest score's is the highest, since P rises with s.
struct SmallCap {
  float terms[4];     // of P, in exponents of 2
  float limit = 0;    // of |s|
  float inverse = 0;  // of the exponents' unit

  /// That of scores times `rate`, to which the cap is 1: relative error 4e-7 in float32.
  static SmallCap of(double rate, double scale_log2) {
    constexpr double kTanh[] = {0.999999757, -0.333294672, 0.132363688, -0.0460281841};
    constexpr double kEnd = 0.45, kMostRate = 100, kMostScore = 1e9;  // so that nothing overflows
    SmallCap cap = {};
    if (rate <= 0 || rate > kMostRate) return cap;
    double power = scale_log2 * rate;
    for (int i = 0; i < 4; ++i, power *= rate * rate) {
      cap.terms[i] = static_cast<float>(kTanh[i] * power);
    }
    cap.limit = static_cast<float>(kEnd / rate < kMostScore ? kEnd / rate : kMostScore);
    cap.inverse = static_cast<float>(1 / scale_log2);
    return cap;
  }
  __device__ __forceinline__ float factor(float s) const {
    const float z = s * s;
    return fmaf(fmaf(fmaf(terms[3], z, terms[2]), z, terms[1]), z, terms[0]);
  }
};

/// Whether all scores of a warp's rows that count are small. By the bits of scores: as integers the
/// highest one is the highest without a sign or else the lowest of all, and as unsigned ones it is
/// the lowest with a sign or else the highest of all. By the extremes of rows, since what the
/// branch needs ptxas does not move past the wait that follows it.
template <class Rows, int kCount>
__device__ __forceinline__ bool are_small(const float (&s)[kCount], const SmallCap& cap,
                                          const Rows& rows) {
  float farthest = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t low = 0;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      low = __vimax3_u32(low, __float_as_uint(s[4 * i + 2 * r]),
                         __float_as_uint(s[4 * i + 2 * r + 1]));
    }
    const float high = highest_by_bits<1>(kLeastBits, s, r);
    const float extreme = fmaxf(fabsf(high), fabsf(__uint_as_float(low)));
    farthest = fmaxf(farthest, rows.counts(r) ? extreme : 0.0f);
  }
  return !__any_sync(~0u, farthest >= cap.limit);
}

/// update_maxima() for them.
template <int kCount>
__device__ __forceinline__ void update_small_maxima(const float (&s)[kCount], SoftmaxState& state,
                                                    const SmallCap& cap, float scale) {
  float high[2] = {highest_by_bits<1>(kLeastBits, s, 0), highest_by_bits<1>(kLeastBits, s, 1)};
  if (have_signs(state) && __any_sync(~0u, has_sign(high[0]) || has_sign(high[1]))) {
    high[0] = highest(s, 0);
    high[1] = highest(s, 1);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m = quad_max(high[r]);
    const float capped = m * cap.factor(m) * cap.inverse;
    move_maximum<false, true, true>(state, r, fmaxf(capped, state.m[r]), scale);
  }
}

}  // namespace sparse_attn::cuda::hopper

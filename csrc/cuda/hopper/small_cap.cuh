// Softcap of key tiles whose scores are all small beside it: a polynomial that ends in the product
// that the exponential takes anyhow, shorter where scores are smaller. Other tiles take
// cap_scores() of softmax.cuh.
#pragma once

#include "softmax.cuh"

namespace sparse_attn::cuda::hopper {

/// Where scores are small: cap tanh(s / cap) as s P(s^2), P of degree kDegree, of which the
/// exponent of 2 is one product more. The highest score's is the highest, since P rises with s.
template <int kDegree>
struct CapPolynomial {
  float terms[kDegree + 1];  // of P, in exponents of 2
  float limit = 0;           // of |s|
  float inverse = 0;         // of the exponents' unit

  /// That of scores times `rate`, to which the cap is 1, below `end`: `tanh` are the terms for x
  /// P(x^2) = tanh(x).
  static CapPolynomial of(const double (&tanh)[kDegree + 1], double end, double rate,
                          double scale_log2) {
    constexpr double kMostRate = 100, kMostScore = 1e9;  // so that nothing overflows
    CapPolynomial cap = {};
    if (rate <= 0 || rate > kMostRate) return cap;
    double power = scale_log2 * rate;
    for (int i = 0; i <= kDegree; ++i, power *= rate * rate) {
      cap.terms[i] = static_cast<float>(tanh[i] * power);
    }
    cap.limit = static_cast<float>(end / rate < kMostScore ? end / rate : kMostScore);
    cap.inverse = static_cast<float>(1 / scale_log2);
    return cap;
  }
  /// Whether it serves a warp's scores, of which those that count are so far from 0.
  __device__ __forceinline__ bool serves(float farthest) const {
    return !__any_sync(~0u, farthest >= limit);
  }
  __device__ __forceinline__ float factor(float s) const {
    const float z = s * s;
    float p = terms[kDegree];
#pragma unroll
    for (int i = kDegree - 1; i >= 0; --i) p = fmaf(p, z, terms[i]);
    return p;
  }
};

/// Relative errors of 2e-7 and 3e-7, and those of float32.
struct SmallCap {
  CapPolynomial<2> quadratic;
  CapPolynomial<3> cubic;

  static SmallCap of(double rate, double scale_log2) {
    constexpr double kQuadratic[] = {0.9999998146, -0.3332642443, 0.1295010845};
    constexpr double kCubic[] = {0.999999757, -0.333294672, 0.132363688, -0.0460281841};
    return {CapPolynomial<2>::of(kQuadratic, 0.22, rate, scale_log2),
            CapPolynomial<3>::of(kCubic, 0.45, rate, scale_log2)};
  }
};

/// The greatest |s| of a thread's rows that count. By the bits of scores: as integers the highest
/// one is the highest without a sign or else the lowest of all, and as unsigned ones it is the
/// lowest with a sign or else the highest of all. By the extremes of rows, since what the branch
/// needs ptxas does not move past the wait that follows it.
template <class Rows, int kCount>
__device__ __forceinline__ float farthest_of(const float (&s)[kCount], const Rows& rows) {
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
  return farthest;
}

/// Whether the maximum of some row of the warp that counts, followed lazily, is so low that a score
/// with a sign may move it.
template <class Rows>
__device__ __forceinline__ bool have_low_maxima(const SoftmaxState& state, const Rows& rows) {
  return __any_sync(~0u, (rows.counts(0) && state.m[0] < -kMostLag) ||
                             (rows.counts(1) && state.m[1] < -kMostLag));
}

/// update_maxima() for small scores.
template <class Cap, int kCount>
__device__ __forceinline__ void update_small_maxima(const float (&s)[kCount], SoftmaxState& state,
                                                    const Cap& cap, float scale) {
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

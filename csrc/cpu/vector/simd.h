// Vectors of the widest type that the instruction set of this compilation has, by the compiler's
// vector extension, with exp2, tanh and conversions on them. Included by the files that are
// compiled once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));  // whose sums may wrap
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef float Four __attribute__((vector_size(16)));

constexpr float kInfinity = __builtin_inff();

template <class Vector>
inline Vector load(const void* source) {
  Vector x;
  __builtin_memcpy(&x, source, sizeof(x));
  return x;
}

template <class Vector>
inline void store(void* target, Vector x) {
  __builtin_memcpy(target, &x, sizeof(x));
}

/// The first `count` elements at `source`, fewer than a vector of Floats or Halves has; then zeros.
template <class Vector>
inline Vector load_first(const void* source, int64_t count) {
#if defined(__AVX512F__)
  const uint16_t lanes = (1u << count) - 1;
  if constexpr (sizeof(Vector) == sizeof(Floats)) {
    return Vector(_mm512_maskz_loadu_ps(lanes, source));
  } else {
    return Vector(_mm256_maskz_loadu_epi16(lanes, source));
  }
#else
  Vector x = {};
  __builtin_memcpy(&x, source, count * sizeof(x[0]));
  return x;
#endif
}

/// Less 0, which the compiler knows to change nothing; more 0 would be a sum.
inline Floats broadcast(float x) { return x - Floats{}; }
inline Floats select(Ints condition, Floats a, Floats b) {
  return Floats((condition & Ints(a)) | (~condition & Ints(b)));
}
/// The larger of each pair; the second where one is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return Floats(_mm512_maskz_max_ps(-1, __m512(a), __m512(b)));
#elif defined(__AVX2__)
  return Floats(_mm256_max_ps(__m256(a), __m256(b)));
#else
  return select(a > b, a, b);
#endif
}

/// Adds 1 to the counts of the lanes in which x is less than the limit.
inline void count_less(Floats x, Floats limit, Ints* counts) {
#if defined(__AVX512F__)
  __mmask16 less = _mm512_cmp_ps_mask(__m512(x), __m512(limit), _CMP_LT_OQ);
  *counts = Ints(_mm512_mask_sub_epi32(__m512i(*counts), less, __m512i(*counts), __m512i(~Ints{})));
#else
  *counts -= x < limit;
#endif
}

/// Writes -inf over the scores that are less than the limit.
inline void hide_less(float* scores, Floats limit) {
  Floats x = load<Floats>(scores), hidden = broadcast(-kInfinity);
#if defined(__AVX512F__)
  __mmask16 less = _mm512_cmp_ps_mask(__m512(x), __m512(limit), _CMP_LT_OQ);
  _mm512_mask_storeu_ps(scores, less, __m512(hidden));
#else
  store(scores, select(x < limit, hidden, x));
#endif
}

/// The parts of four lanes joined: the upper half of a vector with the lower one until four lanes
/// are left, in the same order on every call.
template <class Join>
inline Four join_to_four(Floats x, const Join& join) {
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  const __m256 halves = __m256(
      join(Eight(_mm512_castps512_ps256(__m512(x))), Eight(_mm512_extractf32x8_ps(__m512(x), 1))));
#elif defined(__AVX2__)
  const __m256 halves = __m256(x);
#endif
#if defined(__AVX2__)
  return join(Four(_mm256_castps256_ps128(halves)), Four(_mm256_extractf128_ps(halves, 1)));
#else
  return x;
#endif
}

/// The lanes joined by halves.
template <class Join>
inline float join_lanes(Floats x, const Join& join) {
  const Four four = join_to_four(x, join);
  return join(join(four[0], four[2]), join(four[1], four[3]));
}

inline float horizontal_sum(Floats x) {
  return join_lanes(x, [](auto a, auto b) { return a + b; });
}
inline float horizontal_max(Floats x) {
  return join_lanes(x, [](auto a, auto b) { return a > b ? a : b; });
}

/// Largest of n scores, a multiple of kLanes; NaN left aside.
inline float row_max(const float* scores, int64_t n) {
  Floats max[4];
  for (Floats& x : max) x = broadcast(-kInfinity);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) max[k] = larger(load<Floats>(scores + i + k * kLanes), max[k]);
  }
  for (; i < n; i += kLanes) max[0] = larger(load<Floats>(scores + i), max[0]);
  return horizontal_max(larger(larger(max[0], max[1]), larger(max[2], max[3])));
}

inline bool has_nan(const float* scores, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (scores[i] != scores[i]) return true;
  }
  return false;
}

/// In every part of four lanes those of a (0 to 3) and of b (4 to 7) that are named.
inline Floats pick(Floats a, Floats b, int first, int second, int third, int fourth) {
  const int named[4] = {first, second, third, fourth};
  Ints lanes;
  for (int i = 0; i < kLanes; ++i) {
    lanes[i] = i / 4 * 4 + named[i % 4] % 4 + named[i % 4] / 4 * kLanes;
  }
  return __builtin_shuffle(a, b, lanes);
}

/// The sums of the lanes of four vectors, each in the same order.
inline Four sums_of_lanes(Floats a, Floats b, Floats c, Floats d) {
  const Floats ab = pick(a, b, 0, 4, 1, 5) + pick(a, b, 2, 6, 3, 7);
  const Floats cd = pick(c, d, 0, 4, 1, 5) + pick(c, d, 2, 6, 3, 7);
  return join_to_four(pick(ab, cd, 0, 1, 4, 5) + pick(ab, cd, 2, 3, 6, 7),
                      [](auto x, auto y) { return x + y; });
}

/// A bit per lane that is set.
inline uint32_t lane_bits(Ints condition) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(__m512i(condition));
#elif defined(__AVX2__)
  return _mm256_movemask_ps(__m256(condition));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(condition[i] & 1) << i;
  return bits;
#endif
}

/// `x` with `rest` in the lanes outside [begin, end).
inline Floats keep_lanes(Floats x, int32_t begin, int32_t end, float rest) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return select((lane >= begin) & (lane < end), x, broadcast(rest));
}

/// 2^r for |r| <= 1/2 by the minimax polynomial of degree 6 (relative error 2e-9).
inline Floats exp2_near_zero(Floats r) {
  Floats p = r * 0x1.41fbbap-13f + 0x1.5f3e54p-10f;
  p = p * r + 0x1.3b2d4cp-7f;
  p = p * r + 0x1.c6aee8p-5f;
  p = p * r + 0x1.ebfbdcp-3f;
  p = p * r + 0x1.62e430p-1f;
  return p * r + 1.0f;
}

/// 2^t for t <= 1, 0 below -126; within 1 ulp. t = n + r with n by rounding and |r| <= 1/2.
inline Floats exp2(Floats t) {
#if defined(__AVX512F__)
  constexpr int kNearest = 0;
  const __m512 r = _mm512_maskz_reduce_ps(-1, __m512(t), kNearest);
  const __m512 n = __m512(t - Floats(r));
  const __mmask16 normal = _mm512_cmp_ps_mask(__m512(t), _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return Floats(_mm512_maskz_scalef_ps(normal, __m512(exp2_near_zero(Floats(r))), n));
#else
  constexpr float kRound = 0x1.8p23f;  // adding it leaves n in the low bits
  Floats shifted = t + kRound;
  Floats y = exp2_near_zero(t - (shifted - kRound)) * Floats((Bits(shifted) + 127) << 23);
  return Floats(Ints(y) & ~(t < -126.0f));
#endif
}

/// tanh(y): y + y^3 P(y^2) below 0.625 (minimax, relative error 4e-9), else by exp2.
inline Floats tanh(Floats y) {
  constexpr float kTwoLog2E = 2.8853900817779268f;
  Floats magnitude = Floats(Ints(y) & 0x7fffffff);
  Floats z = y * y;
  Floats p = z * -0.00571703259f + 0.0206505749f;
  p = p * z - 0.0537434928f;
  p = p * z + 0.133314908f;
  p = p * z - 0.333332837f;
  Floats small = p * z * y + y;
  Floats e = exp2(magnitude * -kTwoLog2E);
  Floats large = (1.0f - e) / (1.0f + e);
  large = Floats(Ints(large) | (Ints(y) & int32_t(0x80000000)));
  return select(magnitude < 0.625f, small, large);
}

inline Floats float_of_bfloat16(Halves h) { return Floats(__builtin_convertvector(h, Ints) << 16); }

/// Rounded to nearest, ties to even; NaN stays NaN.
inline Halves bfloat16_of_float(Floats x) {
  Bits bits = Bits(x);
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits is_nan = Bits(x != x);
  rounded = (is_nan & ((bits >> 16) | 0x40)) | (~is_nan & rounded);
  return __builtin_convertvector(rounded & 0xffff, Halves);
}

#if defined(__AVX512F__)
inline Floats float_of_float16(Halves h) { return Floats(_mm512_maskz_cvtph_ps(-1, __m256i(h))); }
inline Halves float16_of_float(Floats x) { return Halves(_mm512_maskz_cvtps_ph(-1, __m512(x), 0)); }
#elif defined(__F16C__)
inline Floats float_of_float16(Halves h) { return Floats(_mm256_cvtph_ps(__m128i(h))); }
inline Halves float16_of_float(Floats x) { return Halves(_mm256_cvtps_ph(__m256(x), 0)); }
#else
/// Exponents move by a product with 2^112, which also scales subnormals; infinities and NaN apart.
inline Floats float_of_float16(Halves h) {
  Ints bits = __builtin_convertvector(h, Ints);
  Ints magnitude = (bits & 0x7fff) << 13;
  Ints special = magnitude >= 0x0f800000;
  Ints finite = Ints(Floats(magnitude) * 0x1p112f);
  Ints result = (special & (magnitude | 0x7f800000)) | (~special & finite);
  return Floats(result | ((bits & 0x8000) << 16));
}

/// Rounded to nearest, ties to even. Subnormal results round in the sum with 0.5, whose last place
/// is float16's smallest subnormal.
inline Halves float16_of_float(Floats x) {
  Ints bits = Ints(x);
  Ints sign = (bits >> 16) & 0x8000;
  Ints magnitude = bits & 0x7fffffff;
  Ints normal = Ints((Bits(magnitude) - 0x38000000 + 0xfff + ((Bits(magnitude) >> 13) & 1)) >> 13);
  Ints subnormal = Ints(Floats(magnitude) + 0.5f) - 0x3f000000;
  Ints is_small = magnitude < 0x38800000;
  Ints result = (is_small & subnormal) | (~is_small & normal);
  Ints overflow = magnitude >= 0x47800000;
  result = (overflow & 0x7c00) | (~overflow & result);
  Ints is_nan = magnitude > 0x7f800000;
  result = (is_nan & 0x7e00) | (~is_nan & result);
  return __builtin_convertvector(result | sign, Halves);
}
#endif

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA

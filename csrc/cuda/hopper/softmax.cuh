// Online softmax on a wgmma accumulator (Milakov & Gimelshein 2018): a thread holds two rows r = 0,
// 1 of a tile, columns 8i and 8i + 1 of each in s[4i + 2r] and s[4i + 2r + 1]; the four threads of
// a quad share a row. The sum stays per thread until the row is finished.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "../common/log2_units.h"
#include "../common/quad.cuh"
#include "../common/row_maximum.cuh"
#include "../common/tanh.cuh"

namespace sparse_attn::cuda::hopper {

using ptx::exp2_approx;

/// m, l, the factor by which the newest m rescales O, and the shift scale * m. Where maxima are
/// followed lazily m is in log2 units, and so equal to the shift, which is 0 of a row that has seen
/// no key.
struct SoftmaxState {
  float m[2];
  float l[2];
  float rescale[2];
  float shift[2];
};

/// Whether some row of the warp may have only scores with a sign. Known before a tile's scores are,
/// so that what asks it stands in nobody's way.
__device__ __forceinline__ bool have_signs(const SoftmaxState& state) {
  return __any_sync(~0u, has_sign(state.m[0]) || has_sign(state.m[1]));
}

/// m in log2 units; under masks of the lowest float it would overflow.
template <bool kBiased>
__device__ __forceinline__ float log2_of_maximum(float m, float scale_log2) {
  const float exponent = m * scale_log2;
  if (!kBiased || m == -INFINITY) return exponent;
  return ptx::clamp(exponent, FLT_MAX);
}

/// The natural logarithm of a row's sum of exponentials, of m in log2 units; -inf where no key is.
__device__ __forceinline__ float log_sum(float m, float l) {
  return l == 0.0f ? -INFINITY : m * kLn2 + __logf(l);
}

/// 1 / l of a row of a head, whose sink logit joins the sum; 0 where no key is.
__device__ __forceinline__ float inverse_of(float m, float l, const float* sink_logits,
                                            int32_t head) {
  float sum = l;
  if (sink_logits != nullptr) sum += exp2_approx(sink_logits[head] * kLog2e - m);
  return l == 0.0f ? 0.0f : 1.0f / sum;
}

/// Drops the scores of keys that a row does not see: bit j of its word is column j of the thread,
/// or, where kByThread, the words have been through `by_thread`. In the order of the bits, of which
/// one instruction makes seven predicates: of all of them if scores stay where they are (kInPlace),
/// by which kernels that seldom mask lose 1 to 3 %.
template <bool kByThread, bool kInPlace, int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], const uint32_t (&visible)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      const int j = kByThread ? bit % 8 / 2 * 8 + bit / 8 * 2 + bit % 2 : bit;
      if (j >= kCount / 2) continue;
      float& own = s[j / 2 * 4 + 2 * r + j % 2];
      if constexpr (kInPlace) {
        ptx::hide_unless_set(own, visible[r], 1u << bit);
      } else {
        own = visible[r] & (1u << bit) ? own : -INFINITY;
      }
    }
  }
}

/// Updates m of row r, and what follows from it: the factor on what was summed before, and the
/// shift scale * m. The factor is the shifts', so that it is 1 under the same m: off by a rounding
/// it would show after a thousand tiles. kFirst begins the rows; kMasked says that a row may have
/// seen no key yet, even in this tile; without kHeldShift the last shift is recomputed from m,
/// which takes no register.
template <bool kFirst, bool kMasked, bool kHeldShift>
__device__ __forceinline__ void move_maximum(SoftmaxState& state, int r, float m, float scale) {
  const float before = kHeldShift ? state.shift[r] : __fmul_rn(state.m[r], scale);
  state.shift[r] = kMasked && m == -INFINITY ? -FLT_MAX : m * scale;
  state.rescale[r] = kFirst ? 1.0f : exp2_approx(before - state.shift[r]);
  state.l[r] = kFirst ? 0.0f : state.l[r] * state.rescale[r];
  state.m[r] = m;
}

/// The same for both rows, by their scores: by the bits of those in kBitChains, if not 0, and again
/// by their order where a row of the warp has only scores with a sign.
template <bool kFirst, bool kMasked, bool kHeldShift = true, int kBitChains = 0, int kCount>
__device__ __forceinline__ void update_maxima(const float (&s)[kCount], SoftmaxState& state,
                                              float scale) {
  static_assert(!kFirst || kBitChains == 0, "there is no maximum to begin with");
  const bool signs = kBitChains > 0 && have_signs(state);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = kFirst ? -INFINITY : state.m[r];
    if constexpr (kBitChains > 0) {
      const float top = quad_max_by_bits(highest_by_bits<kBitChains>(m, s, r));
      const bool again = signs && __any_sync(~0u, has_sign(top));
      m = again ? quad_max(fmaxf(highest(s, r), m)) : top;
    } else {
      m = quad_max(kFirst ? highest(s, r) : fmaxf(highest(s, r), m));
    }
    move_maximum<kFirst, kMasked, kHeldShift>(state, r, m, scale);
  }
}

/// The same for scores so large that the rounding of the shift would show: m comes off the scores.
template <bool kFirst, int kCount>
__device__ __forceinline__ void take_maxima_off(float (&s)[kCount], SoftmaxState& state,
                                                float scale) {
  const SoftmaxState before = state;
  update_maxima<kFirst, true>(s, state, scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float origin = state.m[r] == -INFINITY ? 0.0f : state.m[r];
    if constexpr (!kFirst) {
      state.rescale[r] = exp2_approx((before.m[r] - origin) * scale);
      state.l[r] = before.l[r] * state.rescale[r];
    }
    state.shift[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      s[4 * i + 2 * r] -= origin;
      s[4 * i + 2 * r + 1] -= origin;
    }
  }
}

/// What a score is multiplied by to be an exponent of 2.
struct PlainScores {
  float scale_log2;
  __device__ __forceinline__ float factor(float) const { return scale_log2; }
};

/// Replaces the scores of row r by the powers of 2 of their exponents and adds them to l.
template <int r, class Exponent, int kCount>
__device__ __forceinline__ void sum_powers(float (&s)[kCount], SoftmaxState& state,
                                           const Exponent& exponent) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    float& a = s[4 * i + 2 * r];
    float& b = s[4 * i + 2 * r + 1];
    a = exp2_approx(exponent(a));
    b = exp2_approx(exponent(b));
    even += a;
    odd += b;
  }
  state.l[r] += even + odd;
}

/// Replaces the scores of row r by exp2(scale * (s - m)) and adds them to l.
template <int r, class Scores, int kCount>
__device__ __forceinline__ void exponentiate(float (&s)[kCount], SoftmaxState& state,
                                             const Scores& scores) {
  const float shift = state.shift[r];
  sum_powers<r>(s, state, [&](float x) { return fmaf(x, scores.factor(x), -shift); });
}

// ---- Maxima that are followed lazily ------------------------------------------------------------
// m may stay up to kMostLag below a row's highest score. So a tile seldom moves it, and most steps
// rescale nothing, and ask no other lane for its maximum. A row's m depends on its own scores
// alone.

/// m of rows that begin.
template <int kCount>
__device__ __forceinline__ void begin_maxima(const float (&s)[kCount], SoftmaxState& state,
                                             float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = quad_max(highest(s, r));
    const bool sees = top != -INFINITY;
    state.shift[r] = sees ? top * scale : 0.0f;
    state.m[r] = sees ? state.shift[r] : -INFINITY;
    state.rescale[r] = 1.0f;
    state.l[r] = 0.0f;
  }
}

/// Makes exponents of 2 of the scores of row r, and calls visit(i, one, other) for each two.
template <int r, class Scores, int kCount, class Visit>
__device__ __forceinline__ void make_exponents(float (&s)[kCount], const SoftmaxState& state,
                                               const Scores& scores, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    float& a = s[4 * i + 2 * r];
    float& b = s[4 * i + 2 * r + 1];
    a = fmaf(a, scores.factor(a), -state.shift[r]);
    b = fmaf(b, scores.factor(b), -state.shift[r]);
    visit(i, a, b);
  }
}

/// The same; returns whether m is to move, of some row of the warp: as integers only floats above
/// kMostLag, and NaN without a sign, are above it.
template <int r, class Scores, int kCount>
__device__ __forceinline__ bool take_exponents(float (&s)[kCount], const SoftmaxState& state,
                                               const Scores& scores) {
  int top[2] = {__float_as_int(kLeastBits), __float_as_int(kLeastBits)};
  make_exponents<r>(s, state, scores, [&](int i, float a, float b) {
    top[i % 2] = __vimax3_s32(top[i % 2], __float_as_int(a), __float_as_int(b));
  });
  return __any_sync(~0u, max(top[0], top[1]) > __float_as_int(kMostLag) || state.m[r] == -INFINITY);
}

/// The same by the lane's highest score, or by any where all have a sign and m is -kMostLag or
/// more: those do not move it.
template <int r, class Scores, int kCount>
__device__ __forceinline__ bool take_exponents(float (&s)[kCount], const SoftmaxState& state,
                                               const Scores& scores, float high) {
  const float top = fmaf(high, scores.factor(high), -state.shift[r]);
  make_exponents<r>(s, state, scores, [](int, float, float) {});
  return __any_sync(~0u, top > kMostLag || state.m[r] == -INFINITY);
}

/// Moves m of row r to the highest of its exponents `x`, where that is more than kMostLag above it
/// or the first one; rescale is then the factor on what was summed before.
template <int r, int kCount>
__device__ __forceinline__ void follow_maximum(float (&x)[kCount], SoftmaxState& state) {
  const float top = quad_max(highest(x, r));
  const bool first = state.m[r] == -INFINITY;
  const bool moves = first ? top > -INFINITY : top > kMostLag;
  const float before = state.shift[r];
  if (moves) state.m[r] = state.shift[r] = before + top;
  const float rise = moves ? state.shift[r] - before : 0.0f;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    x[4 * i + 2 * r] -= rise;
    x[4 * i + 2 * r + 1] -= rise;
  }
  state.rescale[r] = first ? 1.0f : exp2_approx(-rise);
  state.l[r] *= state.rescale[r];
}

/// Replaces the scores of row r by the powers of 2 of what they are above m, and adds those to l.
/// Returns whether m may have moved, of some row of the warp; then rescale is new. `high`: the
/// lane's highest score, where it is known.
template <int r, class Scores, int kCount, class... High>
__device__ __forceinline__ bool exponentiate_lazily(float (&s)[kCount], SoftmaxState& state,
                                                    const Scores& scores, High... high) {
  const bool moves = take_exponents<r>(s, state, scores, high...);
  if (__builtin_expect(moves, 0)) follow_maximum<r>(s, state);
  sum_powers<r>(s, state, [](float x) { return x; });
  return moves;
}

// ---- Softcap ------------------------------------------------------------------------------------

/// Which of a thread's two rows count where the scores of a tile choose a way for it: all, or those
/// from the sequence's end on do not, where the next one begins.
struct AllRows {
  __device__ __forceinline__ constexpr bool counts(int) const { return true; }
};
struct OwnRows {
  int32_t left;  // of the sequence, from the thread's first row on
  __device__ __forceinline__ bool counts(int r) const { return 8 * r < left; }
};

/// tanh(kTanhUnit v) as v P(v^2) for |v| < 2, with a relative error of 5e-7 in float32.
constexpr float kTanhUnit = 0.35f;
__device__ __forceinline__ float tanh_polynomial(float v) {
  const float z = v * v;
  float p = fmaf(1.09854572e-6f, z, -3.28235759e-5f);
  p = fmaf(p, z, 6.97892825e-4f);
  p = fmaf(p, z, -1.42907027e-2f);
  return v * fmaf(p, z, kTanhUnit);
}

/// Replaces v by tanh(kTanhUnit v). Most tiles have no score of 2 units or more, which shows in a
/// bit of the exponent; NaN and infinities have it too. Tiles of which some keys are hidden take
/// the long way, since hidden scores may not choose, nor may rows that do not count; so do kernels
/// without registers for both ways.
template <bool kBothWays, class Rows, int kCount>
__device__ __forceinline__ void cap_scores(float (&v)[kCount], bool whole, const Rows& rows) {
  constexpr uint32_t kTwoOrMore = 0x40000000;
  if constexpr (kBothWays) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits |= rows.counts(i / 2 % 2) ? __float_as_uint(v[i]) : 0;
    if (whole && !__any_sync(~0u, bits & kTwoOrMore)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = tanh_polynomial(v[i]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = tanh_rational(kTanhUnit * v[i]);
}

}  // namespace sparse_attn::cuda::hopper

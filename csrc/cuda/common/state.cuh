// Online softmax in registers (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1). Scores are
// in mma fragments: lane 4 g + t holds rows g and g + 8 of each 16-row tile, columns 2 t and 2 t +
// 1 of each 8-column tile. m is kept in log2 units, or in the scores' own, l as a sum of the
// thread's own columns until finish().
#pragma once

#include <cuda_runtime.h>

#include <cfloat>

#include "log2_units.h"
#include "ptx/math.cuh"
#include "row_maximum.cuh"

namespace sparse_attn::cuda {

/// 2^x, by the special function unit for half precision, within 2 ulp for float32.
template <bool kExact>
__device__ __forceinline__ float exp2_of(float x) {
  if constexpr (kExact) return exp2f(x);
  return ptx::exp2_approx(x);
}

template <typename Combine>
__device__ __forceinline__ float reduce_quad(float x, const Combine& combine) {
  x = combine(x, __shfl_xor_sync(~0u, x, 1));
  return combine(x, __shfl_xor_sync(~0u, x, 2));
}

/// How scores become exponents of 2. Scores of any size are `huge`, such as those under masks of
/// -1e12 or the lowest float: m is then in their own unit and comes off before the product with
/// `scale`, which would round by more than 1, or overflow.
struct Exponent {
  float scale;  // positive
  bool huge;
};

template <int MT, bool kExact>
struct SoftmaxState {
  float m[MT][2];
  float l[MT][2];

  __device__ __forceinline__ void init() {
#pragma unroll
    for (int row = 0; row < 2 * MT; ++row) {
      m[row / 2][row % 2] = -INFINITY;
      l[row / 2][row % 2] = 0.0f;
    }
  }

  /// The thread's highest score of row g or g + 8.
  template <int NT>
  __device__ __forceinline__ static float highest(const float (&rS)[NT][4], int h) {
    float top = fmaxf(rS[0][2 * h], rS[0][2 * h + 1]);
#pragma unroll
    for (int nt = 1; nt < NT; ++nt) top = fmaxf(top, fmaxf(rS[nt][2 * h], rS[nt][2 * h + 1]));
    return top;
  }

  /// Raises m to the scores' maxima where they lie more than kMostLag above, and writes what the
  /// output so far and l must be multiplied by. Smaller steps are not taken: under scores that rise
  /// from tile to tile the factors' errors, alike in all, would multiply. Huge scores become
  /// relative to m.
  template <int NT>
  __device__ __forceinline__ void raise(float (&rS)[MT][NT][4], Exponent exponent,
                                        float (&rescale)[MT][2]) {
    const float of_score = exponent.huge ? 1.0f : exponent.scale;  // in the unit of m
    const float of_m = exponent.huge ? exponent.scale : 1.0f;      // in log2 units
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = reduce_quad(highest(rS[mt], h), [](float a, float b) { return fmaxf(a, b); });
        top *= of_score;
        float m_new = (top - m[mt][h]) * of_m > kMostLag ? top : m[mt][h];
        rescale[mt][h] = exp2_of<kExact>((m[mt][h] - shift(m_new)) * of_m);
        m[mt][h] = m_new;
      }
    }
    if (!exponent.huge) return;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) rS[mt][nt][e] -= shift(m[mt][e / 2]);
      }
    }
  }

  /// Turns the scores of fragments [first, end) into P = 2^(scale * S - m), and adds them to `sum`.
  template <int NT>
  __device__ __forceinline__ void exponentiate(float (&rS)[MT][NT][4], Exponent exponent, int first,
                                               int end, float (&sum)[MT][2]) const {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float off = exponent.huge ? 0.0f : shift(m[mt][h]);
#pragma unroll
        for (int nt = first; nt < end; ++nt) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            rS[mt][nt][e] = exp2_of<kExact>(fmaf(rS[mt][nt][e], exponent.scale, -off));
            sum[mt][h] += rS[mt][nt][e];
          }
        }
      }
    }
  }

  /// Takes in the sums of a tile, which is summed by itself so that long sums lose little.
  __device__ __forceinline__ void add(const float (&rescale)[MT][2], const float (&sum)[MT][2]) {
#pragma unroll
    for (int row = 0; row < 2 * MT; ++row) {
      float& total = l[row / 2][row % 2];
      total = fmaf(total, rescale[row / 2][row % 2], sum[row / 2][row % 2]);
    }
  }

  /// All of a tile at once: its scores become P. Returns whether the output so far is to be
  /// rescaled; a warp calls it.
  template <int NT>
  __device__ __forceinline__ bool update(float (&rS)[MT][NT][4], Exponent exponent,
                                         float (&rescale)[MT][2]) {
    // Mostly no thread has a score so far above m: then raise() would change nothing.
    bool raised = exponent.huge;
#pragma unroll
    for (int row = 0; row < 2 * MT; ++row) {
      rescale[row / 2][row % 2] = 1.0f;
      const float top = highest(rS[row / 2], row % 2) * exponent.scale;
      raised |= top - m[row / 2][row % 2] > kMostLag;
    }
    raised = __any_sync(~0u, raised);
    if (raised) raise(rS, exponent, rescale);
    float sum[MT][2] = {};
    exponentiate(rS, exponent, 0, NT, sum);
    add(rescale, sum);
    return raised;
  }

  /// Sums l over the row's threads, and brings m to log2 units, where it must not overflow.
  __device__ __forceinline__ void finish(Exponent exponent) {
#pragma unroll
    for (int row = 0; row < 2 * MT; ++row) {
      float& top = m[row / 2][row % 2];
      if (exponent.huge && top != -INFINITY) {
        top = fminf(fmaxf(top * exponent.scale, -FLT_MAX), FLT_MAX);
      }
      float& sum = l[row / 2][row % 2];
      sum = reduce_quad(sum, [](float a, float b) { return a + b; });
    }
  }

  /// What exponents are relative to: m, or 0 while there is no key and every P is 2^-inf.
  __device__ __forceinline__ static float shift(float m) { return m == -INFINITY ? 0.0f : m; }

  /// The natural logarithm of the sum of exponentials; -inf for a row without keys, whose sum is 0.
  __device__ __forceinline__ float lse(int mt, int h) const {
    return l[mt][h] == 0.0f ? -INFINITY : kLn2 * (m[mt][h] + log2f(l[mt][h]));
  }

  /// What the output must be multiplied by: 1 / l, with a sink logit (natural units, -inf for none)
  /// in the denominator; 0 for a row without keys.
  __device__ __forceinline__ float weight(int mt, int h, float sink) const {
    if (l[mt][h] == 0.0f) return 0.0f;
    if (sink == -INFINITY) return 1.0f / l[mt][h];
    sink *= kLog2e;
    float top = fmaxf(m[mt][h], sink);
    float w = exp2f(m[mt][h] - top);
    return w / (l[mt][h] * w + (sink == top ? 1.0f : exp2f(sink - top)));  // 1 for infinity too
  }
};

}  // namespace sparse_attn::cuda

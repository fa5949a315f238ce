// The loops of token top-k for one instruction set, included by vector_math.cpp: candidates above a
// threshold, and the k highest of them. Nothing branches on a score, because which scores are high
// cannot be predicted; a vector's chosen lanes move together to its front instead.
#pragma once

#include "cpu/vector/simd.h"
#include "cpu/vector/vector_threshold.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
/// For each set of lanes, their numbers in order.
struct LaneOrders {
  uint8_t lanes[256][8] = {};
  constexpr LaneOrders() {
    for (int bits = 0; bits < 256; ++bits) {
      for (int lane = 0, next = 0; lane < 8; ++lane) {
        if (bits >> lane & 1) lanes[bits][next++] = static_cast<uint8_t>(lane);
      }
    }
  }
};
constexpr LaneOrders kLaneOrders;
#endif

/// Stores the lanes whose bit is set one after the other; whole vectors are written.
template <class Vector>
inline void store_chosen(void* target, Vector x, uint32_t bits) {
#if defined(__AVX512F__)
  store(target, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), __m512i(x)));
#elif defined(__AVX2__)
  __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kLaneOrders.lanes[bits]));
  store(target, _mm256_permutevar8x32_epi32(__m256i(x), _mm256_cvtepu8_epi32(lanes)));
#else
  Ints chosen = {};
  for (int lane = 0, next = 0; lane < kLanes; ++lane) {
    chosen[next] = Ints(x)[lane];
    next += bits >> lane & 1;
    next = next < kLanes ? next : kLanes - 1;
  }
  store(target, chosen);
#endif
}

int32_t collect(const float* scores, int32_t n, float threshold, int32_t first, float* candidates,
                int32_t* columns) {
  int32_t count = 0;
  Ints column;
  for (int lane = 0; lane < kLanes; ++lane) column[lane] = first + lane;
  auto append = [&](Floats x, uint32_t among) {
    uint32_t bits = lane_bits(~(x <= threshold)) & among;
    store_chosen(candidates + count, x, bits);
    store_chosen(columns + count, column, bits);
    count += __builtin_popcount(bits);
    column += kLanes;
  };
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) append(load<Floats>(scores + i), ~0u);
  if (i < n) {
    Floats x = {};
    __builtin_memcpy(&x, scores + i, (n - i) * sizeof(float));
    append(x, (1u << (n - i)) - 1);
  }
  return count;
}

int32_t keep_highest(float* candidates, int32_t* columns, int32_t n, int32_t k, int32_t most,
                     float* threshold) {
  int32_t whole = (n + kLanes - 1) / kLanes * kLanes;
  for (int32_t i = n; i < whole; ++i) candidates[i] = -kInfinity;
  Bracket bracket = find_threshold(candidates, whole, k, most);
  float least = score_of_rank(bracket.low);
  *threshold = least;
  int32_t kept = 0;
  for (int32_t i = 0; i < n; i += kLanes) {
    Floats x = load<Floats>(candidates + i);
    Ints column = load<Ints>(columns + i);
    uint32_t bits = lane_bits(~(x < least));
    store_chosen(candidates + kept, x, bits);
    store_chosen(columns + kept, column, bits);
    kept += __builtin_popcount(bits);
  }
  if (bracket.reach_low <= most) return bracket.reach_low;
  // Of equal scores the first stay.
  int32_t room = k;
  for (int32_t i = 0; i < bracket.reach_low; ++i) room -= !(candidates[i] <= least);
  for (int32_t i = 0, next = 0; next < k; ++i) {
    bool tie = candidates[i] <= least;
    candidates[next] = candidates[i];
    columns[next] = columns[i];
    next += !tie || room > 0;
    room -= tie;
  }
  return k;
}

/// Writes -inf over all but the k highest of n scores, a multiple of kLanes; more than k are there.
void drop_others(float* scores, int32_t n, int32_t k) {
  Bracket bracket = find_threshold(scores, n, k, k);
  float least = score_of_rank(bracket.low);
  if (least == -kInfinity) return;
  for (int32_t i = 0; i < n; i += kLanes) hide_less(scores + i, broadcast(least));
  int32_t surplus = bracket.reach_low - k;
  for (int32_t i = n - 1; surplus > 0 && i >= 0; --i) {
    if (!(scores[i] <= least) || scores[i] == -kInfinity) continue;
    scores[i] = -kInfinity;
    --surplus;
  }
}

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA

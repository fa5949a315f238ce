// The loops of token top-k for one instruction set, included by vector_math.cpp: candidates above a
// threshold, and the k highest of them. Nothing branches on a score, because which scores are high
// cannot be predicted; a vector's chosen lanes move together to its front instead.
#pragma once

#include "simd.h"

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

/// Stores the lanes whose bit is set one behind the other; whole vectors are written.
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

/// Numbers in the order of the scores, without gaps between neighbours; -0 counts as 0.
inline int64_t rank_of_score(float score) {
  int32_t bits;
  score += 0.0f;
  __builtin_memcpy(&bits, &score, sizeof(bits));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float score_of_rank(int64_t rank) {
  int32_t bits = static_cast<int32_t>(rank ^ ((rank >> 31) & 0x7fffffff));
  float score;
  __builtin_memcpy(&score, &bits, sizeof(score));
  return score;
}

/// How many of n scores, a multiple of kLanes, are not below `score`.
int32_t count_from(const float* scores, int32_t n, float score) {
  Ints below[4] = {};
  int32_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) below[k] += load<Floats>(scores + i + k * kLanes) < score;
  }
  for (; i < n; i += kLanes) below[0] += load<Floats>(scores + i) < score;
  Ints sum = (below[0] + below[1]) + (below[2] + below[3]);
  int32_t count = n;
  for (int lane = 0; lane < kLanes; ++lane) count += sum[lane];
  return count;
}

/// Scores by rank, low <= rank < high, and how many reach the two.
struct Bracket {
  int64_t low, high;
  int32_t reach_low, reach_high;
};

Bracket bracket_all(const float* scores, int32_t n) {
  Floats most = broadcast(-kInfinity), most_below = most;
  for (int32_t i = 0; i < n; i += kLanes) {
    Floats x = load<Floats>(scores + i);
    most = larger(x, most);
    most_below = larger(-x, most_below);
  }
  return {rank_of_score(-horizontal_max(most_below)), rank_of_score(horizontal_max(most)) + 1, n,
          0};
}

/// A rank inside the bracket: by the counts at its ends, which mostly come close in few steps, or,
/// every third time, halfway, which bounds the number of steps.
int64_t split(const Bracket& bracket, int32_t wanted, int step) {
  int64_t half = bracket.low + (bracket.high - bracket.low) / 2;
  if (step % 3 == 0) return half;
  float low = score_of_rank(bracket.low), high = score_of_rank(bracket.high - 1);
  float part = static_cast<float>(bracket.reach_low - wanted) /
               static_cast<float>(bracket.reach_low - bracket.reach_high);
  float score = low + (high - low) * part;
  if (!(score > low && score < high)) return half;
  return rank_of_score(score);
}

/// Narrows the bracket, whose low end k or more reach, until no more than `most` reach it or it
/// holds a single score.
void narrow(const float* scores, int32_t n, int32_t k, int32_t most, Bracket* bracket) {
  for (int step = 1; bracket->reach_low > most && bracket->high - bracket->low > 1; ++step) {
    int64_t middle = split(*bracket, k + (most - k) / 2, step);
    int32_t count = count_from(scores, n, score_of_rank(middle));
    if (count >= k) {
      bracket->low = middle;
      bracket->reach_low = count;
    } else {
      bracket->high = middle;
      bracket->reach_high = count;
    }
  }
}

int32_t keep_highest(float* candidates, int32_t* columns, int32_t n, int32_t k, int32_t most,
                     float* threshold) {
  int32_t whole = (n + kLanes - 1) / kLanes * kLanes;
  for (int32_t i = n; i < whole; ++i) candidates[i] = candidates[0];
  Bracket bracket = bracket_all(candidates, whole);
  for (int32_t i = n; i < whole; ++i) candidates[i] = -kInfinity;
  bracket.reach_low = n;
  narrow(candidates, whole, k, most, &bracket);
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

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA

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

/// Integers in the order of the floats; -0 equals 0, NaN stands above everything.
inline Ints ordered(Floats x) {
  Ints bits = Ints(x + 0.0f);
  Ints is_nan = x != x;
  return (~is_nan & (bits ^ ((bits >> 31) & 0x7fffffff))) | (is_nan & 0x7fffffff);
}

inline int32_t rank_of_score(float score) { return ordered(broadcast(score))[0]; }

/// A score that everything of a higher rank is above; infinity for that of NaN.
inline float score_of_rank(int32_t rank) {
  int32_t bits = rank ^ ((rank >> 31) & 0x7fffffff);
  float score;
  __builtin_memcpy(&score, &bits, sizeof(score));
  return score == score ? score : kInfinity;
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

/// How many of n ranks, a multiple of kLanes, are not below `rank`.
int32_t count_from(const int32_t* ranks, int32_t n, int32_t rank) {
  Ints below[4] = {};
  int32_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) below[k] += load<Ints>(ranks + i + k * kLanes) < rank;
  }
  for (; i < n; i += kLanes) below[0] += load<Ints>(ranks + i) < rank;
  Ints sum = (below[0] + below[1]) + (below[2] + below[3]);
  int32_t count = n;
  for (int lane = 0; lane < kLanes; ++lane) count += sum[lane];
  return count;
}

/// The integers that ranks lie between: low <= rank < high.
struct RankRange {
  int64_t low, high;
};

RankRange range_of(const int32_t* ranks, int32_t n) {
  Ints least = load<Ints>(ranks), most = least;
  for (int32_t i = kLanes; i < n; i += kLanes) {
    Ints x = load<Ints>(ranks + i);
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  RankRange range = {least[0], most[0]};
  for (int lane = 1; lane < kLanes; ++lane) {
    range.low = least[lane] < range.low ? least[lane] : range.low;
    range.high = most[lane] > range.high ? most[lane] : range.high;
  }
  return {range.low, range.high + 1};
}

/// The rank of the score halfway between two ranks' scores, which mostly splits better than the
/// rank halfway; that one where there is no such score.
int64_t middle_score(RankRange range) {
  float score = 0.5f * score_of_rank(static_cast<int32_t>(range.low)) +
                0.5f * score_of_rank(static_cast<int32_t>(range.high - 1));
  int64_t rank = rank_of_score(score);
  return rank > range.low && rank < range.high ? rank : range.low + (range.high - range.low) / 2;
}

/// A rank that at least k of the n reach, `reach` of them: no more than `most` unless it is a tie.
int32_t rank_of_kth(const int32_t* ranks, int32_t n, int32_t k, int32_t most, int32_t* reach) {
  RankRange range = range_of(ranks, n);  // k reach low, fewer reach high
  for (int step = 1; *reach > most && range.high - range.low > 1; ++step) {
    // Halving the ranks every third time bounds the number of steps.
    int64_t middle = step % 3 == 0 ? range.low + (range.high - range.low) / 2 : middle_score(range);
    int32_t count = count_from(ranks, n, static_cast<int32_t>(middle));
    if (count >= k) {
      range.low = middle;
      *reach = count;
    } else {
      range.high = middle;
    }
  }
  return static_cast<int32_t>(range.low);
}

int32_t keep_highest(float* candidates, int32_t* columns, int32_t n, int32_t k, int32_t most,
                     int32_t* ranks, float* threshold) {
  int32_t whole = (n + kLanes - 1) / kLanes * kLanes;
  for (int32_t i = n; i < whole; ++i) candidates[i] = -kInfinity;
  for (int32_t i = 0; i < whole; i += kLanes) {
    store(ranks + i, ordered(load<Floats>(candidates + i)));
  }
  int32_t reach = n, kept = 0;
  int32_t rank = rank_of_kth(ranks, whole, k, most, &reach);
  *threshold = score_of_rank(rank);
  for (int32_t i = 0; i < whole; i += kLanes) {
    Ints x = load<Ints>(ranks + i);
    Floats score = load<Floats>(candidates + i);
    Ints column = load<Ints>(columns + i);
    uint32_t bits = lane_bits(x >= rank);
    store_chosen(candidates + kept, score, bits);
    store_chosen(columns + kept, column, bits);
    store_chosen(ranks + kept, x, bits);
    kept += __builtin_popcount(bits);
  }
  if (reach <= most) return reach;
  // Of equal ranks the first stay.
  int32_t room = k;
  for (int32_t i = 0; i < reach; ++i) room -= ranks[i] > rank;
  for (int32_t i = 0, next = 0; next < k; ++i) {
    bool tie = ranks[i] == rank;
    candidates[next] = candidates[i];
    columns[next] = columns[i];
    next += !tie || room > 0;
    room -= tie;
  }
  return k;
}

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA

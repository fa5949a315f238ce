// The k-th highest of a row's scores for one instruction set, included by vector_topk.h: a guess
// from a sample, then counts of what reaches a score. Counts are exact whatever the guess was.
#pragma once

#include "cpu/vector/simd.h"

namespace sparse_attn::cpu::SPARSE_ATTN_ISA {
namespace {

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
  Floats limit = broadcast(score);
  Ints below[4] = {};
  int32_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) count_less(load<Floats>(scores + i + k * kLanes), limit, &below[k]);
  }
  for (; i < n; i += kLanes) count_less(load<Floats>(scores + i), limit, &below[0]);
  Ints sum = (below[0] + below[1]) + (below[2] + below[3]);
  int32_t count = n;
  for (int lane = 0; lane < kLanes; ++lane) count -= sum[lane];
  return count;
}

/// A score that some k of n would reach, and how many scores lie in a unit around it.
struct Guess {
  float score, density;
};

/// As if scores were normal, with the mean and the deviation of some vectors; NaN where that fails.
Guess guess_threshold(const float* scores, int32_t n, int32_t k) {
  constexpr int32_t kSampleVectors = 512 / kLanes;
  int32_t step = (n / kLanes + kSampleVectors - 1) / kSampleVectors * kLanes;
  Floats sum = {}, squares = {}, count = {};
  for (int32_t i = 0; i < n; i += step) {
    Floats x = load<Floats>(scores + i);
    Ints finite = x - x == 0;
    x = Floats(Ints(x) & finite);
    sum += x;
    squares += x * x;
    count += select(finite, broadcast(1.0f), Floats{});
  }
  float total = horizontal_sum(count), mean = horizontal_sum(sum) / total;
  float deviation = __builtin_sqrtf(horizontal_sum(squares) / total - mean * mean);
  // The normal distribution's quantile, by Abramowitz & Stegun 26.2.22.
  float share = static_cast<float>(k) / static_cast<float>(n), other = 1.0f - share;
  float t = __builtin_sqrtf(-2.0f * __builtin_logf(share < other ? share : other));
  float z = t - (2.30753f + 0.27061f * t) / (1.0f + (0.99229f + 0.04481f * t) * t);
  if (share > other) z = -z;
  float density = 0.39894f * static_cast<float>(n) / deviation * __builtin_expf(-0.5f * z * z);
  return {mean + z * deviation, density};
}

/// Scores by rank, low <= rank < high, and how many reach the two.
struct Bracket {
  int64_t low, high;
  int32_t reach_low, reach_high;
  bool single() const { return high - low == 1; }
};

/// Moves the ends to scores that are there.
void tighten(const float* scores, int32_t n, Bracket* bracket) {
  float low = score_of_rank(bracket->low), last = score_of_rank(bracket->high - 1);
  Floats most = broadcast(-kInfinity), most_below = most;
  for (int32_t i = 0; i < n; i += kLanes) {
    Floats x = load<Floats>(scores + i);
    most = larger(select(x <= last, x, broadcast(-kInfinity)), most);
    most_below = larger(select(x >= low, -x, broadcast(-kInfinity)), most_below);
  }
  int64_t least = rank_of_score(-horizontal_max(most_below));
  int64_t highest = rank_of_score(horizontal_max(most));
  if (least > highest) highest = least = bracket->low;  // nothing but NaN
  bracket->low = least;
  bracket->high = highest + 1;
}

/// Finds a score that k to `most` of n scores reach, or the k-th highest where ties forbid that; n
/// is a multiple of kLanes, and more than k are there. Each step counts what reaches a score: first
/// a guess, then, until some score lies on either side, by the guess's density and somewhat
/// further, then by the counts at both ends; now and then halfway, which bounds the steps.
Bracket find_threshold(const float* scores, int32_t n, int32_t k, int32_t most) {
  constexpr int kRound = 8;
  Bracket bracket = {rank_of_score(-kInfinity), rank_of_score(kInfinity) + 1, n, 0};
  bool has_low = false, has_high = false;  // tried or seen
  int32_t wanted = k + (most - k) / 2;
  Guess guess = guess_threshold(scores, n, wanted);
  float next = guess.score;
  for (int step = 1; bracket.reach_low > most && !bracket.single(); ++step) {
    if (step % kRound == 0) {
      tighten(scores, n, &bracket);
      has_low = has_high = true;
      continue;
    }
    int64_t middle = next == next ? rank_of_score(next) : bracket.low;
    bool inside = middle > bracket.low && middle < bracket.high;
    if (!inside || step % kRound == kRound - 1) {
      middle = bracket.low + (bracket.high - bracket.low) / 2;
    }
    float tried = score_of_rank(middle);
    int32_t count = count_from(scores, n, tried);
    if (count >= k) {
      bracket.low = middle;
      bracket.reach_low = count;
      has_low = true;
    } else {
      bracket.high = middle;
      bracket.reach_high = count;
      has_high = true;
    }
    float over = static_cast<float>(count - wanted);
    if (has_low && has_high) {
      float low = score_of_rank(bracket.low), high = score_of_rank(bracket.high - 1);
      next = low + (high - low) * static_cast<float>(bracket.reach_low - wanted) /
                       static_cast<float>(bracket.reach_low - bracket.reach_high);
    } else {
      float further = 1.0f + __builtin_sqrtf(__builtin_fabsf(over));
      next = tried + (over + (over < 0 ? -further : further)) / guess.density;
    }
  }
  return bracket;
}

}  // namespace
}  // namespace sparse_attn::cpu::SPARSE_ATTN_ISA

// Candidates above a sampled pivot, the k-th highest of them by std::nth_element, then the
// candidates above it and as many ties, from the left, as there is room for.
#include "select_topk.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kSamples = 256;
constexpr float kLowest = -std::numeric_limits<float>::max();

/// Integers in the order of the floats; -0 equals 0.
int32_t ordered(float score) {
  int32_t bits;
  score += 0.0f;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

/// A score that k of the n very likely reach, and not many more.
float sampled_pivot(const float* scores, int32_t n, int32_t k) {
  if (n < 4 * kSamples) return kLowest;
  int64_t rank = int64_t{k} * kSamples / n * 3 / 2 + 8;
  if (rank >= kSamples) return kLowest;
  float sample[kSamples];
  int32_t step = n / kSamples;
  for (int32_t i = 0; i < kSamples; ++i) sample[i] = scores[i * step];
  std::nth_element(sample, sample + rank, sample + kSamples,
                   [](float a, float b) { return ordered(a) > ordered(b); });
  return sample[rank] > kLowest ? sample[rank] : kLowest;
}

}  // namespace

int32_t select_topk(const VectorMath& math, const float* scores, int32_t n, int32_t k,
                    int32_t* columns, int32_t* ranks) {
  int64_t count = math.collect(scores, n, sampled_pivot(scores, n, k), columns);
  if (count < k) count = math.collect(scores, n, kLowest, columns);
  if (count <= k) return static_cast<int32_t>(count);
  for (int64_t i = 0; i < count; ++i) ranks[i] = ordered(scores[columns[i]]);
  std::nth_element(ranks, ranks + k - 1, ranks + count, std::greater<int32_t>());
  int32_t threshold = ranks[k - 1];
  int32_t ties = k;
  for (int32_t i = 0; i < k; ++i) ties -= ranks[i] > threshold;
  int32_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t rank = ordered(scores[columns[i]]);
    bool tie = rank == threshold;
    if (rank > threshold || (tie && ties > 0)) columns[kept++] = columns[i];
    ties -= tie;
  }
  return kept;
}

}  // namespace sparse_attn::cpu

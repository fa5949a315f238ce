// From the histogram of a sample of a row's scores to the bins that hold its k-th score with
// high probability: the sample's scores at ranks a few standard deviations around the expected one.
#pragma once

#include "bins.cuh"

namespace sparse_attn::cuda::topk {

/// `sampled` of the row's `keys` scores were counted in `bins`.
__device__ inline LinearBins bracket_bins(const LinearBins& bins, const uint32_t* histogram,
                                          float sampled, float keys, float k) {
  constexpr float kDeviations = 4.0f;  // a miss costs a tile more walks: one row in ten thousand
  constexpr float kSlack = 4.0f;       // where few are expected
  constexpr float kReach = 16.0f;      // of a tail, in its own median distances
  float rank = k * sampled / keys;
  float spread = kDeviations * sqrtf(fmaxf(rank * (1.0f - rank / sampled), 0.0f));
  // Places of a score above the k-th, by the cube root of a gamma variable, which is about normal
  // (Wilson and Hilferty 1931), and of one below it.
  float root = 1.0f - 1.0f / (9.0f * rank) - spread / (3.0f * rank);
  float upper = floorf(rank * root * root * root - 1.5f);
  float lower = ceilf(rank + spread + kSlack);
  bool no_upper = upper < 1.0f;
  bool no_lower = lower > sampled;
  if (no_upper && no_lower) return LinearBins::over(bins.middle(-kBins), bins.middle(2 * kBins));
  // An end that the sample does not reach is guessed from the middle of what lies beyond the other.
  if (no_upper) upper = fmaxf(ceilf(lower / 2.0f), 1.0f);
  if (no_lower) lower = ceilf((upper + sampled) / 2.0f);
  const uint32_t wanted[2] = {static_cast<uint32_t>(upper), static_cast<uint32_t>(lower)};
  RankedBin found[2];
  rank_bins(histogram, wanted, found);
  float high = bins.middle(found[0].bin == kBins ? 2.0f * kBins : found[0].bin + 0.5f);
  float low = bins.middle(found[1].bin < 0 ? -1.0f * kBins : found[1].bin - 0.5f);
  if (no_upper) high = low + kReach * (high - low);
  if (no_lower) low = high - kReach * (high - low);
  return LinearBins::over(low, high);
}

}  // namespace sparse_attn::cuda::topk

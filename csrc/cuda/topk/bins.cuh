// Histograms of a row's scores for the ranking pass of token top-k. A bin is a monotone function of
// the score, so that all scores of a bin lie between two ordered keys (radix_select.cuh) and no
// score of another bin does: a row's search narrows such an interval until few scores lie in it.
#pragma once

#include "../common/radix_select.cuh"

namespace sparse_attn::cuda::topk {

constexpr int kBins = 128;
constexpr int kBinPitch = kBins + 4;  // words of a row: scores below, the bins, scores above, zeros
constexpr int kCandidates = 32;       // scores of a row's last interval that are ranked one by one

constexpr uint32_t kLowestKey = 0x007fffff;   // of -infinity, which is no score
constexpr uint32_t kHighestKey = 0xff800000;  // of infinity

/// A score's word of its row's histogram has a code: the bits of a float from 1.5 x 2^23 on, where
/// neighbours are 1 apart. kFirstCode is for scores below the bins.
constexpr float kBase = 12582912.0f;
constexpr int32_t kFirstCode = 0x4b400000;

/// Equal bins on the axis of scores: two fma give the code.
struct LinearBins {
  static constexpr float kWords = kBins + 1;  // from below to above

  float slope = 0.0f;
  float offset = 0.0f;

  /// Bins that cover [low, high], none narrower than neighbouring scores.
  __device__ static LinearBins over(float low, float high) {
    constexpr float kFinest = 2.4e-7f;  // of the larger end
    constexpr float kSmallest = 1e-30f;
    float width = fmaxf((high - low) / (kBins - 1), kSmallest);
    width = fmaxf(width, kFinest * fmaxf(fabsf(low), fabsf(high)));
    LinearBins bins;
    bins.slope = 1.0f / (kWords * width);
    bins.offset = 1.0f / kWords - low * bins.slope;
    return bins;
  }

  __device__ __forceinline__ int32_t code(float score) const {
    return __float_as_int(fmaf(__saturatef(fmaf(score, slope, offset)), kWords, kBase));
  }

  /// The score in the middle of a bin, about.
  __device__ float middle(float bin) const { return ((bin + 1.0f) / kWords - offset) / slope; }

  /// The lowest key of a score in `bin` or above.
  __device__ uint32_t first_key(int32_t bin) const {
    uint32_t low = kLowestKey;  // below `bin`
    uint32_t high = kHighestKey;
    while (high - low > 1) {
      uint32_t middle = low + (high - low) / 2;
      if (code(score_of(middle)) >= kFirstCode + 1 + bin) {
        high = middle;
      } else {
        low = middle;
      }
    }
    return high;
  }
};

/// Equal bins on the axis of ordered keys, the finest that cover [low, high]: every further
/// histogram of a row divides its interval by kBins, whatever the scores are.
struct KeyBins {
  uint32_t low = ~0u, high = ~0u;  // no score lies there
  int32_t shift = 0;

  __device__ static KeyBins over(uint32_t low, uint32_t high) {
    KeyBins bins = {low, high, 0};
    while ((high - low) >> bins.shift >= kBins) ++bins.shift;
    return bins;
  }

  __device__ __forceinline__ int32_t code(float score) const {
    uint32_t key = ordered_key(score);
    if (key < low) return kFirstCode;
    uint32_t bin = key > high ? kBins : (key - low) >> shift;
    return kFirstCode + 1 + static_cast<int32_t>(bin);
  }
};

/// The bin of the `wanted`-th highest score.
struct RankedBin {
  int32_t bin = -1;     // kBins: above all bins; -1: below them
  uint32_t wanted = 0;  // its place in the bin
  uint32_t count = 0;   // scores of the bin
};

/// Two places of one histogram at once; a lane has a row of its own.
__device__ inline void rank_bins(const uint32_t* histogram, const uint32_t (&wanted)[2],
                                 RankedBin (&found)[2]) {
  uint32_t above = 0;
#pragma unroll 3
  for (int word = kBinPitch - 4; word >= 0; word -= 4) {
    uint4 counts = *reinterpret_cast<const uint4*>(histogram + word);
    const uint32_t count[4] = {counts.x, counts.y, counts.z, counts.w};
#pragma unroll
    for (int w = 3; w >= 0; --w) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (above < wanted[i] && wanted[i] <= above + count[w]) {
          found[i] = {word + w - 1, wanted[i] - above, count[w]};
        }
      }
      above += count[w];
    }
  }
}

}  // namespace sparse_attn::cuda::topk

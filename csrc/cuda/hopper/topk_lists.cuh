// Lists of the scores of each row between two bounds, one for each of the four lanes that hold the
// row: so few are left after one walk that what follows reads them instead of tiles. A lane stages
// its scores in shared memory, where no branch depends on a score, and moves them to global memory
// four at a time.
#pragma once

#include "../common/ptx/shared.cuh"
#include "../common/radix_select.cuh"
#include "topk_workspace.h"

namespace sparse_attn::cuda::hopper {

/// What a warp stages: places of a lane are a line apart, so that lanes never meet in a bank.
struct StagedScores {
  static constexpr int kLine = 32 * sizeof(float);
  static constexpr int kTile = 32;  // most scores of a tile ...
  static constexpr int kHeld = 9;   // ... and most that are held over to the next one
  float places[2][kTile + kHeld + 1][32];
};

/// Scores strictly between two bounds are listed.
struct ListBounds {
  float low = INFINITY, high = INFINITY;

  /// Bounds the keys from `first` to `last`, but for infinity, which is above. Differences with a
  /// bound have another sign than they should where both are zeros of some signs.
  __device__ static ListBounds around(uint32_t first, uint32_t last) {
    constexpr uint32_t kMinusZero = 0x7fffffff;
    constexpr uint32_t kInfinity = 0xff800000;
    return {score_of(first - 1 == kMinusZero ? kMinusZero - 1 : first - 1),
            score_of(last == kMinusZero ? kMinusZero : min(last + 1, kInfinity))};
  }
};

/// A lane's list of a row. Its quads are 32 quads apart in memory, between those of other lanes.
class ScoreList {
 public:
  ScoreList() = default;
  __device__ __forceinline__ ScoreList(float4* quads, int32_t capacity, ListBounds bounds,
                                       const float* staged)
      : quads_(quads),
        capacity_(capacity),
        bounds_(bounds),
        staged_(ptx::shared_address(staged)),
        place_(staged_) {}

  /// Stores the score, and moves on where it lies between the bounds: by signs of differences,
  /// since predicates are few and follow one another.
  __device__ __forceinline__ void take(float score) {
    constexpr uint32_t kSign = 1u << 31;
    ptx::store_shared_float(place_, score);
    const uint32_t below_high = __float_as_uint(score - bounds_.high);
    const uint32_t above_low = __float_as_uint(bounds_.low - score);
    place_ += (below_high & above_low & kSign) / (kSign / StagedScores::kLine);
    below_ += below_high / kSign;
  }

  /// Scores that were listed, before pad().
  __device__ __forceinline__ uint32_t listed() const {
    return 4 * count_ + (place_ - staged_) / StagedScores::kLine;
  }

  /// Fills the last quad with -infinity, which is no score.
  __device__ __forceinline__ void pad() {
    for (int i = 0; i < 3; ++i) {
      ptx::store_shared_float(place_ + i * StagedScores::kLine, -INFINITY);
    }
    place_ += 3 * StagedScores::kLine;
  }

  /// Staged quads.
  __device__ __forceinline__ int32_t full_quads() const {
    return static_cast<int32_t>((place_ - staged_) / (4 * StagedScores::kLine));
  }
  __device__ __forceinline__ bool crowded() const {
    return place_ - staged_ > StagedScores::kHeld * StagedScores::kLine;
  }

  __device__ __forceinline__ float4 staged_quad(int32_t quad) const {
    const uint32_t from = staged_ + quad * 4 * StagedScores::kLine;
    float4 scores;
    scores.x = ptx::load_shared_float(from);
    scores.y = ptx::load_shared_float(from + StagedScores::kLine);
    scores.z = ptx::load_shared_float(from + 2 * StagedScores::kLine);
    scores.w = ptx::load_shared_float(from + 3 * StagedScores::kLine);
    return scores;
  }
  __device__ __forceinline__ void append(float4 scores) {
    if (count_ < capacity_) quads_[count_ * 32] = scores;
    ++count_;
  }
  /// Moves what is left behind `quads` to the front.
  __device__ __forceinline__ void close_up(int32_t quads) {
    const float4 rest = staged_quad(quads);
    ptx::store_shared_float(staged_, rest.x);
    ptx::store_shared_float(staged_ + StagedScores::kLine, rest.y);
    ptx::store_shared_float(staged_ + 2 * StagedScores::kLine, rest.z);
    place_ -= quads * 4 * StagedScores::kLine;
  }

  /// Quads, more than the capacity where some were lost.
  __device__ __forceinline__ int32_t count() const { return count_; }
  /// Scores that were below the higher bound.
  __device__ __forceinline__ uint32_t below() const { return below_; }
  __device__ __forceinline__ bool fits() const { return count_ + full_quads() + 1 < capacity_; }
  __device__ __forceinline__ float4 quad(int32_t i) const {
    constexpr float kNone = -INFINITY;
    return i < count_ ? quads_[i * 32] : float4{kNone, kNone, kNone, kNone};
  }

 private:
  float4* quads_;
  int32_t capacity_;  // quads
  int32_t count_ = 0;
  ListBounds bounds_;
  uint32_t staged_, place_;
  uint32_t below_ = 0;
};

/// Moves the staged quads of both rows of a lane to their lists.
__device__ __forceinline__ void flush(ScoreList (&lists)[2]) {
  constexpr int kAtOnce = 2;
  const int32_t quads[2] = {lists[0].full_quads(), lists[1].full_quads()};
  const int32_t most = imax(quads[0], quads[1]);
#pragma unroll 1
  for (int32_t first = 0; __any_sync(~0u, first < most); first += kAtOnce) {
    float4 scores[2][kAtOnce];
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      scores[i % 2][i / 2] = lists[i % 2].staged_quad(imin(first + i / 2, quads[i % 2]));
    }
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      if (first + i / 2 < quads[i % 2]) lists[i % 2].append(scores[i % 2][i / 2]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) lists[h].close_up(quads[h]);
}

}  // namespace sparse_attn::cuda::hopper

// The lowest kept key of a list by bisection between keys that are there: what choose.cu, which has
// a thread block for a list, and choose_warp.cu share. Shares are integers, so that no order of
// additions matters and both keep the same blocks.
#pragma once

#include "../common/radix_select.cuh"
#include "block_rule.cuh"

namespace sparse_attn::cuda {

constexpr float kGreatestWeight = 1ull << 36;  // of a share; a list's fit 64 bits together

using Weight = unsigned long long;

/// An estimate, as part of the highest one of its list. Estimates are scores, whose softmax the
/// shares are, or shares themselves; one of NaN has none.
__device__ __forceinline__ Weight weight_of(float estimate, bool scores, float highest) {
  float share = highest > 0.0f ? estimate / highest : 0.0f;
  if (scores) share = estimate == -INFINITY ? 0.0f : expf(estimate - highest);
  return isnan(share) ? 0 : __float2ull_rn(share * kGreatestWeight);
}
/// What orders the blocks: of no number, as of a block that is forced, the highest key.
__device__ __forceinline__ uint32_t key_of(float estimate, bool forced) {
  return forced || isnan(estimate) ? kForced : ordered_key(estimate);
}

/// What the lanes of a warp have together, lane by lane.
template <typename T, typename Join>
__device__ __forceinline__ T joined_by_warp(T x, const Join& join) {
  for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
/// The same by instructions for 32 bits, from 8.0 on.
__device__ __forceinline__ uint32_t sum_of_warp(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, x);
#else
  return joined_by_warp(x, [](uint32_t a, uint32_t b) { return a + b; });
#endif
}
__device__ __forceinline__ uint32_t least_of_warp(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(~0u, x);
#else
  return joined_by_warp(x, [](uint32_t a, uint32_t b) { return umin(a, b); });
#endif
}
__device__ __forceinline__ Weight sum_of_warp(Weight x) {
#if __CUDA_ARCH__ >= 800
  constexpr int kPart = 27;  // bits, of which 32 make no more than 32
  constexpr Weight kMask = (1u << kPart) - 1;
  Weight sum = 0;
#pragma unroll
  for (int at = 0; at < 64; at += kPart) {
    sum += Weight{sum_of_warp(static_cast<uint32_t>(x >> at & kMask))} << at;
  }
  return sum;
#else
  return joined_by_warp(x, [](Weight a, Weight b) { return a + b; });
#endif
}

/// Blocks from some estimate on, forced ones aside.
struct Reached {
  Weight weight = 0;
  int32_t count = 0;
  uint32_t least = kForced;  // key of those blocks
  uint32_t below = 0;        // highest key of the others

  __device__ void add(const Reached& other) {
    weight += other.weight;
    count += other.count;
    least = other.least < least ? other.least : least;
    below = other.below > below ? other.below : below;
  }
  __device__ void join_lanes() {
    weight = sum_of_warp(weight);
    count = static_cast<int32_t>(sum_of_warp(static_cast<uint32_t>(count)));
    least = least_of_warp(least);
    below = ~least_of_warp(~below);
  }
};

/// What is kept beside the forced blocks: those above `key`, and the first `equal` ones of it.
struct Lowest {
  uint32_t key = 0;
  int32_t equal = kUnlimited;
};

/// At most `most` blocks, and no more than reach `wanted`. `reach(key)` tells about the blocks of
/// `key` and above, forced ones aside; no block has a key of 0.
template <typename Reach>
__device__ __forceinline__ Lowest find_lowest(const Reach& reach, int32_t most, Weight wanted) {
  if (most <= 0 || wanted == 0) return {kForced - 1, 0};
  auto enough = [&](const Reached& reached) {
    return reached.count >= most || reached.weight >= wanted;
  };
  // `low` is enough, `high` is not; what is kept ends at a key between least of the one and below
  // of the other.
  Reached low = reach(1), high;
  high.below = kForced - 1;
  if (!enough(low)) return {};
  while (low.least < high.below) {
    const uint32_t middle = low.least + (high.below - low.least + 1) / 2;
    const Reached reached = reach(middle);
    if (enough(reached)) {
      low = reached;
    } else {
      high = reached;
    }
  }
  // Of equal blocks as many as it takes.
  Lowest lowest = {low.least, low.count - high.count};
  const Weight each = (low.weight - high.weight) / lowest.equal;
  if (each > 0) {
    const Weight missing = (wanted - high.weight + each - 1) / each;
    if (missing < static_cast<Weight>(lowest.equal)) lowest.equal = static_cast<int32_t>(missing);
  }
  lowest.equal = imin(lowest.equal, most - high.count);
  return lowest;
}

/// What of a list's weight is wanted beside its forced blocks; all, where weights say nothing.
__device__ __forceinline__ Weight wanted_weight(const SelectParams& params, Weight all,
                                                Weight forced) {
  if (all == 0 && params.selector != Selector::kScores) return ~Weight{0};
  const auto target = static_cast<Weight>(ceil(params.mass * static_cast<double>(all)));
  return forced < target ? target - forced : 0;
}

}  // namespace sparse_attn::cuda

// choose.cu for lists of up to kMostWarpBlocks blocks, a head each, of calls without bounds: a warp
// a list, whose keys and weights its lanes hold in registers. Lists of more than kFewWarpBlocks
// blocks fill so many that they pay only where there are lists enough.
#include "../common/launch.cuh"
#include "../common/ptx/grid.cuh"
#include "bisect.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kWarpsAtOnce = 4;
constexpr int32_t kFewWarpBlocks = 1024, kMostWarpBlocks = 2048;
constexpr int64_t kManyLists = 128;  // up to which a thread block takes the larger ones

/// A list; lane l has the blocks l, l + 32, ... of those that are visible.
template <int kBlocksOfLane>
struct WarpList {
  // Weights have 24 significant bits, so that a float holds each, and a double the sum of a list.
  static constexpr bool kHoldsFloats = kBlocksOfLane > 32;
  using Held = std::conditional_t<kHoldsFloats, float, Weight>;
  using Sum = std::conditional_t<kHoldsFloats, double, Weight>;
  using Bits = std::conditional_t<kHoldsFloats, uint64_t, uint32_t>;
  // Above all weights: counts blocks beside them.
  static constexpr Weight kOne = kHoldsFloats ? 0 : 1ull << 48;

  int32_t size = 0;
  Bits forced = 0;               // of the lane's blocks
  uint32_t keys[kBlocksOfLane];  // 0 where a block is forced or there is none
  Held weights[kBlocksOfLane];   // and kOne

  /// Calls visit(i) for the lane's blocks, while the warp has some, and up to three more.
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    static_assert(kBlocksOfLane % 4 == 0);
#pragma unroll
    for (int i = 0; i < kBlocksOfLane; ++i) {
      if (i % 4 == 0 && i * 32 >= size) break;
      visit(i);
    }
  }
  __device__ __forceinline__ Reached reach(uint32_t key) const {
    Sum sum = 0;
    int32_t count = 0;
    // Relative to `key`, as unsigned numbers, keys below it are greater than all others.
    uint32_t least = 0u - key, below = 0;
    for_each([&](int i) {
      const bool taken = keys[i] >= key;
      sum += taken ? weights[i] : 0;
      if (kHoldsFloats) count += taken;
      least = umin(least, keys[i] - key);
      below = umax(below, keys[i] - key);
    });
    least = key + least_of_warp(least);
    below = key + ~least_of_warp(~below);
    if (least < key) least = kForced;
    if (below >= key) below = 0;
    if constexpr (kHoldsFloats) {
      count = static_cast<int32_t>(sum_of_warp(static_cast<uint32_t>(count)));
      return {sum_of_warp(static_cast<Weight>(sum)), count, least, below};
    } else {
      const Weight of_warp = sum_of_warp(sum);
      return {of_warp % kOne, static_cast<int32_t>(of_warp / kOne), least, below};
    }
  }
};

template <int kBlocksOfLane>
__global__ void __launch_bounds__(kWarpsAtOnce * 32)
    choose_by_warp(const __grid_constant__ SelectParams params, const float* values, bool scores,
                   uint32_t lists) {
  ptx::wait_for_primary();
  ptx::launch_dependents();
  const uint32_t row = blockIdx.x * kWarpsAtOnce + threadIdx.x / 32;
  if (row >= lists) return;
  const int lane = threadIdx.x % 32;
  BlockRule rule = rule_without_keys(params, row);
  rule.visible = SelectParams::blocks_of(
      params.keys_of_rows(rule.batch, rule.head,
                          params.rows_of_block(rule.batch, rule.query_block)),
      params.block_kv);
  values += rule.first_value(params) + rule.visible.begin;

  WarpList<kBlocksOfLane> list;
  list.size = rule.visible.size();
  float estimates[kBlocksOfLane], highest = -INFINITY;
  list.for_each([&](int i) {
    const int32_t at = i * 32 + lane;
    estimates[i] = at < list.size ? values[at] : -INFINITY;
    highest = fmaxf(highest, estimates[i]);
  });
  for (int step = 16; step > 0; step /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  }
  Weight all = 0, of_forced = 0;
  int32_t num_forced = 0;
  list.for_each([&](int i) {
    const int32_t at = i * 32 + lane;
    const Weight weight = at < list.size ? weight_of(estimates[i], scores, highest) : 0;
    const uint32_t key = key_of(estimates[i], rule.forced(rule.visible.begin + at));
    const bool forced = at < list.size && key == kForced;
    all += weight;
    of_forced += forced ? weight : 0;
    num_forced += __popc(__ballot_sync(~0u, forced));
    list.forced |= static_cast<typename WarpList<kBlocksOfLane>::Bits>(forced) << i;
    list.keys[i] = forced || at >= list.size ? 0 : key;
    list.weights[i] =
        static_cast<typename WarpList<kBlocksOfLane>::Held>(weight + WarpList<kBlocksOfLane>::kOne);
  });
  all = sum_of_warp(all);
  of_forced = sum_of_warp(of_forced);
  const Lowest lowest =
      find_lowest([&](uint32_t key) { return list.reach(key); },
                  params.budget(list.size) - num_forced, wanted_weight(params, all, of_forced));

  int32_t* indices = params.indices + int64_t{row} * params.num_kv;
  const uint32_t before = (1u << lane) - 1;
  int32_t count = 0, equal = 0;
  list.for_each([&](int i) {
    const uint32_t same = __ballot_sync(~0u, list.keys[i] == lowest.key);
    const bool first = equal + __popc(same & before) < lowest.equal;
    const bool kept = (list.forced >> i & 1) || list.keys[i] > lowest.key ||
                      (list.keys[i] == lowest.key && lowest.key > 0 && first);
    const uint32_t lanes = __ballot_sync(~0u, kept);
    if (kept) indices[count + __popc(lanes & before)] = rule.visible.begin + i * 32 + lane;
    count += __popc(lanes);
    equal += __popc(same);
  });
  for (int32_t at = count + lane; at < params.num_kv; at += 32) indices[at] = 0;
  if (lane == 0) params.counts[row] = count;
}

template <int kBlocksOfLane>
Status launch_warps(const SelectParams& params, const float* values, bool scores) {
  const auto lists =
      static_cast<uint32_t>(int64_t{params.problem.batch} * params.lists() * params.num_q);
  const LaunchShape shape = {(lists + kWarpsAtOnce - 1) / kWarpsAtOnce, kWarpsAtOnce * 32, 0,
                             to_stream(params.stream)};
  return launch_dependent(choose_by_warp<kBlocksOfLane>, shape, params, values, scores, lists);
}

}  // namespace

bool serves_choose_warp(const SelectParams& params) {
  return !params.by_group && params.rows_grow() &&
         (params.num_kv <= kFewWarpBlocks ||
          (params.num_kv <= kMostWarpBlocks &&
           int64_t{params.problem.batch} * params.lists() * params.num_q > kManyLists));
}

Status launch_choose_warp(const SelectParams& params, const float* values, bool scores) {
  if (params.num_kv <= 128) return launch_warps<4>(params, values, scores);
  if (params.num_kv <= 512) return launch_warps<16>(params, values, scores);
  if (params.num_kv <= kFewWarpBlocks) {
    return launch_warps<kFewWarpBlocks / 32>(params, values, scores);
  }
  return launch_warps<kMostWarpBlocks / 32>(params, values, scores);
}

}  // namespace sparse_attn::cuda

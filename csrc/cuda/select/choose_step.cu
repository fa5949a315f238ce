// The kept key blocks of a decoding step by their number alone: one list for the heads that share a
// key head, of scores whose softmax the shares are, where every head sees the same keys. The rule
// is that of choose_count.cu, which serves all else. Here a list lies in the registers of a
// cluster, which shares it from its sums to its entries: a decoding step waits for a chain, so code
// is short and straight and the cluster meets three times, after the sums of heads, a histogram of
// keys, and the keys in the bin where the list ends. Sums run in the order of warps of the list,
// whatever the number of thread blocks; up to 4096 blocks it is the order of choose_count.cu.
#include "../common/launch.cuh"
#include "../common/ptx/grid.cuh"
#include "block_rule.cuh"
#include "choose_step.cuh"
#include "cut.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace step {
namespace {

/// Where a list ends: at a cut, or among the keys of a window, few enough to compare one by one.
struct Ending {
  Cut cut;
  Window window;
  bool exact;  // by the cut
};

/// The ending of a list of `visible` blocks; `highest` is no lower than any share. All warps of the
/// cluster call it with their keys.
__device__ __forceinline__ Ending find_ending(const uint32_t (&keys)[kOfLane], float highest,
                                              int32_t visible, int32_t budget, uint32_t each,
                                              StepStorage& storage) {
  const int lane = threadIdx.x % 32;
  const auto blocks = static_cast<int>(ptx::cluster_size());
  Window window = {0, ordered_key(highest), 0};
  window.least = window.greatest >> kFirstBits == 0 ? 1 : window.greatest - (1u << kFirstBits) + 1;
  int shift = kFirstBits - kBinBits;
#pragma unroll 1
  for (bool first = true;; first = false) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (keys[i] < window.least || keys[i] > window.greatest) continue;
      atomicAdd(&storage.histogram[(window.greatest - keys[i]) >> shift], 1u);
    }
    ptx::sync_cluster();
    if (first) {
      const uint32_t forced = warp_sum(lane < blocks ? *ptx::at_rank(&storage.forced, lane) : 0);
      const int32_t most = budget - static_cast<int32_t>(forced);
      if (most <= 0) return {{kForced - 1, 0}, window, true};
      if (most >= visible - static_cast<int32_t>(forced)) return {{0, 0}, window, true};
      window.wanted = most;
    }
    find_bin(window.wanted, storage);
    window.wanted = storage.wanted;
    if (storage.count > 0) {
      window.greatest -= storage.bin << shift;
      const uint32_t below = (1u << shift) - 1;
      window.least =
          window.greatest > window.least + below ? window.greatest - below : window.least;
      if (storage.most <= each || shift == 0) break;
      shift = imax(0, shift - kBinBits);
    } else {
      window.greatest = window.least - 1;
      window.least = 1;
      shift = imax(0, 32 - __clz(static_cast<int>(window.greatest)) - kBinBits);
    }
    ptx::sync_cluster();  // the histograms have been read
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) storage.histogram[i] = 0;
    __syncthreads();
  }
  return {{window.least, window.wanted}, window, window.least == window.greatest};
}

/// What lies before the thread block's entries, and how many the list has.
struct Place {
  uint32_t begin = 0, equal_before = 0, count = 0;
};

/// Finds the cut among the keys of the window, where the ending is not exact, and the thread
/// block's place. All warps of the cluster call it; `each` is what a thread block may list.
__device__ __forceinline__ Place find_place(const uint32_t (&keys)[kOfLane], uint32_t each,
                                            Ending& ending, StepStorage& storage) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto blocks = static_cast<int>(ptx::cluster_size());
  const auto rank = static_cast<int>(ptx::cluster_rank());
  Cut& cut = ending.cut;
  const Window& window = ending.window;
  const uint32_t floor = ending.exact ? cut.key : window.greatest;
  uint32_t above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const bool inside = ending.exact ? keys[i] == cut.key && cut.equal > 0
                                     : keys[i] >= window.least && keys[i] <= window.greatest;
    above += __popc(__ballot_sync(~0u, keys[i] > floor));
    equal += __popc(__ballot_sync(~0u, inside));
    if (!ending.exact && inside) {
      const uint32_t at = rank * each + atomicAdd(&storage.num_listed, 1u);
#pragma unroll 1
      for (int other = 0; other < blocks; ++other) {
        *ptx::at_rank(&storage.listed[at], other) = keys[i];
      }
    }
  }
  if (lane == 0) storage.kept_of_warp[warp] = {above, equal};
  __syncthreads();
  if (warp == 0) {
    const bool exists = lane < static_cast<int>(blockDim.x / 32);
    const uint2 of_warp = exists ? storage.kept_of_warp[lane] : uint2{};
    const uint32_t all_above = warp_sum(of_warp.x);
    const uint32_t all_equal = warp_sum(of_warp.y);
    if (lane < blocks) {
      *ptx::at_rank(&storage.above[rank], lane) = all_above;
      *ptx::at_rank(&storage.equal[rank], lane) = all_equal;
    }
  }
  ptx::sync_cluster();
  const uint32_t kept = lane < blocks ? storage.above[lane] : 0;
  const uint32_t same = lane < blocks && ending.exact ? storage.equal[lane] : 0;
  Place place = {warp_sum(lane < rank ? kept : 0), warp_sum(lane < rank ? same : 0),
                 warp_sum(kept)};
  uint32_t all_equal = warp_sum(same);
  if (!ending.exact) {
    // A lane a key: its place among all of them.
    const uint32_t own = storage.listed[lane];
    uint32_t higher = 0, others = 0;
#pragma unroll 8
    for (int other = 0; other < 32; ++other) {
      const uint32_t key = __shfl_sync(~0u, own, other);
      higher += key > own;
      others += key == own;
    }
    const bool last = own > 0 && higher < window.wanted && window.wanted <= higher + others;
    const int holder = __ffs(__ballot_sync(~0u, last)) - 1;
    cut = {__shfl_sync(~0u, own, holder), window.wanted - __shfl_sync(~0u, higher, holder)};
    const uint32_t before = (1u << (rank * each)) - 1;
    const uint32_t lanes_above = __ballot_sync(~0u, own > cut.key);
    const uint32_t lanes_equal = __ballot_sync(~0u, own == cut.key);
    place.begin += __popc(lanes_above & before);
    place.count += __popc(lanes_above);
    place.equal_before = __popc(lanes_equal & before);
    all_equal = __popc(lanes_equal);
  }
  place.count += umin(all_equal, cut.equal);
  return place;
}

/// Writes the thread block's entries; `first` is the lane's first block.
__device__ __forceinline__ void write_entries(const uint32_t (&keys)[kOfLane], int32_t first,
                                              Cut cut, Place place, int32_t* indices,
                                              StepStorage& storage) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t lanes_above[kOfLane], lanes_equal[kOfLane];
  uint32_t above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    lanes_above[i] = __ballot_sync(~0u, keys[i] > cut.key);
    lanes_equal[i] = __ballot_sync(~0u, keys[i] == cut.key && cut.equal > 0);
    above += __popc(lanes_above[i]);
    equal += __popc(lanes_equal[i]);
  }
  __syncthreads();  // kept_of_warp has been read
  if (lane == 0) storage.kept_of_warp[warp] = {above, equal};
  __syncthreads();
  const uint2 of_warp = lane < warp ? storage.kept_of_warp[lane] : uint2{};
  place.begin += warp_sum(of_warp.x);
  place.equal_before += warp_sum(of_warp.y);
  const uint32_t below_lane = (1u << lane) - 1;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const uint32_t equals = place.equal_before + __popc(lanes_equal[i] & below_lane);
    const bool kept =
        lanes_above[i] >> lane & 1 || (lanes_equal[i] >> lane & 1 && equals < cut.equal);
    if (kept) {
      indices[place.begin + __popc(lanes_above[i] & below_lane) + umin(equals, cut.equal)] =
          first + 32 * i;
    }
    place.begin += __popc(lanes_above[i]);
    place.equal_before += __popc(lanes_equal[i]);
  }
}

/// MEMBERS is no less than the heads of a list; `scores` [B, Hq, num_kv].
template <int MEMBERS>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    choose_step(const __grid_constant__ SelectParams params, const float* scores) {
  if (!ptx::kHasClusters) return;  // serves_choose_step asks for them
  __shared__ StepStorage storage;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto threads = static_cast<int>(blockDim.x), warps = threads / 32;
  const auto blocks = static_cast<int>(ptx::cluster_size());
  const auto rank = static_cast<int>(ptx::cluster_rank());
  const uint32_t row = blockIdx.x / blocks;
  BlockRule rule;
  rule.batch = static_cast<int32_t>(row / params.lists());
  rule.head = static_cast<int32_t>(row % params.lists()) * params.heads_per_list();
  const int32_t list_warp = rank * warps + warp, first = list_warp * kOfWarp + lane;
  const int32_t members = params.problem.group();
  const float* values = scores + rule.first_value(params) + first;
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins; i += threads) storage.histogram[i] = 0;
  if (threadIdx.x == 0) storage.forced = storage.num_listed = 0;
  if (threadIdx.x < 32) storage.listed[lane] = 0;
  ptx::sync_cluster();  // its storage is ready
  ptx::wait_for_primary();
  ptx::launch_dependents();

  // The scores come first: what the rule says is worked out while they are on their way.
  float value[MEMBERS][kOfLane];
#pragma unroll
  for (int member = 0; member < MEMBERS; ++member) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const bool exists = member < members && first + 32 * i < params.num_kv;
      value[member][i] = exists ? values[int64_t{member} * params.num_kv + 32 * i] : -INFINITY;
    }
  }
  const Interval rows = {0, params.rows(rule.batch)};
  rule.sinks = params.sinks(rule.batch);
  rule.diagonal = params.diagonal(rule.batch, 0);
  Interval seen;
  if (!rows.empty()) seen = params.keys_of_row(rule.batch, rule.head, rows.end - 1);
  const Interval visible = SelectParams::blocks_of(seen, params.block_kv);
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (visible.contains(first + 32 * i)) continue;
#pragma unroll
    for (int member = 0; member < MEMBERS; ++member) value[member][i] = -INFINITY;
  }
  float units[MEMBERS], highest;
  find_units<MEMBERS>(value, blocks * warps, list_warp, units, highest, storage);

  uint32_t keys[kOfLane];
  uint32_t forced = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int32_t j = first + 32 * i;
    float greatest = -INFINITY;
    bool is_forced = rule.forced(j);
#pragma unroll
    for (int member = 0; member < MEMBERS; ++member) {
      const float share = value[member][i] + units[member];
      if (member >= members) continue;
      is_forced |= !(share < INFINITY);
      greatest = fmaxf(greatest, share);
    }
    keys[i] = is_forced ? kForced : ordered_key(greatest);
    if (!visible.contains(j)) keys[i] = 0;
    forced += __popc(__ballot_sync(~0u, keys[i] == kForced));
  }
  if (lane == 0 && forced > 0) atomicAdd(&storage.forced, forced);

  const uint32_t each = 32 / blocks;  // keys that a thread block may list
  Ending ending =
      find_ending(keys, highest, visible.size(), params.budget(visible.size()), each, storage);
  const Place place = find_place(keys, each, ending, storage);
  int32_t* indices = params.indices + int64_t{row} * params.num_kv;
  write_entries(keys, first, ending.cut, place, indices, storage);
  const auto count = static_cast<int32_t>(place.count);
#pragma unroll 1
  for (int32_t at = count + rank * threads + threadIdx.x; at < params.num_kv;
       at += blocks * threads) {
    indices[at] = 0;
  }
  if (rank == 0 && threadIdx.x == 0) params.counts[row] = count;
}

/// Warps that a list needs.
int32_t warps_of_list(const SelectParams& params) { return ceil_div(params.num_kv, kOfWarp); }

}  // namespace
}  // namespace step

bool serves_choose_step(const SelectParams& params, bool scores) {
  return scores && params.by_group && params.num_q == 1 && params.rows_grow() &&
         params.problem.group() <= step::kMostMembers &&
         step::warps_of_list(params) <= step::kMostOfList &&
         knows_clusters(step::choose_step<step::kMostMembers>);
}

Status launch_choose_step(const SelectParams& params, const float* scores) {
  const int64_t lists = int64_t{params.problem.batch} * params.lists();
  const int32_t list_warps = step::warps_of_list(params);
  // Few lists leave most of the device idle: up to eight thread blocks share one.
  constexpr int64_t kMostBlocks = 128;
  int32_t cluster = 1;
  while (list_warps > step::kMostWarps * cluster ||
         (cluster < step::kMostCluster && list_warps > step::kFewWarps * cluster &&
          lists * cluster * 2 <= kMostBlocks)) {
    cluster *= 2;
  }
  const int32_t warps = imax(step::kFewWarps, ceil_div(list_warps, cluster));
  const LaunchShape shape = {static_cast<uint32_t>(lists * cluster),
                             static_cast<uint32_t>(32 * warps), 0, to_stream(params.stream),
                             static_cast<uint32_t>(cluster)};
  constexpr int kFewMembers = 4;
  const auto kernel = params.problem.group() <= kFewMembers ? step::choose_step<kFewMembers>
                                                            : step::choose_step<step::kMostMembers>;
  return launch_dependent(kernel, shape, params, scores);
}

}  // namespace sparse_attn::cuda

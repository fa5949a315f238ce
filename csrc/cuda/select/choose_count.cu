// The kept key blocks of each query block by their number alone (docs/design.md, "Block top-k"):
// the forced ones, and the highest of the others as the budget allows, ties to the lower block. One
// thread block a list, whose keys lie in shared memory. The lowest kept key is found digit by digit
// between the least and the greatest one, mostly in two passes over histograms of 256 to 2048 bins.
// What is added up are integers, and the heads' shares in one order. The thread blocks of a cluster
// make the keys of a long list, of which the first one has them all. Loops stay rolled: a list is
// chosen once, and its instructions come cold.
#include "../common/launch.cuh"
#include "../common/ptx/cluster.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/radix_select.cuh"
#include "block_rule.cuh"
#include "cut.cuh"
#include "join_heads.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kBinsOfThread = 2;

/// Shared memory of a thread block, beside the keys.
struct CountStorage {
  uint32_t histogram[kMostThreads * kBinsOfThread];
  uint32_t warps[kMostThreads / 32];
  uint2 kept_of_warp[kMostThreads / 32];  // above the threshold, equal to it
  uint32_t least, greatest;               // of the keys that are not forced
  int32_t forced;
  uint32_t digit, wanted, count;
  HullStorage hull;
  HeadStorage heads;
};

/// The bin of the `wanted`-th highest key of a histogram, that key's place among the bin's and how
/// many those are, to the storage; empties the histogram. The thread block calls it.
__device__ inline void find_bin(uint32_t wanted, CountStorage& storage) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Thread 0 has the highest bins.
  uint32_t* bins = storage.histogram + (blockDim.x - 1 - threadIdx.x) * kBinsOfThread;
  const uint32_t high = bins[1], low = bins[0];
  bins[0] = bins[1] = 0;
  const uint32_t sum = warp_prefix_sum(high + low);
  if (lane == 31) storage.warps[warp] = sum;
  __syncthreads();
  const uint32_t of_warp = lane < static_cast<int>(blockDim.x / 32) ? storage.warps[lane] : 0;
  const uint32_t up_to_warp = warp_prefix_sum(of_warp);
  const uint32_t before = __shfl_sync(~0u, up_to_warp - of_warp, warp) + sum - high - low;
  const auto first = static_cast<uint32_t>(bins - storage.histogram);
  auto offer = [&](uint32_t bin, uint32_t above, uint32_t count) {
    if (above >= wanted || above + count < wanted) return;
    storage.digit = bin;
    storage.wanted = wanted - above;
    storage.count = count;
  };
  offer(first + 1, before, high);
  offer(first, before + high, low);
  __syncthreads();
}

/// The cut that keeps the `most` highest of n keys, forced ones aside. The thread block calls it.
__device__ inline Cut find_cut(const uint32_t* keys, int32_t n, int32_t most,
                               CountStorage& storage) {
  if (most <= 0) return {kForced - 1, 0};
  if (most >= n - storage.forced) return {0, 0};
  const int bin_bits = 31 - __clz(static_cast<int>(blockDim.x) * kBinsOfThread);
  uint32_t least = storage.least, greatest = storage.greatest;
  auto wanted = static_cast<uint32_t>(most);
  for (;;) {
    const int shift = imax(0, 32 - __clz(static_cast<int>(greatest - least)) - bin_bits);
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < n; i += blockDim.x) {
      const uint32_t key = keys[i];
      if (key < least || key > greatest) continue;
      atomicAdd(&storage.histogram[(key - least) >> shift], 1u);
    }
    __syncthreads();
    find_bin(wanted, storage);
    wanted = storage.wanted;
    least += storage.digit << shift;
    if (wanted == storage.count) return {least - 1, 0};
    if (shift == 0) return {least, wanted};
    greatest = umin(greatest, least + ((1u << shift) - 1));
  }
}

/// Writes the kept blocks ascending, zeros past them, and their number. Warps have stretches of
/// the keys, which they count first.
__device__ inline void write_kept(const SelectParams& params, const uint32_t* keys,
                                  Interval visible, Cut cut, int64_t row, CountStorage& storage) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = static_cast<int>(blockDim.x / 32);
  const uint32_t below_lane = (1u << lane) - 1;
  const int32_t n = visible.size();
  const int32_t stretch = ceil_div(ceil_div(n, warps), 32) * 32;
  const int32_t begin = imin(n, warp * stretch), end = imin(n, begin + stretch);
  uint32_t above = 0, equal = 0;
#pragma unroll 1
  for (int32_t i = begin + lane; i < end; i += 32) {
    const uint32_t key = keys[i];
    above += key > cut.key;
    equal += key == cut.key;
  }
  for (int step = 16; step > 0; step /= 2) {
    above += __shfl_xor_sync(~0u, above, step);
    equal += __shfl_xor_sync(~0u, equal, step);
  }
  if (lane == 0) storage.kept_of_warp[warp] = {above, equal};
  __syncthreads();
  const uint2 own = lane < warps ? storage.kept_of_warp[lane] : uint2{};
  const uint2 up_to = {warp_prefix_sum(own.x), warp_prefix_sum(own.y)};
  above = __shfl_sync(~0u, up_to.x - own.x, warp);
  equal = __shfl_sync(~0u, up_to.y - own.y, warp);
  int32_t* indices = params.indices + row * params.num_kv;
#pragma unroll 1
  for (int32_t i = begin; i < end; i += 32) {
    const uint32_t key = i + lane < end ? keys[i + lane] : 0;
    const bool listed = i + lane < end && key >= cut.key;
    if (!__any_sync(~0u, listed)) continue;  // as mostly
    const uint32_t above_lanes = __ballot_sync(~0u, key > cut.key);
    const uint32_t equal_lanes = __ballot_sync(~0u, listed && key == cut.key);
    const uint32_t equal_before = equal + __popc(equal_lanes & below_lane);
    const bool kept =
        above_lanes >> lane & 1 || (equal_lanes >> lane & 1 && equal_before < cut.equal);
    if (kept) {
      indices[above + __popc(above_lanes & below_lane) + umin(equal_before, cut.equal)] =
          visible.begin + i + lane;
    }
    above += __popc(above_lanes);
    equal += __popc(equal_lanes);
  }
  const uint32_t all_equal = __shfl_sync(~0u, up_to.y, 31);
  const auto count =
      static_cast<int32_t>(__shfl_sync(~0u, up_to.x, 31) + umin(all_equal, cut.equal));
#pragma unroll 1
  for (int32_t at = count + threadIdx.x; at < params.num_kv; at += blockDim.x) indices[at] = 0;
  if (threadIdx.x == 0) params.counts[row] = count;
}

/// `scores` tells whether the values are scores, whose softmax the shares are; `cached` whether
/// shared memory has room for the keys, which take the place of the list's values else.
__global__ void __launch_bounds__(kMostThreads)
    choose_count(const __grid_constant__ SelectParams params, float* values, bool scores,
                 bool cached) {
  extern __shared__ uint32_t room[];
  __shared__ CountStorage storage;
  for (int i = 0; i < kBinsOfThread; ++i) storage.histogram[threadIdx.x + i * blockDim.x] = 0;
  if (threadIdx.x == 0) {
    storage.least = kForced;
    storage.greatest = 0;
    storage.forced = 0;
  }
  ptx::sync_cluster();  // the first one's storage is ready
  ptx::wait_for_primary();
  const uint32_t row = blockIdx.x / ptx::cluster_size();
  const BlockRule rule = rule_of_list(params, row, storage.hull);
  const Interval visible = rule.visible;
  values += rule.first_value(params);
  uint32_t* keys = cached ? room : reinterpret_cast<uint32_t*>(values + visible.begin);
  const float* estimates = values + visible.begin;
  if (params.by_group) {
    estimates = reinterpret_cast<float*>(keys);
    join_heads(params, rule, scores, true, values, reinterpret_cast<float*>(keys), storage.heads);
  }

  const Stretches stretches(visible);
  const Interval part = stretches.blocks(stretches.of_own);
  uint32_t* all_keys = ptx::cluster_size() > 1 ? ptx::at_rank(keys, 0) : keys;
  uint32_t least = kForced, greatest = 0;
  int32_t forced = 0;
#pragma unroll 1
  for (int32_t j = part.begin + threadIdx.x; j < part.end; j += blockDim.x) {
    const float estimate = estimates[j - visible.begin];
    const bool is_forced = isnan(estimate) || rule.forced(j);
    const uint32_t key = is_forced ? kForced : ordered_key(estimate);
    all_keys[j - visible.begin] = key;
    forced += is_forced;
    least = umin(least, key);
    greatest = is_forced ? greatest : umax(greatest, key);
  }
  for (int step = 16; step > 0; step /= 2) {
    forced += __shfl_xor_sync(~0u, forced, step);
    least = umin(least, __shfl_xor_sync(~0u, least, step));
    greatest = umax(greatest, __shfl_xor_sync(~0u, greatest, step));
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(ptx::at_rank(&storage.forced, 0), forced);
    atomicMin(ptx::at_rank(&storage.least, 0), least);
    atomicMax(ptx::at_rank(&storage.greatest, 0), greatest);
  }
  ptx::sync_cluster();
  if (ptx::cluster_rank() > 0) return;
  const int32_t most = params.budget(visible.size()) - storage.forced;
  const Cut cut = find_cut(keys, visible.size(), most, storage);
  write_kept(params, keys, visible, cut, row, storage);
}

}  // namespace

Status launch_choose_count(const SelectParams& params, float* values, bool scores) {
  const int64_t lists = int64_t{params.problem.batch} * params.lists() * params.num_q;
  int32_t room = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, params.device);
  if (error != cudaSuccess) return to_status(error);
  const int64_t bytes = params.num_kv * int64_t{sizeof(uint32_t)};
  const bool cached = bytes + static_cast<int64_t>(sizeof(CountStorage)) <= room;
  const int32_t cache_bytes = cached ? static_cast<int32_t>(bytes) : 0;
  const Status status = allow_shared_bytes(choose_count, cache_bytes);
  if (!status.ok()) return status;
  const auto threads = static_cast<uint32_t>(threads_of_list(params.num_kv));
  // Few long lists leave most of the device idle: up to eight thread blocks share one's keys.
  constexpr int32_t kLong = 2048, kMostCluster = 8, kMostBlocks = 128;
  uint32_t cluster = 1;
  if (cached && params.num_kv >= kLong && knows_clusters(choose_count)) {
    while (cluster < kMostCluster && lists * cluster * 2 <= kMostBlocks) cluster *= 2;
  }
  const LaunchShape shape = {static_cast<uint32_t>(lists) * cluster, threads,
                             static_cast<size_t>(cache_bytes), to_stream(params.stream), cluster};
  return launch_dependent(choose_count, shape, params, values, scores, cached);
}

}  // namespace sparse_attn::cuda

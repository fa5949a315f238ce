// The kept key blocks of each query block, ascending: forced ones first, then the highest estimates
// until their share reaches the mass or their number the budget, exact with ties to the lower
// block. The rule stands in docs/design.md, "Block top-k"; where only their number counts,
// choose_count.cu is shorter. One thread block a list, whose estimates it holds in shared memory:
// the lowest kept one is found by bisection between estimates that are there. Shares are added as
// integers, so that no order of additions matters.
#include "../common/launch.cuh"
#include "../common/ptx/grid.cuh"
#include "../sketch/sketch.h"
#include "bisect.cuh"
#include "join_heads.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int32_t kLongBlocks = 1024;  // from which on few lists have kMostThreads
constexpr int64_t kFewLists = 1024;    // up to which
constexpr int kMostWarps = kMostThreads / 32;
/// Shared memory of a thread block.
struct ChooseStorage {
  float warps[kMostWarps];
  Weight weights[kMostWarps];
  int32_t counts[kMostWarps];
  uint32_t least[kMostWarps], below[kMostWarps];
  int32_t listed[2][kMostWarps];
  HeadStorage heads;
  HullStorage hull;
  int32_t last;
};

__device__ __forceinline__ int num_warps() { return static_cast<int>(blockDim.x / 32); }

/// The maximum over the thread block, for all threads.
__device__ float greatest_of(float x, ChooseStorage& storage) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) storage.warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (int warp = 0; warp < num_warps(); ++warp) x = fmaxf(x, storage.warps[warp]);
  return x;
}

/// The estimates of a row of blocks: scores whose softmax the shares are, or shares themselves.
struct Estimates {
  const float* values;
  bool scores;
  float highest;  // of the values that are numbers
};

__device__ Estimates make_estimates(const float* values, bool scores, Interval visible,
                                    ChooseStorage& storage) {
  float highest = -INFINITY;
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += blockDim.x) {
    highest = fmaxf(highest, values[j]);
  }
  return {values, scores, greatest_of(highest, storage)};
}

/// The visible blocks of a list: keys that order them, and their shares as integers.
template <bool kCached>
struct Candidates {
  BlockRule rule;
  Estimates estimates;
  uint32_t* keys;  // of the visible blocks, in shared memory where it has room
  Weight* weights;

  __device__ uint32_t make_key(int32_t j) const {
    return key_of(estimates.values[j], rule.forced(j));
  }
  __device__ Weight make_weight(int32_t j) const {
    return weight_of(estimates.values[j], estimates.scores, estimates.highest);
  }
  __device__ void fill() const {
    for (int32_t j = rule.visible.begin + threadIdx.x; j < rule.visible.end; j += blockDim.x) {
      keys[j - rule.visible.begin] = make_key(j);
      weights[j - rule.visible.begin] = make_weight(j);
    }
    __syncthreads();
  }
  __device__ uint32_t key(int32_t j) const {
    return kCached ? keys[j - rule.visible.begin] : make_key(j);
  }
  __device__ Weight weight(int32_t j) const {
    return kCached ? weights[j - rule.visible.begin] : make_weight(j);
  }
};

/// The blocks whose keys take(key) takes; all threads get them.
template <typename Blocks, typename Take>
__device__ Reached reach(const Blocks& blocks, const Take& take, ChooseStorage& storage) {
  Reached all;
  for (int32_t j = blocks.rule.visible.begin + threadIdx.x; j < blocks.rule.visible.end;
       j += blockDim.x) {
    const uint32_t key = blocks.key(j);
    if (take(key)) {
      all.add({blocks.weight(j), 1, key, 0});
    } else if (key != kForced) {
      all.add({0, 0, kForced, key});
    }
  }
  all.join_lanes();
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    const int warp = threadIdx.x / 32;
    storage.weights[warp] = all.weight;
    storage.counts[warp] = all.count;
    storage.least[warp] = all.least;
    storage.below[warp] = all.below;
  }
  __syncthreads();
  all = {};
  for (int warp = 0; warp < num_warps(); ++warp) {
    all.add(
        {storage.weights[warp], storage.counts[warp], storage.least[warp], storage.below[warp]});
  }
  return all;
}

/// Which blocks are kept beside the forced ones: at most `most`, and no more than reach `wanted`.
template <typename Blocks>
__device__ Threshold choose(const Blocks& blocks, int32_t most, Weight wanted,
                            ChooseStorage& storage) {
  auto reach_key = [&](uint32_t key) {
    return reach(blocks, [=](uint32_t other) { return other != kForced && other >= key; }, storage);
  };
  const auto [key, wanted_equal] = find_lowest(reach_key, most, wanted);
  if (wanted_equal == kUnlimited) return {};
  if (threadIdx.x < 32) {
    int32_t found = 0, last = -1;
    for (int32_t begin = blocks.rule.visible.begin; found < wanted_equal; begin += 32) {
      const int32_t j = begin + threadIdx.x;
      const bool same = j < blocks.rule.visible.end && blocks.key(j) == key;
      const uint32_t lanes = __ballot_sync(~0u, same);
      if (found + __popc(lanes) >= wanted_equal) {
        last = begin + static_cast<int32_t>(__fns(lanes, 0, wanted_equal - found));
      }
      found += __popc(lanes);
    }
    if (threadIdx.x == 0) storage.last = last;
  }
  __syncthreads();
  return {key, storage.last};
}

/// Writes the kept blocks ascending, zeros past them, and their number.
template <typename Blocks>
__device__ void write_kept(const SelectParams& params, const Blocks& blocks,
                           const Threshold& threshold, int64_t row, ChooseStorage& storage) {
  const Interval visible = blocks.rule.visible;
  int32_t* indices = params.indices + row * params.num_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t count = 0;
  int turn = 0;
  for (int32_t begin = visible.begin; begin < visible.end; begin += blockDim.x, turn ^= 1) {
    const int32_t j = begin + threadIdx.x;
    const bool kept = j < visible.end && threshold.keeps(blocks.key(j), j);
    const uint32_t lanes = __ballot_sync(~0u, kept);
    if (lane == 0) storage.listed[turn][warp] = __popc(lanes);
    __syncthreads();
    int32_t at = count + __popc(lanes & ((1u << lane) - 1));
    for (int other = 0; other < num_warps(); ++other) {
      const int32_t listed = storage.listed[turn][other];
      if (other < warp) at += listed;
      count += listed;
    }
    if (kept) indices[at] = j;
  }
  for (int32_t at = count + threadIdx.x; at < params.num_kv; at += blockDim.x) indices[at] = 0;
  if (threadIdx.x == 0) params.counts[row] = count;
}

/// `scores` tells whether the values are scores, whose softmax the shares are; kCached whether
/// shared memory has room for a key and a weight of each key block.
template <bool kCached>
__global__ void __launch_bounds__(kMostThreads)
    choose_blocks(const SelectParams params, float* values, bool scores) {
  extern __shared__ Weight cache[];
  __shared__ ChooseStorage storage;
  ptx::wait_for_primary();
  const BlockRule rule = rule_of_list(params, blockIdx.x, storage.hull);
  const Interval visible = rule.visible;
  values += rule.first_value(params);
  if (params.by_group) {
    join_heads(params, rule, scores, false, values, values + visible.begin, storage.heads);
    scores = false;
  }
  const Estimates estimates = make_estimates(values, scores, visible, storage);
  const Candidates<kCached> blocks = {rule, estimates,
                                      reinterpret_cast<uint32_t*>(cache + params.num_kv), cache};
  if constexpr (kCached) blocks.fill();
  const Reached forced = reach(blocks, [](uint32_t key) { return key == kForced; }, storage);
  const Reached all = reach(blocks, [](uint32_t) { return true; }, storage);
  const Weight wanted = wanted_weight(params, all.weight, forced.weight);
  const int32_t most = params.budget(visible.size()) - forced.count;
  const Threshold threshold = choose(blocks, most, wanted, storage);
  write_kept(params, blocks, threshold, blockIdx.x, storage);
}

}  // namespace

Status launch_choose(const SelectParams& params, const SelectWorkspace& workspace) {
  const int64_t rows = int64_t{params.problem.batch} * params.lists() * params.num_q;
  const bool scores = params.selector == Selector::kMean || params.selector == Selector::kScores ||
                      (params.selector == Selector::kSketch && tiles_are_blocks(params));
  const bool by_mass = params.mass > 0 && params.mass < 1;
  if (!by_mass && serves_choose_step(params, scores)) {
    return launch_choose_step(params, workspace.scores);
  }
  if (!by_mass) return launch_choose_count(params, workspace.scores, scores);
  if (serves_choose_warp(params)) return launch_choose_warp(params, workspace.scores, scores);
  int32_t room = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, params.device);
  if (error != cudaSuccess) return to_status(error);
  const int64_t bytes = params.num_kv * int64_t{sizeof(Weight) + sizeof(uint32_t)};
  const bool cached = bytes + static_cast<int64_t>(sizeof(ChooseStorage)) <= room;
  const int32_t cache_bytes = cached ? static_cast<int32_t>(bytes) : 0;
  const bool wide = params.num_kv >= kLongBlocks && rows <= kFewLists;
  const auto kernel = cached ? choose_blocks<true> : choose_blocks<false>;
  const Status status = allow_shared_bytes(kernel, cache_bytes);
  if (!status.ok()) return status;
  const LaunchShape shape = {
      static_cast<uint32_t>(rows),
      static_cast<uint32_t>(wide ? kMostThreads : threads_of_list(params.num_kv)),
      static_cast<size_t>(cache_bytes), to_stream(params.stream)};
  return launch_dependent(kernel, shape, params, workspace.scores, scores);
}

}  // namespace sparse_attn::cuda

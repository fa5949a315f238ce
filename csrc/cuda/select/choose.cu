// The kept key blocks of each query block, ascending: forced ones first, then the highest estimates
// until their share reaches the mass or their number the budget, exact with ties to the lower
// block. The rule stands in docs/design.md, "Block top-k". One thread block a list, whose estimates
// it holds in shared memory: the lowest kept one is found by bisection between estimates that are
// there. Shares are added as integers, so that no order of additions matters.
#include "../common/launch.cuh"
#include "../common/radix_select.cuh"
#include "../sketch/sketch.h"
#include "hull.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kChooseThreads = 128;
constexpr int kLongThreads = 1024;     // of few lists of many blocks
constexpr int32_t kLongBlocks = 1024;  // from which on
constexpr int64_t kFewLists = 1024;    // up to which
constexpr int kMostWarps = kLongThreads / 32;
constexpr int kAtOnce = 4;                  // values that a thread reads at once
constexpr int kMembers = 8;                 // heads whose shares are summed at once
constexpr uint32_t kForced = ~0u;           // above the key of every score
constexpr float kWholeWeight = 1ull << 40;  // of all shares together

using Weight = unsigned long long;

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
  __device__ Reached from_lane(int step) const {
    return {__shfl_xor_sync(~0u, weight, step), __shfl_xor_sync(~0u, count, step),
            __shfl_xor_sync(~0u, least, step), __shfl_xor_sync(~0u, below, step)};
  }
};

/// Shared memory of a thread block.
struct ChooseStorage {
  float warps[kMostWarps];
  Weight weights[kMostWarps];
  int32_t counts[kMostWarps];
  uint32_t least[kMostWarps], below[kMostWarps];
  int32_t listed[2][kMostWarps];
  float2 member_warps[kMembers][kMostWarps];
  float2 members[kMembers];  // greatest score, sum of exp(score - greatest); or 0, sum of shares
  SelectStorage select;
  HullStorage hull;
  int32_t last;
};

__device__ __forceinline__ int num_warps() { return static_cast<int>(blockDim.x / 32); }

/// What the rule says about the key blocks of one query block.
struct BlockRule {
  Interval visible, sinks, diagonal;

  __device__ bool forced(int32_t block) const {
    return sinks.contains(block) || diagonal.contains(block);
  }
};

/// Reduces over the thread block, in one order whatever the values are; all threads get the result.
template <typename Combine>
__device__ float reduce(float x, ChooseStorage& storage, const Combine& combine) {
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) storage.warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = storage.warps[0];
  for (int warp = 1; warp < num_warps(); ++warp) x = combine(x, storage.warps[warp]);
  return x;
}

/// Key blocks between the first and the last key that a row of the heads may see.
__device__ Interval find_visible(const SelectParams& params, int64_t batch, int64_t head,
                                 int32_t heads, int32_t query_block, ChooseStorage& storage) {
  const Interval rows = params.rows_of_block(query_block);
  return SelectParams::blocks_of(hull_of_rows(params, batch, head, heads, rows, storage.hull),
                                 params.block_kv);
}

/// The estimates of a row of blocks: scores whose softmax the shares are, or shares themselves.
struct Estimates {
  const float* values;
  bool scores;
  float highest = 0.0f;  // of the scores that are numbers

  __device__ float share(int32_t j) const {
    if (!scores) return values[j];
    return values[j] == -INFINITY ? 0.0f : expf(values[j] - highest);
  }
};

__device__ Estimates make_estimates(const float* values, bool scores, Interval visible,
                                    ChooseStorage& storage) {
  Estimates estimates = {values, scores};
  if (!scores) return estimates;
  float highest = -INFINITY;
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += blockDim.x) {
    highest = fmaxf(highest, values[j]);
  }
  estimates.highest = reduce(highest, storage, [](float a, float b) { return fmaxf(a, b); });
  return estimates;
}

/// The sum of the shares; those that are no numbers stand apart.
__device__ float total_share(const Estimates& estimates, Interval visible, ChooseStorage& storage) {
  float sum = 0.0f;
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += blockDim.x) {
    float share = estimates.share(j);
    sum += isnan(share) ? 0.0f : share;
  }
  return reduce(sum, storage, [](float a, float b) { return a + b; });
}

/// What a thread, then a warp, then a thread block has added up of a row's shares.
struct ShareSum {
  float m = -INFINITY, l = 0.0f;

  __device__ void add(float value, bool scores) {
    if (isnan(value) || value == -INFINITY) return;
    if (!scores) {
      m = 0.0f;
      l += value;
    } else if (value > m) {
      l = l * expf(m - value) + 1.0f;
      m = value;
    } else {
      l += expf(value - m);
    }
  }
  /// The sum over the lanes of a warp; lane 0 has it.
  __device__ void join_lanes() {
    for (int step = 16; step > 0; step /= 2) {
      const float other_m = __shfl_down_sync(~0u, m, step);
      const float other_l = __shfl_down_sync(~0u, l, step);
      const float top = fmaxf(m, other_m);
      if (top == -INFINITY) continue;
      l = l * expf(m - top) + other_l * expf(other_m - top);
      m = top;
    }
  }
};

/// Writes the greatest of the heads' normalised shares over the first head's row.
__device__ void join_heads(const SelectParams& params, int64_t batch, int64_t head,
                           int32_t query_block, bool scores, Interval visible, float* rows,
                           ChooseStorage& storage) {
  const int64_t stride = int64_t{params.num_q} * params.num_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int32_t first = 0; first < params.group(); first += kMembers) {
    const int32_t members = imin(kMembers, params.group() - first);
    Interval own[kMembers];
#pragma unroll
    for (int member = 0; member < kMembers; ++member) {
      if (member >= members) continue;
      own[member] = visible;
      if (params.bounds.data != nullptr) {
        own[member] = find_visible(params, batch, head + first + member, 1, query_block, storage);
      }
      const float* row = rows + (first + member) * stride;
      ShareSum sum;
      for (int32_t j = own[member].begin + threadIdx.x; j < own[member].end;
           j += kAtOnce * blockDim.x) {
        float some[kAtOnce];  // read before any is used: their latencies overlap
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int32_t at = j + i * static_cast<int32_t>(blockDim.x);
          some[i] = at < own[member].end ? row[at] : -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum.add(some[i], scores);
      }
      sum.join_lanes();
      if (lane == 0) storage.member_warps[member][warp] = {sum.m, sum.l};
    }
    __syncthreads();
    for (int32_t member = warp; member < members; member += num_warps()) {
      ShareSum sum;
      if (lane < num_warps()) {
        sum = {storage.member_warps[member][lane].x, storage.member_warps[member][lane].y};
      }
      sum.join_lanes();
      if (lane == 0) storage.members[member] = {sum.m, sum.l};
    }
    __syncthreads();
    for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += blockDim.x) {
      float best = first == 0 ? 0.0f : rows[j];
#pragma unroll
      for (int member = 0; member < kMembers; ++member) {
        if (member >= members) continue;
        if (!own[member].contains(j)) continue;
        const float2 sum = storage.members[member];
        float share = rows[(first + member) * stride + j];
        if (scores) share = share == -INFINITY ? 0.0f : expf(share - sum.x);
        if (sum.y > 0.0f) share /= sum.y;
        best = isnan(best) || isnan(share) ? NAN : fmaxf(best, share);
      }
      rows[j] = best;
    }
    __syncthreads();
  }
}

/// The visible blocks of a list: keys that order them, and weights, integers that add up to
/// kWholeWeight.
struct Candidates {
  BlockRule rule;
  Estimates estimates;
  float unit;      // weight of a share of 1; 0 where none counts
  uint32_t* keys;  // of the visible blocks, in shared memory; null where it has no room
  Weight* weights;

  __device__ uint32_t make_key(int32_t j) const {
    const float value = estimates.values[j];
    return rule.forced(j) || isnan(value) ? kForced : ordered_key(value);
  }
  __device__ Weight make_weight(int32_t j) const {
    if (unit == 0.0f) return 0;
    const float share = estimates.share(j);
    return isnan(share) ? 0 : __float2ull_rn(share * unit);
  }
  __device__ void fill() const {
    if (keys == nullptr) return;
    for (int32_t j = rule.visible.begin + threadIdx.x; j < rule.visible.end; j += blockDim.x) {
      keys[j - rule.visible.begin] = make_key(j);
      weights[j - rule.visible.begin] = make_weight(j);
    }
    __syncthreads();
  }
  __device__ uint32_t key(int32_t j) const {
    return keys == nullptr ? make_key(j) : keys[j - rule.visible.begin];
  }
  __device__ Weight weight(int32_t j) const {
    return keys == nullptr ? make_weight(j) : weights[j - rule.visible.begin];
  }
};

/// The blocks whose keys take(key) takes; all threads get them.
template <typename Take>
__device__ Reached reach(const Candidates& blocks, const Take& take, ChooseStorage& storage) {
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
  for (int step = 16; step > 0; step /= 2) all.add(all.from_lane(step));
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

/// Which blocks are kept beside the forced ones: at most `most`, and no more than reach `wanted`,
/// by bisection.
__device__ Threshold choose(const Candidates& blocks, int32_t most, Weight wanted,
                            ChooseStorage& storage) {
  constexpr Threshold kAll = {0, 0};
  if (most <= 0 || wanted == 0) return {kForced - 1, -1};
  auto enough = [&](const Reached& reached) {
    return reached.count >= most || reached.weight >= wanted;
  };
  // `low` is enough, `high` is not; what is kept ends at a key between least of the one and below
  // of the other.
  Reached low = reach(blocks, [](uint32_t key) { return key != kForced; }, storage), high;
  high.below = kForced - 1;
  if (!enough(low)) return kAll;
  while (low.least < high.below) {
    const uint32_t middle = low.least + (high.below - low.least + 1) / 2;
    const Reached reached =
        reach(blocks, [=](uint32_t key) { return key != kForced && key >= middle; }, storage);
    (enough(reached) ? low : high) = reached;
  }

  // Of equal blocks as many as it takes, the first ones.
  const int32_t equal = low.count - high.count;
  const Weight each = (low.weight - high.weight) / equal;
  int32_t wanted_equal = imin(equal, most - high.count);
  if (each > 0) {
    const Weight missing = (wanted - high.weight + each - 1) / each;
    if (missing < static_cast<Weight>(wanted_equal)) wanted_equal = static_cast<int32_t>(missing);
  }
  const uint32_t key = low.least;
  if (wanted_equal == equal) return {key - 1, -1};
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

/// The same by their number alone, in four passes.
__device__ Threshold choose(const Candidates& blocks, int32_t most, ChooseStorage& storage) {
  if (most <= 0) return {kForced - 1, -1};
  const Interval visible = blocks.rule.visible;
  auto key = [&](int32_t i) -> uint32_t {
    const uint32_t own = blocks.key(visible.begin + i);
    return own == kForced ? 0 : own;
  };
  const Threshold threshold = find_threshold(key, visible.size(), most, storage.select);
  return {threshold.key, threshold.last < 0 ? -1 : visible.begin + threshold.last};
}

/// Writes the kept blocks ascending, zeros past them, and their number.
__device__ void write_kept(const SelectParams& params, const Candidates& blocks,
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

/// `scores` tells whether the values are scores, whose softmax the shares are; `cached` whether
/// shared memory has room for a key and a weight of each key block.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    choose_blocks(const SelectParams params, float* values, bool scores, bool cached) {
  extern __shared__ Weight cache[];
  __shared__ ChooseStorage storage;
  const int64_t row = blockIdx.x;
  const int64_t list = row / params.num_q;
  const int64_t batch = list / params.lists();
  const int64_t head = list % params.lists() * params.heads_per_list();
  const int32_t query_block = static_cast<int32_t>(row % params.num_q);
  values += ((batch * params.heads_q + head) * params.num_q + query_block) * params.num_kv;

  const BlockRule rule = {
      find_visible(params, batch, head, params.heads_per_list(), query_block, storage),
      params.sinks(batch), params.diagonal(batch, query_block)};
  const Interval visible = rule.visible;
  if (params.by_group) {
    join_heads(params, batch, head, query_block, scores, visible, values, storage);
    scores = false;
  }
  const bool by_mass = params.mass > 0 && params.mass < 1;
  Estimates estimates = {values, scores};
  if (by_mass) estimates = make_estimates(values, scores, visible, storage);
  const float total = by_mass ? total_share(estimates, visible, storage) : 0.0f;
  const Candidates blocks = {rule, estimates, total > 0.0f ? kWholeWeight / total : 0.0f,
                             cached ? reinterpret_cast<uint32_t*>(cache + params.num_kv) : nullptr,
                             cache};
  blocks.fill();
  const Reached forced = reach(blocks, [](uint32_t key) { return key == kForced; }, storage);
  Weight wanted = 0;
  if (by_mass) {
    const Reached all = reach(blocks, [](uint32_t) { return true; }, storage);
    const auto target = static_cast<Weight>(ceil(params.mass * static_cast<double>(all.weight)));
    wanted = forced.weight < target ? target - forced.weight : 0;
  }
  const int32_t most = params.budget(visible.size()) - forced.count;
  const Threshold threshold =
      by_mass ? choose(blocks, most, wanted, storage) : choose(blocks, most, storage);
  write_kept(params, blocks, threshold, row, storage);
}

}  // namespace

Status launch_choose(const SelectParams& params, const SelectWorkspace& workspace) {
  const int64_t rows = int64_t{params.batch} * params.lists() * params.num_q;
  const bool scores = params.selector == Selector::kMean || params.selector == Selector::kScores ||
                      (params.selector == Selector::kSketch && tiles_are_blocks(params));
  int32_t room = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, params.device);
  if (error != cudaSuccess) return to_status(error);
  const int64_t bytes = params.num_kv * int64_t{sizeof(Weight) + sizeof(uint32_t)};
  const bool cached = bytes + static_cast<int64_t>(sizeof(ChooseStorage)) <= room;
  const int32_t cache_bytes = cached ? static_cast<int32_t>(bytes) : 0;
  const bool wide = params.num_kv >= kLongBlocks && rows <= kFewLists;
  const auto kernel = wide ? choose_blocks<kLongThreads> : choose_blocks<kChooseThreads>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, cache_bytes);
  if (error != cudaSuccess) return to_status(error);
  kernel<<<static_cast<uint32_t>(rows), wide ? kLongThreads : kChooseThreads, cache_bytes,
           to_stream(params.stream)>>>(params, workspace.scores, scores, cached);
  return launched();
}

}  // namespace sparse_attn::cuda

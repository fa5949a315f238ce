// The kept key blocks of each query block, ascending: forced ones first, then the highest estimates
// until their share reaches the mass or their number the budget, exact with ties to the lower
// block. The rule stands in docs/design.md, "Block top-k". One thread block a list. Shares are
// added as integers, so that no order of additions matters.
#include "../common/launch.cuh"
#include "../common/radix_select.cuh"
#include "../sketch/sketch.h"
#include "hull.cuh"
#include "tools.h"
#include "warp_list.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int kChooseThreads = 128;
constexpr int kChooseWarps = kChooseThreads / 32;
constexpr uint32_t kForced = ~0u;           // above the key of every score
constexpr float kWholeWeight = 1ull << 40;  // of all shares together

using Weight = unsigned long long;

/// Shared memory of a thread block.
struct ChooseStorage {
  SelectStorage select;
  Weight weights[SelectStorage::kBins];
  float warps[kChooseWarps];
  HullStorage hull;
  int32_t forced, above;  // blocks
  Weight total, reached, equal;
};

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
  for (int warp = 1; warp < kChooseWarps; ++warp) x = combine(x, storage.warps[warp]);
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
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kChooseThreads) {
    highest = fmaxf(highest, values[j]);
  }
  estimates.highest = reduce(highest, storage, [](float a, float b) { return fmaxf(a, b); });
  return estimates;
}

/// The sum of the shares; those that are no numbers stand apart.
__device__ float total_share(const Estimates& estimates, Interval visible, ChooseStorage& storage) {
  float sum = 0.0f;
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kChooseThreads) {
    float share = estimates.share(j);
    sum += isnan(share) ? 0.0f : share;
  }
  return reduce(sum, storage, [](float a, float b) { return a + b; });
}

/// Writes the greatest of the heads' normalised shares over the first head's row.
__device__ void join_heads(const SelectParams& params, int64_t batch, int64_t head,
                           int32_t query_block, bool scores, Interval visible, float* rows,
                           ChooseStorage& storage) {
  const int64_t stride = int64_t{params.num_q} * params.num_kv;
  for (int32_t member = 0; member < params.group(); ++member) {
    const Interval own = find_visible(params, batch, head + member, 1, query_block, storage);
    const Estimates estimates = make_estimates(rows + member * stride, scores, own, storage);
    const float total = total_share(estimates, own, storage);
    for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kChooseThreads) {
      float share = own.contains(j) ? estimates.share(j) : 0.0f;
      share = total > 0.0f ? share / total : share;
      float best = member == 0 ? 0.0f : rows[j];
      rows[j] = isnan(best) || isnan(share) ? NAN : fmaxf(best, share);
    }
    __syncthreads();
  }
}

/// How many of the blocks that are not forced it takes to reach the mass.
template <typename Key>
__device__ int32_t count_for_mass(const SelectParams& params, const Estimates& estimates,
                                  Interval visible, const Key& key, ChooseStorage& storage) {
  const float total = total_share(estimates, visible, storage);
  const float unit = total > 0.0f ? kWholeWeight / total : 0.0f;
  auto weight = [&](int32_t j) -> Weight {
    float share = estimates.share(j);
    return isnan(share) ? 0 : __float2ull_rn(share * unit);
  };
  if (threadIdx.x == 0) storage.total = storage.reached = 0;
  __syncthreads();
  Weight all = 0, forced = 0;
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kChooseThreads) {
    all += weight(j);
    if (key(j) == kForced) forced += weight(j);
  }
  atomicAdd(&storage.total, all);
  atomicAdd(&storage.reached, forced);
  __syncthreads();
  const Weight target = static_cast<Weight>(ceil(params.mass * static_cast<double>(storage.total)));
  if (storage.reached >= target) return 0;

  Weight wanted = target - storage.reached;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = threadIdx.x; bin < SelectStorage::kBins; bin += kChooseThreads) {
      storage.weights[bin] = 0;
    }
    __syncthreads();
    const uint32_t high = shift == 24 ? 0 : ~0u << (shift + 8);
    for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kChooseThreads) {
      const uint32_t x = key(j);
      if (x == kForced || (x & high) != prefix) continue;
      if (Weight own = weight(j)) atomicAdd(&storage.weights[x >> shift & 255], own);
    }
    __syncthreads();
    const Digit digit = find_digit(storage.weights, SelectStorage::kBins, wanted);
    __syncthreads();
    if (!digit.found) return params.num_kv;  // the weights do not reach the target: all
    prefix |= digit.value << shift;
    wanted = digit.wanted;
  }

  // Blocks above the key at which the mass is reached, and of those equal to it as many as it
  // takes.
  if (threadIdx.x == 0) storage.above = 0;
  __syncthreads();
  int32_t above = 0;
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kChooseThreads) {
    const uint32_t x = key(j);
    above += x != kForced && x > prefix;
    if (x == prefix) storage.equal = weight(j);  // the same for all
  }
  atomicAdd(&storage.above, above);
  __syncthreads();
  return storage.above + static_cast<int32_t>((wanted + storage.equal - 1) / storage.equal);
}

/// `scores` tells whether the values are scores, whose softmax the shares are.
__global__ void __launch_bounds__(kChooseThreads)
    choose_blocks(const SelectParams params, float* values, bool scores) {
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
  const Estimates estimates = make_estimates(values, scores, visible, storage);

  auto key = [&](int32_t j) -> uint32_t {
    if (!visible.contains(j)) return 0;
    if (rule.forced(j) || isnan(values[j])) return kForced;
    return ordered_key(values[j]);
  };
  __syncthreads();
  if (threadIdx.x == 0) storage.forced = 0;
  __syncthreads();
  int32_t mine = 0;
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kChooseThreads) {
    mine += key(j) == kForced;
  }
  if (mine > 0) atomicAdd(&storage.forced, mine);
  __syncthreads();

  int32_t kept = params.budget(visible.size());
  if (params.mass > 0 && params.mass < 1) {
    const int32_t best = count_for_mass(params, estimates, visible, key, storage);
    kept = imin(kept, storage.forced + imin(best, visible.size()));
  }
  kept = imax(kept, storage.forced);
  __syncthreads();
  const Threshold threshold = find_threshold(key, params.num_kv, kept, storage.select);

  if (threadIdx.x >= 32) return;
  auto kept_block = [&](int32_t j) { return kept > 0 && threshold.keeps(key(j), j); };
  write_list_row(params.num_kv, kept_block, params.indices + row * params.num_kv,
                 params.counts + row);
}

}  // namespace

Status launch_choose(const SelectParams& params, const SelectWorkspace& workspace) {
  int64_t rows = int64_t{params.batch} * params.lists() * params.num_q;
  bool scores = params.selector == Selector::kMean || params.selector == Selector::kScores ||
                (params.selector == Selector::kSketch && tiles_are_blocks(params));
  choose_blocks<<<static_cast<uint32_t>(rows), kChooseThreads, 0, to_stream(params.stream)>>>(
      params, workspace.scores, scores);
  return launched();
}

}  // namespace sparse_attn::cuda

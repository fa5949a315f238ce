// The k highest scores of a row and attention to them, by a thread block for each row:
//   1 bound    a score that about k of the row's exceed, from a sample; no bound for short rows
//   2 gather   what reaches it, in the order of the keys: the candidates, in shared memory
//   3 choose   the k-th highest of them (radix_select.cuh); exact ties go to the lower key
//   4 sum up   softmax over what is kept, and the sum of its values, read by groups of threads
// A sample that bounds badly costs time and nothing else: then all scores are ranked where they
// lie.
#include <cfloat>

#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/mask.cuh"
#include "../common/merge_row.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/ptx/math.cuh"
#include "../common/radix_select.cuh"
#include "topk.h"

namespace sparse_attn::cuda::decode {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kCandidates = 6144;  // that have room
constexpr int kSampled = 2048;
constexpr int kColumns = 8;    // of a row of values that a thread reads at once
constexpr int kRowsAhead = 8;  // of values that a thread reads before it adds them
static_assert(kMostKept < kCandidates && kSampled <= kCandidates);

/// Dynamic shared memory of a thread block.
struct KeepStorage {
  uint32_t keys[kCandidates];  // ordered_key of each score, then what the softmax takes, its weight
  int32_t places[kCandidates];
};
static_assert(sizeof(KeepStorage) >= kThreads * kColumns * sizeof(float),
              "the groups' sums take its place");

/// Where the gathering of a thread block stands, twice, so that one barrier a round is enough.
struct GatherStorage {
  int32_t of_warp[2][kWarps];
};

/// Writes the (key, place) of each of `count` items that item(i) names with a key above 0, in
/// their order, and returns how many they are; those past kCandidates are counted alone. Items may
/// be what the storage holds.
template <typename Item>
__device__ int32_t gather(int32_t count, const Item& item, KeepStorage& storage,
                          GatherStorage& shared) {
  constexpr int kEach = 8;  // items of a lane, the lanes side by side
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t total = 0;
  int turn = 0;
#pragma unroll 1
  for (int32_t begin = 0; begin < count; begin += kEach * kThreads, turn ^= 1) {
    uint2 own[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t at = begin + (warp * kEach + i) * 32 + lane;
      own[i] = at < count ? item(at) : uint2{};
    }
    uint32_t kept[kEach];  // by which lanes
    int32_t of_warp = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      kept[i] = __ballot_sync(~0u, own[i].x != 0);
      of_warp += __popc(kept[i]);
    }
    if (lane == 0) shared.of_warp[turn][warp] = of_warp;
    __syncthreads();
    const int32_t before = warp_prefix_sum(lane < kWarps ? shared.of_warp[turn][lane] : 0);
    int32_t place = total + __shfl_sync(~0u, before, warp) - of_warp;
    total += __shfl_sync(~0u, before, kWarps - 1);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t at = place + __popc(kept[i] & ((1u << lane) - 1));
      place += __popc(kept[i]);
      if (own[i].x == 0 || at >= kCandidates) continue;
      storage.keys[at] = own[i].x;
      storage.places[at] = static_cast<int32_t>(own[i].y);
    }
  }
  __syncthreads();
  return total;
}

/// The combination of a value of each thread, in a fixed order.
template <typename Combine>
__device__ float reduce_block(float x, float (&of_warp)[kWarps], const Combine& combine) {
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warp[0];
  for (int warp = 1; warp < kWarps; ++warp) x = combine(x, of_warp[warp]);
  __syncthreads();
  return x;
}

/// A key that about `k` of the row's `count` scores reach, rather more than fewer.
__device__ uint32_t find_bound(const float* scores, int32_t count, int32_t k, KeepStorage& storage,
                               SelectStorage& select) {
  constexpr float kDeviations = 4.0f, kSlack = 4.0f;
  const int32_t step = count / kSampled;
  for (int i = threadIdx.x; i < kSampled; i += kThreads) {
    storage.keys[i] = ordered_key(scores[int64_t{i} * step]);
  }
  __syncthreads();
  const float rank = static_cast<float>(k) * kSampled / static_cast<float>(count);
  const int32_t reached = static_cast<int32_t>(rank + kDeviations * sqrtf(rank) + kSlack);
  constexpr int kRoughly = 16;  // bits that are left out
  return find_threshold([&](int32_t i) { return storage.keys[i]; }, kSampled,
                        imin(reached, kSampled), select, kRoughly)
      .key;
}

/// Leaves the row's k highest scores in the storage, in the order of their keys, and returns how
/// many they are.
__device__ int32_t keep_highest(const float* scores, int32_t count, int32_t k, KeepStorage& storage,
                                GatherStorage& shared, SelectStorage& select) {
  auto key_at = [&](int32_t i) { return ordered_key(scores[i]); };
  const bool sampled = count > kCandidates;
  const uint32_t bound = sampled ? find_bound(scores, count, k, storage, select) : 0;
  int32_t found = gather(
      count,
      [&](int32_t i) {
        const uint32_t key = key_at(i);
        return key >= bound ? uint2{key, static_cast<uint32_t>(i)} : uint2{};
      },
      storage, shared);
  if (sampled && (found < k || found > kCandidates)) {
    const Threshold threshold = find_threshold(key_at, count, k, select);
    return gather(
        count,
        [&](int32_t i) {
          const uint32_t key = key_at(i);
          return threshold.keeps(key, i) ? uint2{key, static_cast<uint32_t>(i)} : uint2{};
        },
        storage, shared);
  }
  if (found <= k) return found;
  const Threshold threshold =
      find_threshold([&](int32_t i) { return storage.keys[i]; }, found, k, select);
  return gather(
      found,
      [&](int32_t i) {
        const uint32_t key = storage.keys[i];
        return threshold.keeps(key, i) ? uint2{key, static_cast<uint32_t>(storage.places[i])}
                                       : uint2{};
      },
      storage, shared);
}

/// The row's sum of weights times values, a group of threads for each row of values in turn.
template <typename T>
__device__ void sum_values(const AttentionParams& params, const Sequence& sequence, int64_t batch,
                           int32_t key_head, int32_t first_key, int32_t kept,
                           const KeepStorage& storage, float (&sum)[kColumns]) {
  const int32_t lanes = params.problem.value_dim / kColumns, groups = kThreads / lanes;
  const int32_t group = threadIdx.x / lanes, column = threadIdx.x % lanes * kColumns;
  if (group >= groups) return;
  const TensorView& value = params.keys.value;
  const T* values = static_cast<const T*>(value.data) + column;
#pragma unroll 1
  for (int32_t begin = group; begin < kept; begin += kRowsAhead * groups) {
    uint4 rows[kRowsAhead];
    float weights[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const int32_t at = begin + i * groups;
      weights[i] = 0.0f;
      if (at >= kept) continue;
      weights[i] = __uint_as_float(storage.keys[at]);
      rows[i] = *reinterpret_cast<const uint4*>(
          values +
          params.keys.locate(value, sequence, batch, key_head, first_key + storage.places[at]));
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (begin + i * groups >= kept) continue;
      const T* row = reinterpret_cast<const T*>(&rows[i]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] = fmaf(weights[i], to_float(row[c]), sum[c]);
    }
  }
}

/// What the softmax takes of the score of key j, which has been ranked: softcap, ALiBi and
/// attn_mask join what is kept.
__device__ float join_score(const Scores& scores, float score, int64_t batch, int32_t head,
                            int32_t query, int32_t position, int32_t j) {
  if (score == -INFINITY) return score;
  return capped(score, scores.softcap) + scores.alibi.bias(batch, head, position, j) +
         mask_bias(scores.mask, batch, head, query, j);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    keep_kernel(const __grid_constant__ AttentionParams params, const ScoreRows rows) {
  extern __shared__ __align__(16) char smem[];
  __shared__ GatherStorage gathering;
  __shared__ SelectStorage select;
  __shared__ float of_warp[kWarps];
  KeepStorage& storage = *reinterpret_cast<KeepStorage*>(smem);
  ptx::wait_for_primary();
  const Problem& problem = params.problem;
  const int64_t number = rows.first + blockIdx.x;
  const auto query = static_cast<int32_t>(number % problem.seq_q);
  const auto head = static_cast<int32_t>(number / problem.seq_q % problem.heads_q);
  const auto batch = static_cast<int32_t>(number / problem.seq_q / problem.heads_q);
  const Sequence sequence = params.sequences.of(batch);
  if (query >= sequence.rows) return;
  Pattern pattern;
  pattern.causal = params.pattern.causal;
  const Slice slice = make_slice(pattern, 0, sequence);
  const Interval seen =
      make_row(pattern, slice, query, params.scores.bounds.row(batch, head, query, problem.seq_kv))
          .keys;
  const int32_t kept = keep_highest(rows.row(number) + seen.begin, imax(seen.size(), 0),
                                    params.pattern.topk, storage, gathering, select);

  // The softmax, relative to the highest score of all.
  float top = -INFINITY;
  for (int32_t i = threadIdx.x; i < kept; i += kThreads) {
    const float score = join_score(params.scores, score_of(storage.keys[i]), batch, head, query,
                                   query + slice.offset, seen.begin + storage.places[i]);
    storage.keys[i] = __float_as_uint(score);
    top = fmaxf(top, score);
  }
  top = reduce_block(top, of_warp, [](float a, float b) { return fmaxf(a, b); });
  const float shift = top == -INFINITY ? 0.0f : top;
  float sum = 0.0f;
  for (int32_t i = threadIdx.x; i < kept; i += kThreads) {
    const float weight = ptx::exp2_approx((__uint_as_float(storage.keys[i]) - shift) * kLog2e);
    storage.keys[i] = __float_as_uint(weight);
    sum += weight;
  }
  sum = reduce_block(sum, of_warp, [](float a, float b) { return a + b; });

  float of_columns[kColumns] = {};
  sum_values<T>(params, sequence, batch, head / problem.group(), seen.begin, kept, storage,
                of_columns);
  __syncthreads();  // weights have been read
  auto* sums = reinterpret_cast<float (*)[kColumns]>(smem);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sums[threadIdx.x][c] = of_columns[c];
  __syncthreads();
  const auto column = static_cast<int32_t>(threadIdx.x);
  if (column < problem.value_dim) {
    const int32_t lanes = problem.value_dim / kColumns, groups = kThreads / lanes;
    float total[1] = {};
    for (int32_t group = 0; group < groups; ++group) {
      total[0] += sums[group * lanes + column / kColumns][column % kColumns];
    }
    // In log2 units a mask's lowest terms would overflow.
    const float m = top == -INFINITY ? top : ptx::clamp(top * kLog2e, FLT_MAX);
    store_row<T>(params, sequence, batch, head, query, column, total, m, sum);
  }
}

}  // namespace

Status attend_highest(const AttentionParams& params, const ScoreRows& rows) {
  auto launch = [&](auto kernel) {
    const Status status = allow_shared_bytes(kernel, sizeof(KeepStorage));
    if (!status.ok()) return status;
    const LaunchShape shape = {static_cast<uint32_t>(rows.count), kThreads, sizeof(KeepStorage),
                               to_stream(params.stream)};
    return launch_dependent(kernel, shape, params, rows);
  };
  return params.problem.dtype == Dtype::kFloat16 ? launch(keep_kernel<__half>)
                                                 : launch(keep_kernel<__nv_bfloat16>);
}

}  // namespace sparse_attn::cuda::decode

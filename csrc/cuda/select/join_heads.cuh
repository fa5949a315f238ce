// One estimate for the heads that share a list: the greatest of their normalised shares. Every head
// is read twice, for its sum and for its shares; four heads and four values of each at once, so
// that their latencies overlap. Sums run in one order whatever the values are.
#pragma once

#include "block_rule.cuh"

namespace sparse_attn::cuda {

constexpr int kMembers = 4;  // heads at once
constexpr int kAtOnce = 4;   // values of a thread and head

/// What a thread, then a warp, then a thread block has added up of a head's shares.
struct ShareSum {
  float m = -INFINITY, l = 0.0f;  // greatest score, sum of exp(score - m); or 0, sum of shares

  /// Values that are no numbers stand apart.
  __device__ void add(const float (&values)[kAtOnce], bool scores) {
    float top = scores ? m : 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) top = scores ? fmaxf(top, values[i]) : top;
    if (top == -INFINITY) return;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool counts = values[i] > -INFINITY;
      if (counts) sum += scores ? expf(values[i] - top) : values[i];
    }
    l = l * (scores ? expf(m - top) : 1.0f) + sum;
    m = top;
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

/// Shared memory of it, for thread blocks of up to 32 warps.
struct HeadStorage {
  int2 own[kMembers];  // blocks that the head sees, from and to
  float2 warps[kMembers][32];
  float2 sums[kMembers];
  HullStorage hull;
};

/// joined[j] = the greatest share of the list's heads in block visible.begin + j, NaN where one is
/// no number; `rows` is the first head's row. All threads call it; each writes the entries j =
/// threadIdx.x + i blockDim.x.
__device__ inline void join_heads(const SelectParams& params, const BlockRule& rule, bool scores,
                                  const float* rows, float* joined, HeadStorage& storage) {
  const int64_t stride = int64_t{params.num_q} * params.num_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto threads = static_cast<int32_t>(blockDim.x);
  const Interval visible = rule.visible;
  for (int32_t first = 0; first < params.group(); first += kMembers, rows += kMembers * stride) {
    const int32_t members = imin(kMembers, params.group() - first);
    __syncthreads();  // what the storage holds has been read
    for (int member = 0; member < members; ++member) {
      Interval own = visible;
      if (params.bounds.data != nullptr) {
        own = find_visible(params, rule.batch, rule.head + first + member, 1, rule.query_block,
                           storage.hull);
      }
      if (threadIdx.x == 0) storage.own[member] = {own.begin, own.end};
    }
    __syncthreads();
    // What the heads say about kAtOnce blocks from j on; -inf where there is nothing to say.
    float some[kMembers][kAtOnce];
    auto read = [&](int32_t j) {
#pragma unroll
      for (int member = 0; member < kMembers; ++member) {
        const int2 seen = member < members ? storage.own[member] : int2{};
        const Interval own = {seen.x, seen.y};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int32_t at = j + i * threads;
          some[member][i] = own.contains(at) ? rows[member * stride + at] : -INFINITY;
        }
      }
    };
    ShareSum sums[kMembers];
    for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kAtOnce * threads) {
      read(j);
#pragma unroll
      for (int member = 0; member < kMembers; ++member) sums[member].add(some[member], scores);
    }
#pragma unroll
    for (int member = 0; member < kMembers; ++member) {
      sums[member].join_lanes();
      if (lane == 0) storage.warps[member][warp] = {sums[member].m, sums[member].l};
    }
    __syncthreads();
    if (warp < members) {
      ShareSum sum;
      if (lane < threads / 32) sum = {storage.warps[warp][lane].x, storage.warps[warp][lane].y};
      sum.join_lanes();
      if (lane == 0) storage.sums[warp] = {sum.m, sum.l > 0.0f ? sum.l : 1.0f};
    }
    __syncthreads();
    for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kAtOnce * threads) {
      read(j);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t at = j + i * threads;
        if (at >= visible.end) break;
        float& best = joined[at - visible.begin];
        float greatest = first == 0 ? 0.0f : best;
#pragma unroll
        for (int member = 0; member < kMembers; ++member) {
          const float value = some[member][i];
          if (value == -INFINITY) continue;
          const float2 sum = storage.sums[member];
          const float share = (scores ? expf(value - sum.x) : value) / sum.y;
          greatest = isnan(greatest) || isnan(share) ? NAN : fmaxf(greatest, share);
        }
        best = greatest;
      }
    }
  }
}

}  // namespace sparse_attn::cuda

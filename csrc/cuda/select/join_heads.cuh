// One estimate for the heads that share a list: the greatest of their normalised shares. Every head
// is read twice, for its sum and for its shares; four heads and four values of each at once, so
// that their latencies overlap. Sums run in one order whatever the values are. A long list keeps
// its multiprocessor busy with nothing else, so values cost few instructions.
#pragma once

#include "../common/log2_units.h"
#include "../common/ptx/math.cuh"
#include "block_rule.cuh"

namespace sparse_attn::cuda {

constexpr int kFewThreads = 128;
constexpr int kMostThreads = 1024;
constexpr int kBlocksOfThread = 8;  // key blocks of a list, about

/// Threads that add up the shares of a list of so many blocks: sums have an order of the list's
/// own, whatever else a call holds.
SPARSE_ATTN_HD constexpr int32_t threads_of_list(int32_t blocks) {
  int32_t threads = kFewThreads;
  while (threads < kMostThreads && int64_t{threads} * kBlocksOfThread < blocks) threads *= 2;
  return threads;
}

constexpr int kMembers = 4;  // heads at once
constexpr int kAtOnce = 4;   // values of a thread and head

/// What a thread, then a warp, then a thread block has added up of a head's shares.
struct ShareSum {
  float m = -INFINITY, l = 0.0f;  // greatest score, sum of exp(score - m); or 0, sum of shares

  /// Values that are no numbers stand apart.
  __device__ void add(const float (&values)[kAtOnce], bool scores) {
    float some[kAtOnce], top = scores ? m : 0.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      some[i] = values[i] > -INFINITY ? values[i] : -INFINITY;
      if (scores) top = fmaxf(top, some[i]);
    }
    if (top == -INFINITY) return;
    if (scores) l *= ptx::exp2_approx((m - top) * kLog2e);
    m = top;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      l += scores ? ptx::exp2_approx((some[i] - top) * kLog2e) : fmaxf(some[i], 0.0f);
    }
  }
  /// The sum over the lanes of a warp.
  __device__ void join_lanes() {
    float top = m;
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    l = top == -INFINITY ? 0.0f : l * ptx::exp2_approx((m - top) * kLog2e);
    for (int step = 16; step > 0; step /= 2) l += __shfl_xor_sync(~0u, l, step);
    m = top;
  }
};

/// Shared memory of it, for thread blocks of up to 32 warps.
struct HeadStorage {
  int2 own[kMembers];  // blocks that the head sees, from and to
  float2 warps[kMembers][32];
  float2 units[kMembers];  // m, and what a share is multiplied by; or its logarithm, and the sum's
  HullStorage hull;
};

/// joined[j] = the greatest share of the list's heads in block visible.begin + j, or of scores its
/// logarithm where `logarithms` are as good; NaN where one is no number. `rows` is the first head's
/// row. All threads call it, threads_of_list(visible.size()) at least; each writes the entries j =
/// threadIdx.x + i blockDim.x.
__device__ inline void join_heads(const SelectParams& params, const BlockRule& rule, bool scores,
                                  bool logarithms, const float* rows, float* joined,
                                  HeadStorage& storage) {
  const int64_t stride = int64_t{params.num_q} * params.num_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Interval visible = rule.visible;
  const int32_t adding = threads_of_list(visible.size()), all = static_cast<int32_t>(blockDim.x);
  const int32_t first_added = threadIdx.x < adding ? visible.begin + threadIdx.x : visible.end;
  logarithms = logarithms && scores;
#pragma unroll 1
  for (int32_t first = 0; first < params.group(); first += kMembers, rows += kMembers * stride) {
    const int32_t members = imin(kMembers, params.group() - first);
    __syncthreads();  // what the storage holds has been read
#pragma unroll 1
    for (int member = 0; member < members; ++member) {
      Interval own = visible;
      if (params.bounds.data != nullptr) {
        own = find_visible(params, rule.batch, rule.head + first + member, 1, rule.query_block,
                           storage.hull);
      }
      if (threadIdx.x == 0) storage.own[member] = {own.begin, own.end};
    }
    __syncthreads();
    // What the heads say about kAtOnce blocks from j on, `threads` apart; -inf for nothing.
    float some[kMembers][kAtOnce];
    auto read = [&](int32_t j, int32_t threads) {
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
#pragma unroll 1
    for (int32_t j = first_added; j < visible.end; j += kAtOnce * adding) {
      read(j, adding);
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
      if (lane < adding / 32) sum = {storage.warps[warp][lane].x, storage.warps[warp][lane].y};
      sum.join_lanes();
      constexpr float kLeastSum = 1e-30f;
      const float l = sum.l > kLeastSum ? sum.l : 1.0f;
      const float m = sum.m > -INFINITY ? sum.m : 0.0f;
      if (lane == 0) storage.units[warp] = {m, logarithms ? -m - logf(l) : 1.0f / l};
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kAtOnce * all) {
      read(j, all);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t at = j + i * all;
        if (at >= visible.end) break;
        float& best = joined[at - visible.begin];
        float greatest = first > 0 ? best : logarithms ? -INFINITY : 0.0f;
        bool unknown = isnan(greatest);
#pragma unroll
        for (int member = 0; member < kMembers; ++member) {
          const float2 unit = storage.units[member];
          float share = some[member][i];
          if (logarithms) {
            share += unit.y;
          } else {
            if (scores) share = ptx::exp2_approx((share - unit.x) * kLog2e);
            share *= unit.y;
          }
          unknown |= member < members && !(share < INFINITY);
          greatest = member < members ? fmaxf(greatest, share) : greatest;
        }
        best = unknown ? NAN : greatest;
      }
    }
  }
}

}  // namespace sparse_attn::cuda

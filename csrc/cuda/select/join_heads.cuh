// One estimate for the heads that share a list: the greatest of their normalised shares. Every head
// is read twice, for its sum and for its shares; four heads and four values of each at once, so
// that their latencies overlap. A long list keeps its multiprocessor busy with nothing else, so
// values cost few instructions, and the thread blocks of a cluster share the list's stretches. A
// warp adds up a stretch, and stretches follow from the list's length alone: so sums do not depend
// on who adds them up.
#pragma once

#include "../common/log2_units.h"
#include "../common/ptx/cluster.cuh"
#include "../common/ptx/math.cuh"
#include "block_rule.cuh"

namespace sparse_attn::cuda {

constexpr int kFewThreads = 128;
constexpr int kMostThreads = 1024;
constexpr int kBlocksOfThread = 8;  // key blocks of a list, about

/// Threads of a thread block for a list of so many blocks.
SPARSE_ATTN_HD constexpr int32_t threads_of_list(int32_t blocks) {
  int32_t threads = kFewThreads;
  while (threads < kMostThreads && int64_t{threads} * kBlocksOfThread < blocks) threads *= 2;
  return threads;
}

constexpr int kMembers = 4;  // heads at once
constexpr int kAtOnce = 4;   // values of a thread and head
constexpr int kMostStretches = 32;

/// How the visible blocks of a list are cut into stretches, and those shared out to the thread
/// blocks of a cluster.
struct Stretches {
  Interval visible;
  int32_t length;   // of one
  Interval of_own;  // the thread block's

  __device__ explicit Stretches(Interval blocks) : visible(blocks) {
    constexpr int32_t kTurn = 32 * kAtOnce;
    length = imax(1, ceil_div(ceil_div(visible.size(), kMostStretches), kTurn)) * kTurn;
    const int32_t count = ceil_div(visible.size(), length);
    const int32_t each = ceil_div(count, static_cast<int32_t>(ptx::cluster_size()));
    const int32_t first = static_cast<int32_t>(ptx::cluster_rank()) * each;
    of_own = {imin(first, count), imin(first + each, count)};
  }
  /// The blocks of some stretches.
  __device__ Interval blocks(Interval stretches) const {
    return intersect(visible, {visible.begin + stretches.begin * length,
                               visible.begin + stretches.end * length});
  }
};

/// What a thread, then a warp, then a thread block has added up of a head's shares.
struct ShareSum {
  float m = -INFINITY, l = 0.0f;  // greatest score, sum of exp(score - m); or 0, sum of shares

  /// NaN takes no part in maximum and sum.
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
  float2 sums[kMembers][kMostStretches];
  float2 units[kMembers];  // m, and what a share is multiplied by; or its logarithm, and the sum's
  HullStorage hull;
};

/// joined[j] = the greatest share of the list's heads in block visible.begin + j, or of scores its
/// logarithm where `logarithms` are as good; NaN where one is no number. `rows` is the first head's
/// row. All threads of a cluster call it; each writes every blockDim.x-th entry of its thread
/// block's stretches.
__device__ inline void join_heads(const SelectParams& params, const BlockRule& rule, bool scores,
                                  bool logarithms, const float* rows, float* joined,
                                  HeadStorage& storage) {
  const int64_t stride = int64_t{params.num_q} * params.num_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto threads = static_cast<int32_t>(blockDim.x);
  const Interval visible = rule.visible;
  const Stretches stretches(visible);
  const Interval part = stretches.blocks(stretches.of_own);
  logarithms = logarithms && scores;
#pragma unroll 1
  for (int32_t first = 0; first < params.problem.group();
       first += kMembers, rows += kMembers * stride) {
    const int32_t members = imin(kMembers, params.problem.group() - first);
    ptx::sync_cluster();  // what the storage holds has been read
#pragma unroll 1
    for (int member = 0; member < members; ++member) {
      Interval own = visible;
      if (!params.rows_grow()) {
        own = find_visible(params, rule.batch, rule.head + first + member, 1, rule.query_block,
                           storage.hull);
      }
      if (threadIdx.x == 0) storage.own[member] = {own.begin, own.end};
    }
    __syncthreads();
    // The heads' values of kAtOnce blocks from j on, `step` apart; -inf where they have none, as
    // from `end` on.
    float some[kMembers][kAtOnce];
    auto read = [&](int32_t j, int32_t step, int32_t end) {
#pragma unroll
      for (int member = 0; member < kMembers; ++member) {
        const int2 seen = member < members ? storage.own[member] : int2{};
        const Interval own = {seen.x, imin(seen.y, end)};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int32_t at = j + i * step;
          some[member][i] = own.contains(at) ? rows[member * stride + at] : -INFINITY;
        }
      }
    };
    const Interval of_own = stretches.of_own;
#pragma unroll 1
    for (int32_t at = of_own.begin + warp; at < of_own.end; at += threads / 32) {
      const Interval blocks = stretches.blocks({at, at + 1});
      ShareSum sums[kMembers];
#pragma unroll 1
      for (int32_t j = blocks.begin + lane; j < blocks.end; j += kAtOnce * 32) {
        read(j, 32, blocks.end);
#pragma unroll
        for (int member = 0; member < kMembers; ++member) sums[member].add(some[member], scores);
      }
#pragma unroll
      for (int member = 0; member < kMembers; ++member) {
        sums[member].join_lanes();
        if (lane < static_cast<int>(ptx::cluster_size())) {
          *ptx::at_rank(&storage.sums[member][at], lane) = {sums[member].m, sums[member].l};
        }
      }
    }
    ptx::sync_cluster();
    if (warp < members) {
      ShareSum sum;
      if (stretches.blocks({lane, lane + 1}).size() > 0) {
        sum = {storage.sums[warp][lane].x, storage.sums[warp][lane].y};
      }
      sum.join_lanes();
      constexpr float kLeastSum = 1e-30f;
      const float l = sum.l > kLeastSum ? sum.l : 1.0f;
      const float m = sum.m > -INFINITY ? sum.m : 0.0f;
      if (lane == 0) storage.units[warp] = {m, logarithms ? -m - logf(l) : 1.0f / l};
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t j = part.begin + threadIdx.x; j < part.end; j += kAtOnce * threads) {
      read(j, threads, part.end);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t at = j + i * threads;
        if (at >= part.end) break;
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

// What the thread blocks of choose_step.cu work out together: the sums of the heads that share a
// list, and the bin of a histogram of keys where the list ends. A cluster shares a list; each of
// its warps has 128 consecutive blocks in registers.
#pragma once

#include "../common/log2_units.h"
#include "../common/ptx/cluster.cuh"
#include "../common/ptx/math.cuh"
#include "../common/radix_select.cuh"

namespace sparse_attn::cuda::step {

constexpr int kOfLane = 4;                     // blocks of a lane, 32 apart
constexpr int kOfWarp = 32 * kOfLane;          // consecutive ones of a warp
constexpr int kMostMembers = 8;                // heads of a list
constexpr int kFewWarps = 8, kMostWarps = 16;  // of a thread block
constexpr int kMostCluster = 8;
constexpr int kMostOfList = kMostWarps * kMostCluster;  // warps
constexpr int kBinBits = 10, kBins = 1 << kBinBits;
constexpr int kBinsOfThread = kBins / (32 * kFewWarps);
constexpr int kFirstBits = 24;  // of the keys that the first histogram tells apart
static_assert(kBinsOfThread == 4, "a thread reads its bins at once");

/// Shared memory of a thread block. What other thread blocks write or read stands first.
struct StepStorage {
  float2 sums[kMostMembers][kMostOfList];  // m and l of each warp of the list
  uint32_t histogram[kBins];
  uint32_t forced;
  uint32_t above[kMostCluster], equal[kMostCluster];  // keys over the window, and in it
  uint32_t listed[32];  // those in it, an equal part for each thread block; 0 where there is none
  uint32_t num_listed;
  uint32_t sums_of_bins[kFewWarps];
  uint32_t bin, wanted, count, most;  // and the most keys of a thread block in the bin
  uint2 kept_of_warp[kMostWarps];     // above the cut, equal to it
};

/// Keys least .. greatest, of which the list ends with the `wanted`-th highest.
struct Window {
  uint32_t least, greatest, wanted;
};

__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
template <typename Number>
__device__ __forceinline__ Number warp_sum(Number x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/// What each head's scores are added to for the logarithms of its shares; all warps of the cluster
/// call it with the scores of their blocks, -inf where there is none.
template <int MEMBERS>
__device__ __forceinline__ void find_units(const float (&values)[MEMBERS][kOfLane],
                                           int32_t list_warps, int32_t list_warp,
                                           float (&units)[MEMBERS], float& highest,
                                           StepStorage& storage) {
  const int lane = threadIdx.x % 32;
  const auto blocks = static_cast<int>(ptx::cluster_size());
  float m[MEMBERS], l[MEMBERS];
#pragma unroll
  for (int member = 0; member < MEMBERS; ++member) {
    m[member] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) m[member] = fmaxf(m[member], values[member][i]);
    const float from = m[member] == -INFINITY ? 0.0f : m[member];
    l[member] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      // NaN takes no part in the sum.
      const float value = values[member][i] > -INFINITY ? values[member][i] : -INFINITY;
      l[member] += ptx::exp2_approx((value - from) * kLog2e);
    }
    const float own = m[member];
    m[member] = warp_max(own);
    l[member] *= m[member] == -INFINITY ? 0.0f : ptx::exp2_approx((own - m[member]) * kLog2e);
    l[member] = warp_sum(l[member]);
  }
#pragma unroll
  for (int member = 0; member < MEMBERS; ++member) {
    if (lane < blocks) {
      *ptx::at_rank(&storage.sums[member][list_warp], lane) = {m[member], l[member]};
    }
  }
  ptx::sync_cluster();
  constexpr int kParts = kMostOfList / 32;
  float2 parts[MEMBERS][kParts];
#pragma unroll
  for (int i = 0; i < MEMBERS * kParts; ++i) {
    const int32_t at = lane + i % kParts * 32;
    parts[i / kParts][i % kParts] =
        at < list_warps ? storage.sums[i / kParts][at] : float2{-INFINITY, 0.0f};
  }
  highest = -INFINITY;
#pragma unroll
  for (int member = 0; member < MEMBERS; ++member) {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kParts; ++i) top = fmaxf(top, parts[member][i].x);
    top = warp_max(top);
    if (top == -INFINITY) top = 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      sum = fmaf(parts[member][i].y, ptx::exp2_approx((parts[member][i].x - top) * kLog2e), sum);
    }
    sum = warp_sum(sum);
    units[member] = -top - (sum > 0.0f ? logf(sum) : 0.0f);
    highest = fmaxf(highest, top + units[member]);
  }
}

/// Adds up the cluster's histograms, and finds the bin that holds the window's last key: how many
/// of its keys are wanted, and how many it has; none where the window has fewer than it wants.
/// The thread block calls it.
__device__ __forceinline__ void find_bin(uint32_t wanted, StepStorage& storage) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t bins[kBinsOfThread] = {}, most[kBinsOfThread] = {};
  uint32_t own = 0, sum = 0;
  if (warp < kFewWarps) {
    const auto blocks = static_cast<int>(ptx::cluster_size());
    const uint32_t* from = storage.histogram + threadIdx.x * kBinsOfThread;
#pragma unroll
    for (int rank = 0; rank < kMostCluster; ++rank) {
      if (rank >= blocks) break;
      const uint4 part = *reinterpret_cast<const uint4*>(ptx::at_rank(from, rank));
      const uint32_t counts[kBinsOfThread] = {part.x, part.y, part.z, part.w};
#pragma unroll
      for (int i = 0; i < kBinsOfThread; ++i) {
        bins[i] += counts[i];
        most[i] = umax(most[i], counts[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) own += bins[i];
    sum = warp_prefix_sum(own);
    if (lane == 31) storage.sums_of_bins[warp] = sum;
  }
  if (threadIdx.x == 0) storage.count = 0;
  __syncthreads();
  if (warp < kFewWarps) {
    uint32_t above = sum - own;
#pragma unroll
    for (int other = 0; other < kFewWarps; ++other) {
      above += other < warp ? storage.sums_of_bins[other] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) {
      if (above < wanted && wanted <= above + bins[i]) {
        storage.bin = threadIdx.x * kBinsOfThread + i;
        storage.wanted = wanted - above;
        storage.count = bins[i];
        storage.most = most[i];
      }
      above += bins[i];
    }
    if (threadIdx.x == 32 * kFewWarps - 1 && above < wanted) storage.wanted = wanted - above;
  }
  __syncthreads();
}

}  // namespace sparse_attn::cuda::step

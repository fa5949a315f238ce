// The kernel of sequences whose keys a thread block holds whole: a warp takes 16 rows of a query
// head, so a softmax has one pass, and there are two barriers, where the keys have come and where
// the values have. What hides the time of loads is the number of thread blocks that a
// multiprocessor holds. Sums are taken in the order of hopper's kernels, whose softmax it is, so
// that a sequence has the same bits among longer ones that hopper takes.
#pragma once

#include "../common/plain_scores.h"
#include "../common/ptx/grid.cuh"
#include "../common/ptx/ldmatrix.cuh"
#include "../common/ptx/mma.cuh"
#include "../common/quad.cuh"
#include "../hopper/softmax.cuh"
#include "load.cuh"
#include "scores.cuh"

namespace sparse_attn::cuda::small {

/// Fragment `i` of a lane's scores, of 8 keys.
template <int kCount>
__device__ __forceinline__ float (&fragment(float (&s)[kCount], int i))[4] {
  return reinterpret_cast<float (&)[4]>(s[4 * i]);
}

/// S = Q K^T of the keys before `end`; of others S is 0.
template <typename Config>
__device__ __forceinline__ void multiply_keys(typename Config::ScoreFragment& s, uint32_t sQ,
                                              uint32_t sK, int32_t end) {
  constexpr int kPitch = Config::kPitch;
  const int lane = lane_of_warp();
  uint32_t rQ[Config::kSteps][4];
#pragma unroll
  for (int step = 0; step < Config::kSteps; ++step) {
    ptx::ldmatrix_x4(rQ[step], sQ + place<kPitch>(lane % 16, 2 * step + lane / 16));
  }
#pragma unroll
  for (float& score : s) score = 0.0f;
  const int key = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int first = 0; first < Config::KEYS; first += kLoadedKeys) {
    if (first >= end) break;
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
#pragma unroll
      for (int j = first; j < first + kLoadedKeys; j += 16) {
        uint32_t rK[4];
        ptx::ldmatrix_x4(rK, sK + place<kPitch>(j + key, 2 * step + lane / 8 % 2));
        ptx::mma_16x8x16<typename Config::T>(fragment(s, j / 8), rQ[step], rK[0], rK[1]);
        ptx::mma_16x8x16<typename Config::T>(fragment(s, j / 8 + 1), rQ[step], rK[2], rK[3]);
      }
    }
  }
}

/// O = P V of the keys before `end`.
template <typename Config>
__device__ __forceinline__ void multiply_values(float (&rO)[Config::DT][4],
                                                const typename Config::ScoreFragment& s,
                                                uint32_t sV, int32_t end) {
  using T = typename Config::T;
  const int lane = lane_of_warp();
#pragma unroll
  for (int dt = 0; dt < Config::DT; ++dt) {
#pragma unroll
    for (int e = 0; e < 4; ++e) rO[dt][e] = 0.0f;
  }
#pragma unroll
  for (int slice = 0; slice < Config::kSlices; ++slice) {
    if (slice * 16 % kLoadedKeys == 0 && slice * 16 >= end) break;
    uint32_t rP[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) rP[r] = pack<T>(s[8 * slice + 2 * r], s[8 * slice + 2 * r + 1]);
#pragma unroll
    for (int pair = 0; pair < Config::DT / 2; ++pair) {
      uint32_t rV[4];
      ptx::ldmatrix_x4_trans(
          rV, sV + place<Config::kPitch>(slice * 16 + lane % 16, 2 * pair + lane / 16));
      ptx::mma_16x8x16<T>(rO[2 * pair], rP, rV[0], rV[1]);
      ptx::mma_16x8x16<T>(rO[2 * pair + 1], rP, rV[2], rV[3]);
    }
  }
}

/// Makes weights of the products q.k of the tile's rows, whose sums divide them in the end. Returns
/// what makes exponents of 2 of the maxima.
template <typename Config, bool kPlain>
__device__ __forceinline__ float weigh_keys(typename Config::ScoreFragment& s,
                                            hopper::SoftmaxState& rows,
                                            const AttentionParams& params, const Work& work,
                                            const uint32_t (&seen)[2]) {
  if (__any_sync(~0u, (seen[0] & seen[1]) != Config::kAllSeen)) {
    for_each_score(
        s, [&](float& score, int h, int k) { score = seen[h] & (1u << k) ? score : -INFINITY; });
  }
  float scale_log2 = kLog2e;
  if (kPlain || has_plain_scores(params)) {
    scale_log2 *= params.scores.scale;
    hopper::update_maxima<true, true>(s, rows, scale_log2);
  } else {
    transform_scores<Config>(s, params, work);
    hopper::take_maxima_off<true>(s, rows, scale_log2);
  }
  hopper::exponentiate<0>(s, rows, hopper::PlainScores{scale_log2});
  hopper::exponentiate<1>(s, rows, hopper::PlainScores{scale_log2});
  return scale_log2;
}

/// Stores the tile's rows by way of the warp's rows of shared memory, in whole chunks.
template <typename Config>
__device__ __forceinline__ void store_rows(const float (&rO)[Config::DT][4],
                                           const float (&weight)[2], const AttentionParams& params,
                                           const Work& work, char* sO) {
  using T = typename Config::T;
  const int lane = lane_of_warp();
  __syncwarp();  // the queries that lay there have been read
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int dt = 0; dt < Config::DT; ++dt) {
      char* chunk = sO + place<Config::kPitch>(lane_row(h), dt);
      reinterpret_cast<uint32_t*>(chunk)[lane % 4] =
          pack<T>(weight[h] * rO[dt][2 * h], weight[h] * rO[dt][2 * h + 1]);
    }
  }
  __syncwarp();
  const TensorView& out = params.outputs.out;
  const int chunk = lane % Config::kChunks;
  if (chunk * Config::kElements >= params.problem.value_dim) return;
  T* to = static_cast<T*>(out.data) + work.batch * out.stride_b + work.head * out.stride_h +
          (int64_t{work.sequence.first_row} + work.first) * out.stride_s +
          chunk * Config::kElements;
#pragma unroll
  for (int r = lane / Config::kChunks; r < kTileRows; r += 32 / Config::kChunks) {
    if (!work.has(r)) break;
    *reinterpret_cast<uint4*>(to + r * out.stride_s) =
        *reinterpret_cast<const uint4*>(sO + place<Config::kPitch>(r, chunk));
  }
}

/// The keys of a unit that exist: inside the bounds of some row of the thread block's.
template <typename Config>
__device__ __forceinline__ Interval existing_keys(const AttentionParams& params, const Work& work,
                                                  Interval (&of_units)[kMostWarps]) {
  Interval keys = {0, work.keys};
  if (params.scores.bounds.data == nullptr) return keys;
  if (threadIdx.x < kMostWarps) of_units[threadIdx.x] = {Config::KEYS, 0};
  __syncthreads();
  const int r = lane_of_warp();
  if (work.has(r)) {
    const Interval own = params.scores.bounds.row(work.batch, work.head, work.query(r), work.keys);
    if (!own.empty()) {
      atomicMin(&of_units[work.slot].begin, own.begin);
      atomicMax(&of_units[work.slot].end, own.end);
    }
  }
  __syncthreads();
  return intersect(keys, of_units[work.slot]);
}

/// kPlain: scores are only scaled, and each row sees an interval of the keys. Without the code of
/// other calls, which is most of the code, a kernel is soon in the instruction caches.
template <typename Config, bool kPlain>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    small_kernel(const __grid_constant__ AttentionParams params,
                 const __grid_constant__ Grid grid) {
  constexpr int kPitch = Config::kPitch;
  extern __shared__ __align__(128) char smem[];
  __shared__ Interval of_units[kMostWarps];
  ptx::wait_for_primary();
  ptx::launch_dependents();
  const Work work = find_work(params, grid);
  const uint32_t shared = ptx::shared_address(smem);
  const int32_t key_bytes = grid.key_bytes(kPitch);
  const uint32_t sK = shared + work.slot * 2 * key_bytes, sV = sK + key_bytes;
  const int32_t own = grid.at_once * 2 * key_bytes + warp_of_block() * kTileRows * kPitch;
  const Interval exist = existing_keys<Config>(params, work, of_units);
  const KeyLoader<Config> loader(grid, work, exist);
  loader.load(params.keys.key, params.problem.head_dim, sK);
  load_queries<Config>(shared + own, params, work);
  ptx::cp_async_commit();
  loader.load(params.keys.value, params.problem.value_dim, sV);
  ptx::cp_async_commit();
  uint32_t seen[2];
  if (sees_all(params)) {
    seen[0] = seen[1] = column_bits<Config::KEYS>({0, work.keys});
  } else {
    seen[0] = seen_bits<Config, kPlain>(params, work, lane_row(0));
    seen[1] = seen_bits<Config, kPlain>(params, work, lane_row(1));
  }
  ptx::cp_async_wait<1>();
  __syncthreads();

  typename Config::ScoreFragment weights;
  hopper::SoftmaxState rows;
  float scale_log2 = 1.0f;
  if (work.rows > 0) {
    multiply_keys<Config>(weights, shared + own, sK, work.keys);
    scale_log2 = weigh_keys<Config, kPlain>(weights, rows, params, work, seen);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (work.rows == 0) return;
  float rO[Config::DT][4];
  multiply_values<Config>(rO, weights, sV, work.keys);

  const Outputs& outputs = params.outputs;
  float weight[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float m = hopper::log2_of_maximum<true>(rows.m[h], scale_log2);
    const float l = quad_sum(rows.l[h]);
    weight[h] = hopper::inverse_of(m, l, params.scores.sink_logits, work.head);
    if (outputs.lse != nullptr && threadIdx.x % 4 == 0 && work.has(lane_row(h))) {
      const int64_t i = int64_t{work.sequence.first_row} + work.query(lane_row(h));
      outputs.lse[work.batch * outputs.lse_stride_b + work.head * outputs.lse_stride_h +
                  i * outputs.lse_stride_s] = hopper::log_sum(m, l);
    }
  }
  store_rows<Config>(rO, weight, params, work, smem + own);
}

}  // namespace sparse_attn::cuda::small

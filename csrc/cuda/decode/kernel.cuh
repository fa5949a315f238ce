// The split kernel (Dao et al. 2023, Flash-Decoding): warps share out the chunks of a row tile, and
// each runs the online softmax over the keys of a chunk alone, from a ring of its own that cp.async
// fills ahead. No warp waits for another; a chunk's result goes to the workspace.
#pragma once

#include "../common/state.cuh"
#include "partial.cuh"
#include "scores.cuh"

namespace sparse_attn::cuda::decode {

/// A warp's walk over its share of the keys, and their way into its ring.
template <typename Config, bool kStrided>
struct KeyLoader {
  using T = typename Config::T;

  const AttentionParams& params;
  const Pattern& pattern;
  const TileState<Config>& state;
  Step* steps;  // of the ring's slots
  uint32_t ring;
  RowLoader<Config> rows;
  Walk walk;
  const T* key_head;
  const T* value_head;

  __device__ __forceinline__ static uint32_t keys(uint32_t ring, int slot) {
    return ring + slot * 2 * Config::kTileBytes;
  }
  __device__ __forceinline__ static uint32_t values(uint32_t ring, int slot) {
    return keys(ring, slot) + Config::kTileBytes;
  }

  /// Loads the next step, if there is one, and closes the group of its copies.
  __device__ __forceinline__ void load_next(int slot) {
    Step step = walk.next();
    if (threadIdx.x % 32 == 0) steps[slot] = step;
    if (step.chunk < walk.end_chunk) {
      const View view = step.lead ? pattern.lead : state.work.slice.keys;
      Interval valid =
          step.lead && !pattern.shared_axis() ? state.walk.lead_loaded : state.walk.keys_loaded;
      valid = {valid.begin - step.start, valid.end - step.start};
      int64_t first = kStrided ? view.at(step.start) : step.start;
      int64_t stride = kStrided ? view.step : 1;
      rows.load(keys(ring, slot), key_head + first * params.key.stride_s,
                stride * params.key.stride_s, valid);
      rows.load(values(ring, slot), value_head + first * params.value.stride_s,
                stride * params.value.stride_s, valid);
    }
    ptx::cp_async_commit();
  }
};

/// Index of the row among [B, Hq, Sq].
__device__ __forceinline__ int64_t row_index(const AttentionParams& params, const Work& work,
                                             const TileRow& row) {
  return (int64_t{work.batch} * params.heads_q + row.head) * params.seq_q + row.query;
}

template <typename T>
__device__ __forceinline__ const T* head_of(const TensorView& tensor, const Work& work) {
  return static_cast<const T*>(tensor.data) + work.batch * tensor.stride_b +
         work.key_head * tensor.stride_h;
}

template <typename Config>
__device__ __forceinline__ void load_queries(const AttentionParams& params,
                                             const TileState<Config>& state,
                                             const RowLoader<Config>& rows, uint32_t to) {
  using T = typename Config::T;
  const TensorView& query = params.query;
  rows.load_each(to, [&](int r) -> const T* {
    if (r >= state.work.rows) return nullptr;
    return static_cast<const T*>(query.data) + state.work.batch * query.stride_b +
           state.rows[r].head * query.stride_h + state.rows[r].query * query.stride_s;
  });
}

/// What a warp has summed up over a chunk so far.
template <typename Config>
struct ChunkSum {
  SoftmaxState<1, false> softmax;
  typename Config::Output rO;

  __device__ __forceinline__ void init() {
    softmax.init();
#pragma unroll
    for (int i = 0; i < 4 * Config::DT; ++i) rO[0][i / 4][i % 4] = 0.0f;
  }

  __device__ __forceinline__ void rescale(const float (&factor)[1][2]) {
    // Once the maxima have settled there is nothing to do; a factor of 1 changes no bit.
    if (!__any_sync(~0u, factor[0][0] != 1.0f || factor[0][1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 4 * Config::DT; ++i) rO[0][i / 4][i % 4] *= factor[0][i % 4 / 2];
  }

  __device__ __forceinline__ void store(const AttentionParams& params,
                                        const TileState<Config>& state, const Partials& partials,
                                        int32_t chunk) {
    softmax.finish();
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int r = lane_row(h);
      if (r >= state.work.rows) continue;
      int64_t at = partials.at(row_index(params, state.work, state.rows[r]), chunk);
      if (lane % 4 == 0) partials.state[at] = {softmax.m[0][h], softmax.l[0][h]};
      float* out = partials.out + at * partials.head_dim + lane % 4 * 2;
#pragma unroll
      for (int dt = 0; dt < Config::DT; ++dt) {
        if (dt * 8 >= partials.head_dim) break;
        *reinterpret_cast<float2*>(out + dt * 8) = {rO[0][dt][2 * h], rO[0][dt][2 * h + 1]};
      }
    }
  }
};

template <typename Config, bool kStrided>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    split_kernel(const __grid_constant__ AttentionParams params,
                 const __grid_constant__ GridPlan grid, const Partials partials, bool aligned) {
  constexpr int kStages = Config::kStages;
  using State = TileState<Config>;
  using Loader = KeyLoader<Config, kStrided>;
  extern __shared__ __align__(128) char smem[];
  __shared__ __align__(alignof(State)) char state_memory[sizeof(State)];
  State& state = *reinterpret_cast<State*>(state_memory);
  const Pattern pattern = pattern_of<kStrided>(params);
  if (threadIdx.x < 32) prepare_tile(params, pattern, grid, state);
  __syncthreads();
  const Work& work = state.work;
  if (work.split == 0 && static_cast<int>(threadIdx.x) < work.rows) {
    partials.chunks[row_index(params, work, state.rows[threadIdx.x])] = state.walk.chunks;
  }

  const int warp = threadIdx.x / 32;
  const uint32_t share = work.split * Config::kWarps + warp;
  const uint32_t shares = grid.splits * Config::kWarps;
  const int32_t end = work.rows <= 0 ? 0 : (share + 1) * state.walk.chunks / shares;
  int32_t chunk = work.rows <= 0 ? 0 : share * state.walk.chunks / shares;
  if (chunk == end) return;

  const uint32_t ring = ptx::shared_address(smem) + warp * Config::kRingBytes;
  const RowLoader<Config> rows = {params.head_dim, aligned};
  load_queries(params, state, rows, ring);
  __syncwarp();
  typename Config::Products products;
  products.start(ring);
  Loader loader = {params,
                   pattern,
                   state,
                   state.steps[warp],
                   ring,
                   rows,
                   {pattern, state.walk, grid.chunk_steps, chunk, end},
                   head_of<typename Config::T>(params.key, work),
                   head_of<typename Config::T>(params.value, work)};

  const bool transformed = !scale_suffices(params);
  const float scale = transformed ? kLog2e : params.scale * kLog2e;
  ChunkSum<Config> sum;
  sum.init();
  int slot = 0;
  int load_slot = 0;
#pragma unroll 1
  for (int loaded = 1;; ++loaded) {
    __syncwarp();  // what lies in the slot has been read
    loader.load_next(load_slot);
    load_slot = load_slot + 1 == kStages ? 0 : load_slot + 1;
    if (loaded < kStages) continue;

    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();  // the oldest step has landed
    const Step step = state.steps[warp][slot];
#pragma unroll 1
    for (; chunk < step.chunk; ++chunk) {
      sum.store(params, state, partials, chunk);
      sum.init();
    }
    if (chunk == end) break;

    typename Config::Scores rS;
    products.scores(rS, Loader::keys(ring, slot));
    if (step.masked) mask_scores<Config>(rS, pattern, state, step);
    if (transformed) transform_scores<Config>(rS, params, pattern, state, step);
    float rescale[1][2];
    sum.softmax.update(rS, scale, rescale);
    typename Config::Products::Slice rP[1];
    products.round(rP[0], rS, 0);
    sum.rescale(rescale);
    products.output(sum.rO, rP, Loader::values(ring, slot), [](int) {});
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  ptx::cp_async_wait<0>();
}

}  // namespace sparse_attn::cuda::decode

// The split kernel (Dao et al. 2023, Flash-Decoding): thread blocks share out the chunks of a row
// tile. A chunk's steps go to the warps in turn; each runs the online softmax over its own, from a
// ring of its own that cp.async fills ahead, and no warp waits for another before the chunk's end.
// There the warps add up, in their order. The chunk's result goes to the workspace, or is kept for
// the next chunk where all of a group are this thread block's, and their sum goes there, or to the
// output where it is all of the row. The thread blocks of a row tile merge their chunks if they are
// one cluster; else a kernel after this one does. Both are launched as dependents.
#pragma once

#include "../common/merge_row.cuh"
#include "../common/plain_scores.h"
#include "../common/ptx/cluster.cuh"
#include "../common/ptx/grid.cuh"
#include "chunk_sum.cuh"
#include "key_ring.cuh"
#include "scores.cuh"

namespace sparse_attn::cuda::decode {

/// Loads the queries of a fragment of rows; a warp calls it.
template <typename Config>
__device__ __forceinline__ void load_queries(const AttentionParams& params,
                                             const TileState<Config>& state,
                                             const RowLoader<Config>& loader, int mt, uint32_t to) {
  const QueryRows<Config> queries(params, state, mt);
  loader.load_each(to, {0, queries.count}, queries);
}

/// Loads the tile's queries and closes the group of their copies; returns where they lie. Those for
/// registers pass through the slot of the ring that is filled last.
template <typename Config, Kind kKind>
__device__ __forceinline__ uint32_t load_tile_queries(const AttentionParams& params,
                                                      const TileState<Config>& state,
                                                      const RowLoader<Config>& loader,
                                                      uint32_t ring, const char* smem) {
  const int warp = threadIdx.x / 32;
  uint32_t queries = KeyLoader<Config, kKind>::keys(ring, Config::kStages - 1);
  if constexpr (Config::kQueryRegisters) {
    load_queries(params, state, loader, 0, queries);
  } else {
    constexpr uint32_t kFragmentBytes = kFragmentRows * Config::kPitch;
    queries = ptx::shared_address(smem) + Config::kWarps * Config::kRingBytes;
    if (warp < Config::MT)
      load_queries(params, state, loader, warp, queries + warp * kFragmentBytes);
  }
  ptx::cp_async_commit();
  return queries;
}

/// Waits for the tile's queries, after which come the first keys.
template <typename Config>
__device__ __forceinline__ void start_products(const AttentionParams& params, uint32_t queries,
                                               typename Config::Products& products) {
  ptx::cp_async_wait<Config::kStages - 1>();
  if constexpr (Config::kQueryRegisters || Config::kFloat8) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  if constexpr (Config::kFloat8) {
    products.start(queries, params.problem.dtype == Dtype::kFloat16);
  } else {
    products.start(queries);
  }
}

/// Hides the scores of a step that rows do not see, and transforms the others.
template <typename Config, Kind kKind>
__device__ __forceinline__ void finish_scores(const AttentionParams& params, const Pattern& pattern,
                                              const TileState<Config>& state, const Step& step,
                                              bool transformed,
                                              typename Config::ScoreFragment& scores) {
  if (step.masked) {
    if (pattern.has_lead()) {
      mask_scores<Config>(scores, pattern, state, step);
    } else {
      mask_by_window<Config>(scores, state, step);
    }
  }
  if constexpr (!is_lean(kKind)) {
    if (pattern.list.has_bits() && step.bits >= 0) {
      mask_by_bits<Config>(scores, pattern.list, state, step);
    }
    if (transformed) transform_scores<Config>(scores, params, state, step);
  }
}

/// Adds the oldest steps of the ring, from `slot` on, to the sum: one or, where they are of one
/// turn, as many as may be at once, which is returned.
template <typename Config, Kind kKind>
__device__ __forceinline__ bool add_steps(const KeyLoader<Config, kKind>& loader, int slot,
                                          const Exponent& exponent, bool transformed,
                                          typename Config::Products& products,
                                          ChunkSum<Config>& sum) {
  using Loader = KeyLoader<Config, kKind>;
  constexpr int kAtOnce = Config::kAtOnce;
  bool both = false;
  Step visited[kAtOnce];
  uint32_t key_slots[kAtOnce], value_slots[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int own = i == 0 ? slot : Loader::after(slot);
    visited[i] = loader.steps.at(i, own);
    if (i > 0) both = visited[i].chunk == visited[0].chunk && visited[i].turn == visited[0].turn;
    const int from = i == 0 || both ? own : slot;
    key_slots[i] = Loader::keys(loader.ring, from);
    value_slots[i] = Loader::values(loader.ring, from);
  }
  typename Config::ScoreFragment rS[kAtOnce];
  if constexpr (Config::kFloat8) {
    products.scores(rS, key_slots);
  } else {
    static_assert(kAtOnce == 1);
    products.scores(rS[0], key_slots[0]);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (i > 0 && !both) {
      Config::leave_out(rS[i]);
    } else {
      finish_scores<Config, kKind>(loader.params, loader.pattern, loader.state, visited[i],
                                   transformed, rS[i]);
    }
  }
  typename Config::Products::Values values[kAtOnce];
  if constexpr (Config::kValuesAhead) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) values[i] = Config::Products::values_at(value_slots[i]);
  }
  sum.update(rS, exponent);
  typename Config::Products::Probabilities rP[kAtOnce][1];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) products.round(rP[i][0], rS[i], 0);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if constexpr (!Config::kValuesAhead) values[i] = Config::Products::values_at(value_slots[i]);
    products.output(sum.rO, rP[i], values[i], [](int) {});
  }
  return both;
}

/// Sums up the thread block's chunks, or the one that is the `whole` row; the thread block calls
/// it. Where `early`, it waits for the kernel in front before it reads anything.
template <typename Config, Kind kKind>
__device__ __forceinline__ void sum_chunks(const AttentionParams& params, const Pattern& pattern,
                                           TileState<Config>& state, const PartialRows& partials,
                                           bool whole, bool aligned, bool early, char* smem) {
  using Loader = KeyLoader<Config, kKind>;
  constexpr int kStages = Config::kStages;
  constexpr bool kLean = is_lean(kKind);
  const Work& work = state.work;
  const Groups& groups = state.groups;
  const int warp = threadIdx.x / 32;
  const uint32_t ring = ring_of_warp<Config, kKind>(smem);
  const int32_t key_columns = params.problem.head_dim;
  const int32_t value_columns = params.problem.value_dim;
  const bool copied = kLean || aligned;
  const RowLoader<Config> query_rows = {key_columns, copied};
  typename Config::Products products;
  Walk walk = {pattern,    state.walk, work.chunk_steps, groups.begin,
               groups.end, warp,       Config::kWarps};
  walk.at_once = Config::kAtOnce;
  Loader loader = {params,
                   pattern,
                   state,
                   ring,
                   Loader::slot_loader(key_columns, copied),
                   Loader::slot_loader(value_columns, copied),
                   walk,
                   state.key_head,
                   state.value_head,
                   state.walk.keys_loaded,
                   RingSteps<Config>(state.steps[warp])};

  const bool transformed = !kLean && !has_plain_scores(params);
  const float scale = params.score_scale(work.batch, work.first_head);
  const Exponent exponent = {transformed ? kLog2e : scale * kLog2e, transformed};
  ChunkSum<Config> sum;
  sum.init();
  int32_t chunk = groups.begin;
  const int32_t end = groups.end;
  int slot = 0;
  int load_slot = 0;
  bool both = false;  // two steps were multiplied, whose slots are free
  if (early) ptx::wait_for_primary();
  ptx::launch_dependents();
  const uint32_t queries = load_tile_queries<Config, kKind>(params, state, query_rows, ring, smem);
#pragma unroll 1
  for (int loaded = 1;; ++loaded) {
    __syncwarp();  // what lies in the slot to fill has been read
    if (loaded >= kStages) {
      const int32_t next_chunk = loader.steps.next_chunk(both, slot);
      const int32_t staging = Loader::keys(warp * Config::kRingBytes, load_slot);
#pragma unroll 1
      for (; chunk < next_chunk; ++chunk) {
        store_chunk(sum, exponent, params, state, partials, whole, groups.of(chunk), smem, staging);
      }
      if (chunk == end) break;
    }
    loader.load_next(load_slot);
    load_slot = Loader::after(load_slot);
    if (Config::kAtOnce > 1 && both) {
      loader.load_next(load_slot);
      load_slot = Loader::after(load_slot);
    }
    if (loaded < kStages) {
      if (loaded < kStages - 1) continue;
      start_products<Config>(params, queries, products);
      continue;
    }

    ptx::cp_async_wait<kStages - Config::kAtOnce>();
    __syncwarp();  // the oldest steps have landed
    both = add_steps(loader, slot, exponent, transformed, products, sum);
    slot = Loader::after(slot);
    if (Config::kAtOnce > 1 && both) slot = Loader::after(slot);
  }
  ptx::cp_async_wait<0>();
}

/// Merges the rows of the tile, whose chunks the thread blocks of the cluster have stored.
template <typename Config, int kColumns, bool kGaps>
__device__ __forceinline__ void merge_tile(const AttentionParams& params,
                                           const TileState<Config>& state,
                                           const PartialRows& partials, RowChunks places) {
  const Work& work = state.work;
  const int32_t threads = threads_of_row<kColumns>(params);
  const int32_t rows_at_once = Config::kThreads / threads;
  const int32_t of_block = static_cast<int32_t>(threadIdx.x) / threads;
  if (of_block >= rows_at_once) return;
  const auto blocks = static_cast<int32_t>(ptx::cluster_size());
  const auto rank = static_cast<int32_t>(ptx::cluster_rank());
#pragma unroll 1
  for (int r = of_block * blocks + rank; r < work.rows; r += rows_at_once * blocks) {
    const TileRow& row = state.rows[r];
    merge_row<typename Config::T, kColumns, kGaps, false>(
        params, partials, work.sequence,
        {work.batch, row.head, row.query, row_index(params, work, row), places},
        static_cast<int32_t>(threadIdx.x) % threads);
  }
}

template <typename Config, Kind kKind>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    split_kernel(const __grid_constant__ AttentionParams params,
                 const __grid_constant__ SplitGrid grid, const PartialRows partials, bool aligned) {
  using State = TileState<Config>;
  static_assert(Config::kSmemBytes + sizeof(State) <= kSmemLimit, "fits every device it serves");
  extern __shared__ __align__(128) char smem[];
  __shared__ __align__(alignof(State)) char state_memory[sizeof(State)];
  State& state = state_in<State>(state_memory);
  const Pattern pattern = pattern_of<kKind>(params);
  // What the host knows is prepared before the kernel in front has ended.
  const bool early = grid.early;
  if (!early) ptx::wait_for_primary();
  const Work& work = state.work;
  const Groups& groups = state.groups;
  const bool whole = grid.merging == Merging::kNone;
  if (threadIdx.x < 32) prepare_tile<Config, kKind>(params, pattern, grid, state);
  if (threadIdx.x == 0) {
    const bool kept =
        ptx::kHasClusters && (whole || partials.gaps) && work.rows <= Config::kKeptRows;
    const int32_t text_chunks = ceil_div(work.sequence.keys, work.chunk_steps * kStepKeys);
    const int32_t visited = work.rows <= 0 ? 0 : imax(state.walk.chunks, whole);
    state.groups = share_groups(grid, work.split, work.splits, text_chunks, state.walk.main.begin,
                                visited, kept);
  }
  __syncthreads();
  if (groups.begin < groups.end) {
    sum_chunks<Config, kKind>(params, pattern, state, partials, whole, aligned, early, smem);
  } else if (early) {
    ptx::wait_for_primary();
  }
  if (!whole && work.split == 0 && static_cast<int>(threadIdx.x) < work.rows) {
    const int64_t row = row_index(params, work, state.rows[threadIdx.x]);
    partials.chunks[row] = groups.places();
    const int32_t empty = groups.shared ? 0 : groups.before;
    for (int32_t i = 0; i < empty; ++i) partials.state[partials.at(row, i)] = {-INFINITY, 0.0f};
  }
  if (!ptx::kHasClusters || grid.merging != Merging::kByCluster) return;
  ptx::sync_cluster();
  // A row of its own for each thread block, or several at once.
  constexpr bool kGaps = !is_lean(kKind);  // keys that begin anywhere
  if (Config::HEAD_DIM <= Config::kThreads &&
      work.rows <= static_cast<int32_t>(ptx::cluster_size())) {
    merge_tile<Config, 1, kGaps>(params, state, partials, groups.places());
  } else {
    merge_tile<Config, kWideColumns, kGaps>(params, state, partials, groups.places());
  }
}

}  // namespace sparse_attn::cuda::decode

// The scores of few queries with all keys: thread blocks share out the steps of a row tile, warps
// take them in turn, each from a ring of its own that cp.async fills ahead. A score does not depend
// on who computes it.
#pragma once

#include "../common/launch.cuh"
#include "../common/ptx/grid.cuh"
#include "chunk_sum.cuh"
#include "topk.h"

namespace sparse_attn::cuda::decode {

/// A split kernel's shape, whose slots hold keys alone.
template <typename T, int HEAD_DIM>
struct ScoreConfig : Config<T, HEAD_DIM, kFragmentRows> {
  using Base = Config<T, HEAD_DIM, kFragmentRows>;
  static constexpr int kStages = 4;
  static constexpr int kSlotBytes = Base::kTileBytes;
  static constexpr int kRingBytes = kStages * kSlotBytes;
  static constexpr int kSmemBytes = Base::kWarps * kRingBytes;
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    score_kernel(const __grid_constant__ AttentionParams params,
                 const __grid_constant__ SplitGrid grid, const ScoreRows scores) {
  constexpr int kStages = Config::kStages;
  extern __shared__ __align__(128) char smem[];
  using State = TileState<Config>;
  __shared__ __align__(alignof(State)) char state_memory[sizeof(State)];
  State& state = state_in<State>(state_memory);
  const Pattern pattern = pattern_of<Kind::kGeneral>(params);
  ptx::wait_for_primary();
  if (threadIdx.x < 32) prepare_tile<Config, Kind::kGeneral>(params, pattern, grid, state);
  __syncthreads();
  const Work& work = state.work;
  if (work.rows <= 0) return;
  const Interval all = state.walk.tiles.main;  // in steps
  const int32_t each = ceil_div(all.size(), work.splits);
  const int32_t first = all.begin + work.split * each;
  const Interval steps = {first, imin(first + each, all.end)};
  const int warp = threadIdx.x / 32;
  // No uniform number, unlike the split kernel's: copies to one had a form that is no instruction
  // (nvcc 13.0).
  const uint32_t ring = ptx::shared_address(smem) + warp * Config::kRingBytes;
  const RowLoader<Config> loader = {params.problem.head_dim, true};
  const TensorView& key = params.keys.key;

  // The queries pass through the slot that is filled last.
  const uint32_t queries = ring + (kStages - 1) * Config::kSlotBytes;
  const QueryRows<Config> query_rows(params, state, 0);
  loader.load_aligned(queries, {0, query_rows.count}, query_rows);
  ptx::cp_async_commit();
  typename Config::Products products;

  // Where the lane's two rows lie; of a row that the tile lacks nothing is written.
  float* rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = lane_row(0, h);
    rows[h] = r < work.rows ? scores.row(row_index(params, work, state.rows[r])) + lane_column(0)
                            : nullptr;
  }
  const float scale = params.score_scale(work.batch, work.first_head);
  const MaskView& mask = params.scores.mask;
  auto after = [](int slot) { return slot + 1 == kStages ? 0 : slot + 1; };
  int slot = 0, load_slot = 0;
  int32_t step = steps.begin + warp;  // multiplied next
#pragma unroll 1
  for (int32_t loaded = step;; loaded += Config::kWarps) {
    __syncwarp();  // what lies in the slot to fill has been read
    if (loaded < steps.end) {
      const int32_t start = loaded * kStepKeys;
      const Interval valid = {state.walk.keys_loaded.begin - start,
                              state.walk.keys_loaded.end - start};
      const auto* first =
          row_at(state.key_head, key, place_of_key<Kind::kGeneral>(params.keys, state, start));
      loader.load_aligned(ring + load_slot * Config::kSlotBytes, valid,
                          [&](int r) { return first + r * key.stride_s; });
    }
    ptx::cp_async_commit();
    load_slot = after(load_slot);
    const int32_t ahead = (loaded - step) / Config::kWarps;
    if (ahead < kStages - 2) continue;
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();  // the queries have landed, or the oldest step
    if (ahead < kStages - 1) {
      products.start(queries);
      continue;
    }
    if (step >= steps.end) break;
    typename Config::ScoreFragment rS;
    products.scores(rS, ring + slot * Config::kSlotBytes);
#pragma unroll
    for (int i = 0; i < 4 * Config::NT; ++i) rS[0][i / 4][i % 4] *= scale;
    if (mask.kind != MaskKind::kNone) {
      Step here;
      here.start = step * kStepKeys;
      typename Config::ScoreFragment bias;
      with_mask(mask.kind, mask.data,
                [&](const auto& load) { load_mask<Config>(bias, params, state, here, load); });
#pragma unroll
      for (int i = 0; i < 4 * Config::NT; ++i) {
        float& score = rS[0][i / 4][i % 4];
        score = bias[0][i / 4][i % 4] == -INFINITY ? -INFINITY : score;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (rows[h] == nullptr) continue;
#pragma unroll
      for (int nt = 0; nt < Config::NT; ++nt) {
        *reinterpret_cast<float2*>(rows[h] + step * kStepKeys + nt * 8) = {rS[0][nt][2 * h],
                                                                           rS[0][nt][2 * h + 1]};
      }
    }
    slot = after(slot);
    step += Config::kWarps;
  }
  ptx::cp_async_wait<0>();
}

template <typename T, int HEAD_DIM>
Status launch_scores(const AttentionParams& params, const SplitGrid& grid, int32_t blocks,
                     const ScoreRows& rows) {
  using Shape = ScoreConfig<T, HEAD_DIM>;
  auto kernel = score_kernel<Shape>;
  const Status status = allow_shared_bytes(kernel, Shape::kSmemBytes);
  if (!status.ok()) return status;
  const LaunchShape shape = {static_cast<uint32_t>(blocks), Shape::kThreads, Shape::kSmemBytes,
                             to_stream(params.stream)};
  return launch_dependent(kernel, shape, params, grid, rows);
}

}  // namespace sparse_attn::cuda::decode

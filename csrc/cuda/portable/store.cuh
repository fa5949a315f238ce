// The end of a query tile: out = O weight in the output's type, lse. Half precision passes through
// shared memory so that rows leave in whole 16-byte chunks.
#pragma once

#include "../common/score_fragment.cuh"
#include "../common/state.cuh"
#include "../common/types.cuh"
#include "query_tile.cuh"

namespace sparse_attn::cuda::portable {

template <typename Config>
using Output = float[Config::MT][Config::DT][4];

template <typename Config>
__device__ __forceinline__ typename Config::T* output_row(const QueryTile<Config>& tile, int r) {
  const TensorView& out = tile.params.outputs.out;
  return static_cast<typename Config::T*>(out.data) + tile.work.batch * out.stride_b +
         tile.work.head * out.stride_h +
         (int64_t{tile.work.sequence.first_row} +
          tile.work.slice.rows.at(tile.work.rows.begin + r)) *
             out.stride_s;
}

template <typename Config>
__device__ __forceinline__ void store_elements(const Output<Config>& rO,
                                               const QueryTile<Config>& tile) {
  using T = typename Config::T;
#pragma unroll
  for (int mt = 0; mt < Config::MT; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int r = lane_row<Config>(mt, h);
      if (r >= tile.work.rows.size()) continue;
      T* out = output_row(tile, r);
#pragma unroll
      for (int dt = 0; dt < Config::DT; ++dt) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int d = Config::Products::column(dt, e);
          if (d < tile.params.problem.value_dim) out[d] = from_float<T>(rO[mt][dt][2 * h + e]);
        }
      }
    }
  }
}

/// `smem` is room for the tile's rows; each warp uses its own.
template <typename Config>
__device__ __forceinline__ void store_chunks(const Output<Config>& rO,
                                             const QueryTile<Config>& tile, char* smem) {
  using T = typename Config::T;
  int lane = threadIdx.x % 32;
  int first = threadIdx.x / 32 * Config::kWarpRows;
  smem += first * Config::kPitch;
#pragma unroll
  for (int mt = 0; mt < Config::MT; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = mt * 16 + h * 8 + lane / 4;
#pragma unroll
      for (int dt = 0; dt < Config::DT; ++dt) {
        char* chunk = smem + swizzled<Config::kPitch>(row, dt);
        reinterpret_cast<uint32_t*>(chunk)[lane % 4] =
            pack<T>(rO[mt][dt][2 * h], rO[mt][dt][2 * h + 1]);
      }
    }
  }
  __syncwarp();
  constexpr int kLanesPerRow = Config::DT % 8 == 0 ? 8 : 4;
  constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  int first_chunk = lane % kLanesPerRow;
  T* out = output_row(tile, first + lane / kLanesPerRow) + first_chunk * 8;
  int64_t pass_stride = tile.params.outputs.out.stride_s * tile.work.slice.rows.step * kRowsAtOnce;
  for (int row = lane / kLanesPerRow; row < Config::kWarpRows; row += kRowsAtOnce) {
    if (first + row >= tile.work.rows.size()) return;
#pragma unroll
    for (int chunk = first_chunk; chunk < Config::DT; chunk += kLanesPerRow) {
      if (chunk * 8 >= tile.params.problem.value_dim) break;
      uint4 bits = *reinterpret_cast<uint4*>(smem + swizzled<Config::kPitch>(row, chunk));
      *reinterpret_cast<uint4*>(out + (chunk - first_chunk) * 8) = bits;
    }
    out += pass_stride;
  }
}

template <typename Config, typename State>
__device__ __forceinline__ void store_tile(Output<Config>& rO, const State& state,
                                           const QueryTile<Config>& tile, char* smem) {
  const AttentionParams& params = tile.params;
  const float value_scale = params.value_scale(tile.work.batch, tile.work.head);
  float sink =
      params.scores.sink_logits == nullptr ? -INFINITY : params.scores.sink_logits[tile.work.head];
#pragma unroll
  for (int mt = 0; mt < Config::MT; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float weight = value_scale * state.weight(mt, h, sink);
#pragma unroll
      for (int dt = 0; dt < Config::DT; ++dt) {
        rO[mt][dt][2 * h] *= weight;
        rO[mt][dt][2 * h + 1] *= weight;
      }
      int r = lane_row<Config>(mt, h);
      if (params.outputs.lse != nullptr && threadIdx.x % 4 == 0 && r < tile.work.rows.size()) {
        int64_t i = int64_t{tile.work.sequence.first_row} +
                    tile.work.slice.rows.at(tile.work.rows.begin + r);
        params.outputs
            .lse[tile.work.batch * params.outputs.lse_stride_b +
                 tile.work.head * params.outputs.lse_stride_h + i * params.outputs.lse_stride_s] =
            state.lse(mt, h);
      }
    }
  }
  if constexpr (!Config::kFloat) {
    if (!Config::kGeneral || tile.aligned) {
      __syncthreads();  // the tiles in shared memory have been read
      store_chunks<Config>(rO, tile, smem);
      return;
    }
  }
  store_elements<Config>(rO, tile);
}

}  // namespace sparse_attn::cuda::portable

// What the warps of a thread block sum up of a chunk, and how they add it up, in their order, and
// store it.
#pragma once

#include "../common/merge_row.cuh"
#include "../common/ptx/math.cuh"
#include "row_tile.cuh"
#include "scores.cuh"

namespace sparse_attn::cuda::decode {

/// Index of the row among [B, Hq, Sq].
__device__ __forceinline__ int64_t row_index(const AttentionParams& params, const Work& work,
                                             const TileRow& row) {
  return (int64_t{work.batch} * params.problem.heads_q + row.head) * params.problem.seq_q +
         row.query;
}

/// What a warp has summed up over its steps of a chunk.
template <typename Config>
struct ChunkSum {
  static constexpr int MT = Config::MT;
  SoftmaxState<MT, false> softmax;
  typename Config::Output rO;

  __device__ __forceinline__ void init() {
    softmax.init();
#pragma unroll
    for (int i = 0; i < 4 * Config::DT * MT; ++i) rO[i % MT][i / MT / 4][i / MT % 4] = 0.0f;
  }

  /// Takes the scores of steps that are multiplied at once, as those of one wide step, which become
  /// P; the output is rescaled for it.
  __device__ __forceinline__ void update(typename Config::ScoreFragment (&rS)[Config::kAtOnce],
                                         Exponent exponent) {
    float factor[MT][2];
    if constexpr (Config::kAtOnce == 1) {
      if (softmax.update(rS[0], exponent, factor)) rescale(factor);
    } else {
      constexpr int NT = Config::NT, kScores = 4 * MT * NT * Config::kAtOnce;
      float wide[MT][Config::kAtOnce * NT][4];
      auto each = [&](auto&& function) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          const int step = i / 4 / NT / MT, mt = i / 4 / NT % MT, nt = i / 4 % NT;
          function(wide[mt][step * NT + nt][i % 4], rS[step][mt][nt][i % 4]);
        }
      };
      each([](float& joined, float own) { joined = own; });
      if (softmax.update(wide, exponent, factor)) rescale(factor);
      each([](float joined, float& own) { own = joined; });
    }
  }

 private:
  __device__ __forceinline__ void rescale(const float (&factor)[MT][2]) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int i = 0; i < 4 * Config::DT; ++i) rO[mt][i / 4][i % 4] *= factor[mt][i % 4 / 2];
    }
  }
};

/// The largest m of a row over the warps, rounded up to an integer: so merges scale exactly.
template <typename Config>
__device__ __forceinline__ float row_maximum(const TileState<Config>& state, int r) {
  float m = state.sums[0][r].x;
#pragma unroll
  for (int warp = 1; warp < Config::kWarps; ++warp) m = fmaxf(m, state.sums[warp][r].x);
  return ceilf(m);
}

/// What sums relative to `m` are worth relative to `top`; 0 for those without keys.
__device__ __forceinline__ float rescale_factor(float m, float top) {
  return m == -INFINITY ? 0.0f : ptx::exp2_approx(m - top);
}

/// Adds a chunk's four columns to those before it, as the merge would (merge_row.cuh).
__device__ __forceinline__ void add_chunk(ColumnSum& sum, const ColumnSum& chunk) {
  const float top = fmaxf(sum.m, chunk.m);
  const float before = rescale_factor(sum.m, top), own = rescale_factor(chunk.m, top);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float old = before == 0.0f ? 0.0f : before * sum.out[c];
    sum.out[c] = own == 0.0f ? old : fmaf(own, chunk.out[c], old);
  }
  sum.l = fmaf(own, chunk.l, before * sum.l);
  sum.m = top;
}

/// Where a column of a row lies among those that pass through shared memory, so that the banks of
/// the threads that store at once differ: of two columns of four rows or, from codes, of four of
/// two.
template <typename Config>
__device__ __forceinline__ int staged(int row, int column) {
  if constexpr (!Config::kSpreads) return row * Config::HEAD_DIM + column;
  const int line = column / 32, inside = column % 32;  // a float in each bank
  const int moved = Config::kFloat8 ? line * 8 + row % 2 * 4 : row % 4 * 8;
  return row * Config::HEAD_DIM + line * 32 + (inside ^ moved);
}

/// Stages a warp's part of up to kStagedRows rows of the output, from `first` on.
template <typename Config>
__device__ __forceinline__ void stage_part(const ChunkSum<Config>& sum, int first, int rows,
                                           float* part) {
  const int mt = first / kFragmentRows;
#pragma unroll
  for (int h = first % kFragmentRows / 8;
       h < (first + Config::kStagedRows - 1) % kFragmentRows / 8 + 1; ++h) {
    const int r = lane_row(mt, h) - first;
    if (r >= rows) continue;
    if constexpr (Config::kFloat8 && Config::kSpreads) {
#pragma unroll
      for (int i = 0; i < Config::DT / 2; ++i) {
        const int e = i % 2, dt = i / 2 * 4;
        const float4 columns = {sum.rO[mt][dt][2 * h + e], sum.rO[mt][dt + 1][2 * h + e],
                                sum.rO[mt][dt + 2][2 * h + e], sum.rO[mt][dt + 3][2 * h + e]};
        const int at = staged<Config>(r, Config::Products::column(dt, e));
        *reinterpret_cast<float4*>(part + at) = columns;
      }
    } else {
#pragma unroll
      for (int dt = 0; dt < Config::DT; ++dt) {
        const float2 pair = {sum.rO[mt][dt][2 * h], sum.rO[mt][dt][2 * h + 1]};
        float* to = part + staged<Config>(r, Config::Products::column(dt, 0));
        if constexpr (Config::kFloat8) {
          to[0] = pair.x;
          part[staged<Config>(r, Config::Products::column(dt, 1))] = pair.y;
        } else {
          *reinterpret_cast<float2*>(to) = pair;
        }
      }
    }
  }
}

/// Adds up what the warps have of row r, whose four columns lie at `at_part` of their parts.
template <typename Config>
__device__ __forceinline__ ColumnSum add_warps(const TileState<Config>& state, int r, int at_part,
                                               const char* rings) {
  ColumnSum sum = {{}, row_maximum(state, r), 0.0f};
#pragma unroll
  for (int warp = 0; warp < Config::kWarps; ++warp) {
    const auto* parts = reinterpret_cast<const float*>(rings + state.staging[warp]);
    const float4 part = *reinterpret_cast<const float4*>(parts + at_part);
    const float columns[4] = {part.x, part.y, part.z, part.w};
    const float weight = rescale_factor(state.sums[warp][r].x, sum.m);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum.out[c] = fmaf(weight, columns[c], sum.out[c]);
    sum.l = fmaf(weight, state.sums[warp][r].y, sum.l);
  }
  return sum;
}

/// Adds up the warps' sums of a chunk and stores them, or the output of rows of which it is the
/// `whole`, as many rows at a time as a slot holds; the thread block calls it. Each warp's part of
/// the output passes through `staging`, an offset into the rings, of rows of HEAD_DIM floats.
template <typename Config>
__device__ __forceinline__ void store_chunk(ChunkSum<Config>& sum, Exponent exponent,
                                            const AttentionParams& params, TileState<Config>& state,
                                            const PartialRows& partials, bool whole,
                                            EndedChunk ended, char* rings, int32_t staging) {
  constexpr int kColumns = Config::HEAD_DIM / 4;  // of four
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  auto* kept_sums = reinterpret_cast<ColumnSum*>(rings + Config::kSmemBytes);
  sum.softmax.finish(exponent);
#pragma unroll
  for (int i = 0; i < 2 * Config::MT; ++i) {
    if (lane % 4 == 0) {
      state.sums[warp][lane_row(i / 2, i % 2)] = {sum.softmax.m[i / 2][i % 2],
                                                  sum.softmax.l[i / 2][i % 2]};
    }
  }
  if (lane == 0) state.staging[warp] = staging;
#pragma unroll
  for (int first = 0; first < Config::TILE_ROWS; first += Config::kStagedRows) {
    const int rows = imin(state.work.rows - first, Config::kStagedRows);
    if (rows <= 0) break;
    stage_part(sum, first, rows, reinterpret_cast<float*>(rings + staging));
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kColumns; i += Config::kThreads) {
      const int r = first + i / kColumns, column = i % kColumns * 4;
      const TileRow& row = state.rows[r];
      const int64_t at = partials.at(row_index(params, state.work, row), ended.place);
      ColumnSum chunk = add_warps(state, r, staged<Config>(r - first, column), rings);
      ColumnSum& kept = kept_sums[first * kColumns + i];
      if (ended.added > 0) {
        if (!whole && ended.placed && column == 0) {
          partials.state[at + ended.added] = {-INFINITY, 0.0f};
        }
        add_chunk(kept, chunk);
        if (!ended.last) continue;
        chunk = kept;
      } else if (!ended.last) {
        kept = chunk;
        continue;
      }
      if (__builtin_expect(whole, false)) {
        store_row<typename Config::T>(params, state.work.sequence, state.work.batch, row.head,
                                      row.query, column, chunk.out, chunk.m, chunk.l);
        continue;
      }
      if (column < partials.columns) {
        *reinterpret_cast<float4*>(partials.out + at * partials.columns + column) = {
            chunk.out[0], chunk.out[1], chunk.out[2], chunk.out[3]};
      }
      if (column == 0) partials.state[at] = {chunk.m, chunk.l};
    }
    __syncthreads();  // the parts and sums may be overwritten
  }
  sum.init();
}

}  // namespace sparse_attn::cuda::decode

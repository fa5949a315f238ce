// Rows from memory to shared memory, sixteen bytes a copy.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "work.cuh"

namespace sparse_attn::cuda::small {

/// Some threads that copy rows together: which chunk of which rows is this one's.
template <typename Config>
struct Team {
  int32_t row, chunk, rows_at_once;

  __device__ __forceinline__ Team(uint32_t thread, uint32_t threads)
      : row(static_cast<int32_t>(thread / Config::kChunks)),
        chunk(static_cast<int32_t>(thread % Config::kChunks)),
        rows_at_once(static_cast<int32_t>(threads / Config::kChunks)) {}
  __device__ __forceinline__ int32_t column() const { return chunk * Config::kElements; }
};

/// Where the data of a head of a view begins, `first` rows in.
template <typename T>
__device__ __forceinline__ const T* head_rows(const TensorView& view, int32_t batch, int32_t head,
                                              int64_t first) {
  return static_cast<const T*>(view.data) + batch * view.stride_b + head * view.stride_h +
         first * view.stride_s;
}

/// Loads the queries of the warp's tile; zeros are rows that do not exist, and columns up to the
/// kernel's head dim.
template <typename Config>
__device__ __forceinline__ void load_queries(uint32_t to, const AttentionParams& params,
                                             const Work& work) {
  const TensorView& query = params.query;
  const Team<Config> team(threadIdx.x % 32, 32);
  const auto* from = head_rows<typename Config::T>(query, work.batch, work.head,
                                                   work.sequence.first_row + work.first + team.row);
  from += team.column();
  const bool exists = team.column() < params.problem.head_dim;
#pragma unroll
  for (int pass = 0; pass < kTileRows * Config::kChunks / 32; ++pass) {
    const int row = team.row + pass * (32 / Config::kChunks);
    ptx::cp_async_16(to + place<Config::kPitch>(row, team.chunk), from, exists && work.has(row));
    from += 32 / Config::kChunks * query.stride_s;
  }
}

/// Loads the keys of a unit, or its values, of which those in `valid` exist: its threads together.
template <typename Config>
struct KeyLoader {
  const Work& work;
  Team<Config> team;
  int32_t rows;
  Interval valid;

  __device__ __forceinline__ KeyLoader(const Grid& grid, const Work& work, Interval valid)
      : work(work),
        team(threadIdx.x - work.slot * 32 * grid.warps, 32 * grid.warps),
        rows(grid.key_rows),
        valid(valid) {}

  __device__ __forceinline__ void load(const TensorView& view, int32_t columns, uint32_t to) const {
    const auto* from = head_rows<typename Config::T>(view, work.batch, work.kv_head,
                                                     int64_t{work.sequence.first_key} + team.row) +
                       team.column();
    const int64_t step = team.rows_at_once * view.stride_s;
    const bool exists = team.column() < columns;
    for (int row = team.row; row < rows; row += team.rows_at_once, from += step) {
      ptx::cp_async_16(to + place<Config::kPitch>(row, team.chunk), from,
                       exists && valid.contains(row));
    }
  }
};

}  // namespace sparse_attn::cuda::small

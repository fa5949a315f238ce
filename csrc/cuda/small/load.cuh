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

/// Loads a unit's keys to `to` and its values after them, of which those in `valid` exist.
template <typename Config>
__device__ __forceinline__ void load_keys(uint32_t to, const AttentionParams& params,
                                          const Grid& grid, const Work& work, Interval valid) {
  using T = typename Config::T;
  const uint32_t threads = 32 * grid.warps;
  const Team<Config> team(threadIdx.x - work.slot * threads, threads);
  const TensorView &key = params.keys.key, &value = params.keys.value;
  const int64_t first = int64_t{work.sequence.first_key} + team.row;
  const T* key_from = head_rows<T>(key, work.batch, work.kv_head, first) + team.column();
  const T* value_from = head_rows<T>(value, work.batch, work.kv_head, first) + team.column();
  const bool key_exists = team.column() < params.problem.head_dim;
  const bool value_exists = team.column() < params.problem.value_dim;
  const int64_t key_step = team.rows_at_once * key.stride_s;
  const int64_t value_step = team.rows_at_once * value.stride_s;
  const int32_t values = grid.key_bytes(Config::kPitch);
  for (int row = team.row; row < grid.key_rows; row += team.rows_at_once) {
    const uint32_t at = to + place<Config::kPitch>(row, team.chunk);
    const bool exists = valid.contains(row);
    ptx::cp_async_16(at, key_from, exists && key_exists);
    ptx::cp_async_16(at + values, value_from, exists && value_exists);
    key_from += key_step;
    value_from += value_step;
  }
}

}  // namespace sparse_attn::cuda::small

// Tiles of rows from global to swizzled shared memory. Rows and columns that do not exist become
// zeros: a probability of 0 must never meet a NaN.
#pragma once

#include "../../interval.h"
#include "../common/ptx/cp_async.cuh"
#include "../common/swizzle.cuh"

namespace sparse_attn::cuda::portable {

/// Rows of a matrix in global memory; elements of the view that are not in `valid` read as zeros.
template <typename T>
struct RowSource {
  const T* data = nullptr;
  int64_t stride = 0;
  Interval valid;
};

/// The copy of load_tile for rows that are not aligned: element by element, done on return.
template <typename T, int ROWS, int kThreads, int kPitch, typename RowOf>
__device__ __forceinline__ void load_tile_unaligned(uint32_t to, const RowSource<T>& source,
                                                    int32_t columns, const RowOf& row_of) {
  constexpr int kElements = kChunkBytes / sizeof(T);
  constexpr int kChunks = kPitch / kChunkBytes;
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * kChunks; i += kThreads) {
    int row = i / kChunks;
    int chunk = i % kChunks;
    int32_t element = row_of(row);
    bool valid = source.valid.contains(element) && chunk * kElements < columns;
    uint4 bits = {0, 0, 0, 0};
    if (valid) bits = load_unaligned(source.data + element * source.stride + chunk * kElements);
    ptx::store_shared_16(to + swizzled<kPitch>(row, chunk), bits);
  }
}

/// The 16-byte chunks of a tile that a thread copies: `chunk` and every kThreadsPerRow-th after
/// it, of `row` and every kRowsAtOnce-th below, so that a row's threads read whole 128-byte lines.
template <typename T, int HEAD_DIM, int kThreads>
struct ThreadChunks {
  static constexpr int kElements = kChunkBytes / sizeof(T);
  static constexpr int kChunks = HEAD_DIM / kElements;
  static constexpr int kThreadsPerRow = kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  static_assert(kChunks % kThreadsPerRow == 0, "a row is whole rounds of its threads");

  int row = threadIdx.x / kThreadsPerRow;
  int chunk = threadIdx.x % kThreadsPerRow;
};

/// Copies ROWS aligned rows that all exist, from element `first` on, of a head dim without padding.
template <typename T, int HEAD_DIM, int ROWS, int kThreads, int kPitch>
__device__ __forceinline__ void load_run(uint32_t to, const RowSource<T>& source, int32_t first) {
  using Own = ThreadChunks<T, HEAD_DIM, kThreads>;
  static_assert(ROWS % Own::kRowsAtOnce == 0, "a tile is whole passes of its threads");
  const Own own;
  const T* from = source.data + (first + own.row) * source.stride + own.chunk * Own::kElements;
  const int64_t pass_stride = source.stride * Own::kRowsAtOnce;
#pragma unroll
  for (int pass = 0; pass < ROWS / Own::kRowsAtOnce; ++pass) {
#pragma unroll
    for (int c = 0; c < Own::kChunks; c += Own::kThreadsPerRow) {
      ptx::cp_async_16(to + swizzled<kPitch>(own.row + pass * Own::kRowsAtOnce, own.chunk + c),
                       from + c * Own::kElements, true);
    }
    from += pass_stride;
  }
}

/// Copies ROWS aligned rows of `columns` elements to shared memory at `to`, with zeros up to
/// HEAD_DIM; row r is element row_of(r) of the source.
template <typename T, int HEAD_DIM, int ROWS, int kThreads, int kPitch, typename RowOf>
__device__ __forceinline__ void load_tile(uint32_t to, const RowSource<T>& source, int32_t columns,
                                          const RowOf& row_of) {
  using Own = ThreadChunks<T, HEAD_DIM, kThreads>;
  constexpr int kRowsAtOnce = Own::kRowsAtOnce;
  const Own own;
#pragma unroll
  for (int pass = 0; pass < (ROWS + kRowsAtOnce - 1) / kRowsAtOnce; ++pass) {
    int row = own.row + pass * kRowsAtOnce;
    if (ROWS % kRowsAtOnce != 0 && row >= ROWS) break;
    int32_t element = row_of(row);
    bool exists = source.valid.contains(element);
    const T* from =
        source.data + (exists ? element : 0) * source.stride + own.chunk * Own::kElements;
#pragma unroll
    for (int c = 0; c < Own::kChunks; c += Own::kThreadsPerRow) {
      bool valid = exists && (own.chunk + c) * Own::kElements < columns;
      ptx::cp_async_16(to + swizzled<kPitch>(row, own.chunk + c), from + c * Own::kElements, valid);
    }
  }
}

}  // namespace sparse_attn::cuda::portable

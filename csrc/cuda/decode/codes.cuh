// Keys and values of 8 bits on their way to shared memory, ahead of time, as the codes that they
// are (code_products.cuh).
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "code_products.cuh"
#include "config.cuh"

namespace sparse_attn::cuda::decode {

/// A warp's loads of 16 rows of codes, the lanes of a row side by side with 16 codes each.
template <typename Config>
struct CodeLoader {
  using Layout = CodeTile<Config::HEAD_DIM>;
  static constexpr int kRowsAtOnce = 32 / Layout::kChunks;
  static constexpr int kPasses = kStepKeys / kRowsAtOnce;

  int32_t columns;  // that exist, a multiple of 8; zeros up to HEAD_DIM

  /// Row r lies at from + r * stride; rows that are not in `valid` become zeros. Rows of codes that
  /// do not begin at 16 bytes come a byte at a time.
  __device__ __forceinline__ void load(uint32_t to, const uint8_t* from, int64_t stride,
                                       Interval valid) const {
    const bool whole = ((reinterpret_cast<uintptr_t>(from) | stride) & 15) == 0;
    const int lane = threadIdx.x % 32;
    const int column = lane % Layout::kChunks * Layout::kChunk;
    from += lane / Layout::kChunks * stride + column;
    if (whole && columns % Layout::kChunk == 0 && valid.holds({0, kStepKeys})) {
      const bool exists = column < columns;
      // The rows of a pass differ in the bits that pass 0 leaves: their place is one more xor.
      const uint32_t first = to + Layout::place(lane / Layout::kChunks, column);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int rows = pass * kRowsAtOnce;
        ptx::cp_async_16_once((first ^ Layout::turn(rows)) + rows * Config::HEAD_DIM, from, exists);
        from += kRowsAtOnce * stride;
      }
      return;
    }
    const int there = imax(0, imin(columns - column, Layout::kChunk));
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = lane / Layout::kChunks + pass * kRowsAtOnce;
      const int bytes = valid.contains(row) ? there : 0;
      const uint32_t place = to + Layout::place(row, column);
      if (whole) {
        ptx::cp_async_some_once(place, from, bytes);
      } else {
        const uint2 low = bytes > 0 ? bytes_at(from) : uint2{};
        const uint2 high = bytes > 8 ? bytes_at(from + 8) : uint2{};
        ptx::store_shared_16(place, {low.x, low.y, high.x, high.y});
      }
      from += kRowsAtOnce * stride;
    }
  }
};

}  // namespace sparse_attn::cuda::decode

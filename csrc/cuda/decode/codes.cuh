// Keys and values of 8 bits on their way to the products: codes are copied to the first half of a
// tile's room ahead of time, and become numbers of T in the whole of it when the tile's turn comes.
#pragma once

#include "../common/key_rows.cuh"
#include "config.cuh"

namespace sparse_attn::cuda::decode {

/// A warp's loads of 16 rows of codes, and their conversion; a lane converts what it has loaded.
template <typename Config>
struct CodeLoader {
  static constexpr int kPiece = 8;  // codes that a lane moves at once: a chunk of numbers of T
  static constexpr int kPiecesPerRow = Config::HEAD_DIM / kPiece;
  static constexpr int kPasses = kStepKeys * kPiecesPerRow / 32;
  static_assert(kPiece * sizeof(typename Config::T) == kChunkBytes, "a piece becomes a chunk");

  int32_t columns;  // that exist; zeros up to HEAD_DIM
  bool aligned;

  /// Row r lies at from + r * stride; rows that are not in `valid` become zeros.
  __device__ __forceinline__ void load(uint32_t to, const uint8_t* from, int64_t stride,
                                       Interval valid) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = piece(pass) / kPiecesPerRow;
      const int column = piece(pass) % kPiecesPerRow * kPiece;
      const bool exists = valid.contains(row) && column < columns;
      const uint8_t* codes = from + row * stride + column;
      const uint32_t place = to + piece(pass) * kPiece;
      if (aligned) {
        ptx::cp_async_8(place, codes, exists);
      } else {
        ptx::store_shared_8(place, exists ? bytes_at(codes) : uint2{});
      }
    }
  }

  /// The codes of a tile become its swizzled rows of T.
  __device__ __forceinline__ static void widen_tile(uint32_t tile) {
    uint2 codes[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      codes[pass] = ptx::load_shared_8(tile + piece(pass) * kPiece);
    }
    __syncwarp();  // all codes have been read
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = piece(pass) / kPiecesPerRow;
      const int chunk = piece(pass) % kPiecesPerRow;
      ptx::store_shared_16(tile + swizzled<Config::kPitch>(row, chunk),
                           widen<typename Config::T>(codes[pass]));
    }
  }

 private:
  __device__ __forceinline__ static int piece(int pass) { return pass * 32 + threadIdx.x % 32; }
};

}  // namespace sparse_attn::cuda::decode

// What a kernel is compiled for, and how rows lie in its shared memory.
#pragma once

#include "../common/swizzle.cuh"
#include "../common/types.cuh"
#include "plan.h"

namespace sparse_attn::cuda::small {

template <typename T_, int HEAD_DIM_, int KEYS_>
struct Config {
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int KEYS = KEYS_;
  static constexpr int kPitch = HEAD_DIM * static_cast<int>(sizeof(T));
  static constexpr int kChunks = kPitch / kChunkBytes;  // of a row
  static constexpr int kElements = HEAD_DIM / kChunks;  // of a chunk
  static constexpr int kSteps = HEAD_DIM / 16;          // of the depth of Q K^T
  static constexpr int kSlices = KEYS / 16;             // of the depth of P V
  static constexpr int NT = KEYS / 8, DT = HEAD_DIM / 8;
  static constexpr int kThreads = 32 * most_warps(KEYS);
  /// A thread's registers: what hides the loads is how many thread blocks a multiprocessor holds.
  static constexpr int kRegisters = HEAD_DIM > 64 || KEYS > 64   ? 128
                                    : HEAD_DIM > 32 && KEYS > 32 ? 96
                                                                 : 80;
  static constexpr int kBlocksPerSm = (64 << 10) / (kThreads * kRegisters);

  static constexpr int kRowScores = 2 * NT;     // that a lane holds of a row
  using ScoreFragment = float[2 * kRowScores];  // score k of row h at score_at(h, k)
  static_assert(kRowScores <= 32, "a bit of a word for each");
  static constexpr uint32_t kAllSeen = kRowScores == 32 ? ~0u : (1u << kRowScores % 32) - 1;
};

/// Byte offset of a chunk in rows of `kPitch`: eight rows of one chunk lie in different banks.
template <int kPitch>
__device__ __forceinline__ uint32_t place(int row, int chunk) {
  if constexpr (kPitch >= 8 * kChunkBytes) {
    return swizzled<kPitch>(row, chunk);
  } else {  // two rows share a line of all banks
    static_assert(kPitch == 4 * kChunkBytes);
    return row * kPitch + ((chunk ^ (row / 2 & 3)) * kChunkBytes);
  }
}

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warp_of_block() { return static_cast<int>(threadIdx.x / 32); }

/// Where a lane holds its k-th score of row h: fragments of 8 keys have two of each row.
__device__ __forceinline__ constexpr int score_at(int h, int k) {
  return k / 2 * 4 + 2 * h + k % 2;
}

/// The lane's row of a tile in half `h` of its fragments.
__device__ __forceinline__ int lane_row(int h) {
  return static_cast<int>(threadIdx.x % 32 / 4) + 8 * h;
}

}  // namespace sparse_attn::cuda::small

// What a split kernel is compiled for. Every warp works alone on its own keys, with a ring of its
// own in shared memory, so the shape is a warp's.
#pragma once

#include "../common/mma_product.cuh"
#include "plan.h"

namespace sparse_attn::cuda::decode {

template <typename T_, int HEAD_DIM_>
struct Config {
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int kWarps = HEAD_DIM > 128 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kStages = HEAD_DIM > 64 ? 3 : 6;  // of keys with their values
  static constexpr int kPitch = HEAD_DIM * static_cast<int>(sizeof(T));
  static constexpr int kTileBytes = kStepKeys * kPitch;
  static constexpr int kRingBytes = kStages * 2 * kTileBytes;
  static constexpr int kSmemBytes = kWarps * kRingBytes;
  static constexpr int NT = kStepKeys / 8;
  static constexpr int DT = HEAD_DIM / 8;

  using Products = TensorCoreProducts<T, HEAD_DIM, kStepKeys, 1, kPitch, true>;
  using Scores = float[1][NT][4];
  using Output = float[1][DT][4];

  static_assert(kPitch % 128 == 0, "the swizzle permutes chunks of 128-byte lines");
  static_assert(kTileRows == kStepKeys, "queries pass through a slot of keys");
};

/// Shared memory that every device from sm_80 on gives a thread block.
constexpr int32_t kSmemLimit = 99 << 10;

/// The head dim that a kernel is compiled for.
constexpr int32_t head_dim_bucket(int32_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

}  // namespace sparse_attn::cuda::decode

// What a split kernel is compiled for. Every warp works alone on its own keys, with a ring of its
// own in shared memory, so the shape is a warp's. Tiles of one fragment of rows hold their queries
// in registers, taller ones in shared memory.
#pragma once

#include "../common/mma_product.cuh"
#include "code_products.cuh"
#include "plan.h"

namespace sparse_attn::cuda::decode {

/// Four columns of what is summed up of a row; over chunks it is kept by the thread that adds to
/// it.
struct alignas(8) ColumnSum {
  float out[4];
  float m, l;
};

template <typename T_, int HEAD_DIM_, int TILE_ROWS_>
struct Config {
  using T = T_;  // of queries and output
  // Keys and values of 8 bits, for queries of either kind of 16 bits.
  static constexpr bool kFloat8 = std::is_same_v<T, HalfOfEitherKind>;
  using Element = std::conditional_t<kFloat8, uint8_t, T>;  // of keys and values
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int TILE_ROWS = TILE_ROWS_;
  static constexpr int MT = TILE_ROWS / kFragmentRows;
  static constexpr bool kQueryRegisters = MT == 1;
  static constexpr int kWarps = HEAD_DIM > 128 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  // Steps that a warp multiplies at once. Codes take half of the memory, so a warp has half of the
  // time for a step, which is a chain of waits: of two at once it is hardly longer.
  static constexpr int kAtOnce = kFloat8 && HEAD_DIM <= 128 ? 2 : 1;
  // Whether values are read before the softmax, beside which tall tiles have no room for codes.
  static constexpr bool kValuesAhead = !kFloat8 || MT == 1;
  // Narrow heads have short steps, a chain of waits each: more warps run side by side, each with
  // fewer of them under way.
  static constexpr bool kManyBlocks = HEAD_DIM <= 64 && MT == 1 && !kFloat8;
  static constexpr int kBlocksPerSm = kManyBlocks ? 4 : 2;
  // Tall tiles take longer for a step, and leave room for sums that are kept: two steps of 128
  // columns, or four of 64. Codes take half of the room.
  static constexpr int kWideStages =
      MT > 1 ? 256 / HEAD_DIM : (HEAD_DIM > 64 || kManyBlocks ? 3 : 6);
  static constexpr int kStages = kFloat8 ? 2 * kWideStages : kWideStages;
  // Whether a warp holds the descriptions of its steps in registers; wide codes leave none.
  static constexpr bool kHoldsSteps = !kFloat8 || HEAD_DIM <= 128;
  static constexpr int kPitch = HEAD_DIM * static_cast<int>(sizeof(T));
  static constexpr int kTileBytes = kStepKeys * HEAD_DIM * static_cast<int>(sizeof(Element));
  static constexpr int kSlotBytes = 2 * kTileBytes;  // keys with their values
  static constexpr int kRingBytes = kStages * kSlotBytes;
  static constexpr int kUnitBytes = kFloat8 ? 16 : 0;  // for a row of queries (code_products.cuh)
  static constexpr int kQueryBytes = kQueryRegisters ? 0 : TILE_ROWS * (kPitch + kUnitBytes);
  static constexpr int kSmemBytes = kWarps * kRingBytes + kQueryBytes;
  // Rows of a tile whose sums of a group of chunks a thread block keeps after the rings: as many
  // as leave the multiprocessor its other thread blocks.
  static constexpr int kKeptRows = MT > 1 ? TILE_ROWS : kManyBlocks || HEAD_DIM > 128 ? 8 : 16;
  static constexpr int kKeptBytes =
      kKeptRows * (HEAD_DIM / 4) * static_cast<int>(sizeof(ColumnSum));
  // Whether a warp's part of a chunk is spread over the banks (chunk_sum.cuh): other kernels have
  // no registers for its addresses.
  static constexpr bool kSpreads = HEAD_DIM <= 128 && !kManyBlocks;
  static constexpr int NT = kStepKeys / 8;
  static constexpr int DT = HEAD_DIM / 8;

  using Products =
      std::conditional_t<kFloat8, CodeProducts<HEAD_DIM, MT, kPitch>,
                         TensorCoreProducts<T, HEAD_DIM, kStepKeys, MT, kPitch, kQueryRegisters>>;
  using ScoreFragment = float[MT][NT][4];
  using Output = float[MT][DT][4];

  /// No row sees the keys of these scores.
  __device__ __forceinline__ static void leave_out(ScoreFragment& scores) {
#pragma unroll
    for (int i = 0; i < 4 * MT * NT; ++i) scores[i / 4 / NT][i / 4 % NT][i % 4] = -INFINITY;
  }

  static_assert(kPitch % 128 == 0, "the swizzle permutes chunks of 128-byte lines");
  static constexpr int kStagedRows = kSlotBytes / (HEAD_DIM * static_cast<int>(sizeof(float)));
  static_assert(kStagedRows % 8 == 0, "a slot holds whole groups of rows of float32 output");
  static_assert(kFragmentRows * kPitch <= kSlotBytes, "a slot holds the queries of a fragment");
  static_assert(kFragmentRows == kStepKeys, "queries are loaded as a step's keys are");
  static_assert(MT <= kWarps, "a warp loads a fragment of queries");
};

/// Shared memory that every device from sm_80 on gives a thread block.
constexpr int32_t kSmemLimit = 99 << 10;

/// Whether the sums of kTallRows rows fit the registers of a warp.
constexpr bool has_tall_tiles(int32_t head_dim) { return head_dim <= 128; }

/// The head dim that a kernel is compiled for.
constexpr int32_t head_dim_bucket(int32_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

}  // namespace sparse_attn::cuda::decode

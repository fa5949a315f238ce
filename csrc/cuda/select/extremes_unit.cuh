// What the thread blocks of extremes_hopper.cu share: sizes, shared memory, arguments, and which
// rows meet which key blocks.
#pragma once

#include <cuda.h>

#include "../../divisor.h"
#include "../../select_params.h"
#include "../common/slab.h"

namespace sparse_attn::cuda::extremes {

constexpr int kWarps = kWarpgroup / 32;
constexpr int kRows = 64;                   // of a warpgroup
constexpr int kKeySlab = kSlabColumns / 2;  // columns, of two extremes each
constexpr int kQuarter = 64;                // key blocks that are looked at together
constexpr int kWarpgroupBarrier = 1;        // and one more for each warpgroup; 0 is __syncthreads

template <Dtype kDtype_, int HEAD_DIM_>
struct Config {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int kConsumers = HEAD_DIM <= 128 ? 4 : 2;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : 232, kLoaderRegisters = 32;
  static constexpr int kTileRows = kConsumers * kRows;
  static constexpr int kChunk = HEAD_DIM <= 128 ? 128 : 64;  // key blocks of a product
  static constexpr int kStages = HEAD_DIM <= 64 ? 4 : 2;     // chunks that are there
  static constexpr int kQueryBytes = kRows * HEAD_DIM * 2;
  static constexpr int kKeyBytes = kChunk * HEAD_DIM * 4;
};

template <typename C>
struct alignas(1024) Storage {
  uint8_t query[C::kConsumers][C::kQueryBytes];
  uint8_t key[C::kStages][C::kKeyBytes];
  alignas(16) float sums[2][C::kConsumers * kWarps][C::kChunk];  // of a warp's rows
  uint64_t query_full[C::kConsumers], query_empty[C::kConsumers];
  uint64_t key_full[C::kStages], key_empty[C::kStages];
};

/// The rows of a head that a thread block takes at a time.
struct Tile {
  int32_t batch, head;
  int32_t first;               // row
  int32_t rows, keys, offset;  // of the batch entry; keys that have extremes
  int32_t chunks;              // of key blocks that some row sees
};

struct Arguments {
  SelectParams params;
  CUtensorMap query, key;
  Divisor block_kv;
  float* shares;  // [B, Hq, num_q, num_kv]

  /// The key blocks that a row sees end here.
  __device__ int32_t seen(const Tile& tile, int32_t i) const {
    const int32_t end = imax(0, end_of_keys(params.causal, i + tile.offset, tile.keys));
    return block_kv.divide(end + params.block_kv - 1);
  }
};

template <typename C>
SPARSE_ATTN_HD int64_t num_tiles(const Problem& problem) {
  return int64_t{ceil_div(problem.seq_q, C::kTileRows)} * problem.batch * problem.heads_q;
}

/// Calls `visit(tile)` for the thread block's tiles that see a key; the longest come first.
template <typename C, typename Visit>
__device__ __forceinline__ void for_each_tile(const Arguments& args, const Visit& visit) {
  const SelectParams& params = args.params;
  const int64_t tiles = num_tiles<C>(params.problem);
  const int32_t heads = params.problem.batch * params.problem.heads_q;
#pragma unroll 1
  for (int64_t at = tiles - 1 - blockIdx.x; at >= 0; at -= gridDim.x) {
    const auto index = static_cast<int32_t>(at % heads);
    Tile tile;
    tile.batch = index / params.problem.heads_q;
    tile.head = index % params.problem.heads_q;
    tile.first = static_cast<int32_t>(at / heads) * C::kTileRows;
    tile.rows = params.rows(tile.batch);
    if (tile.first >= tile.rows) continue;
    tile.keys = params.held_keys(tile.batch);
    tile.offset = params.offset(tile.batch);
    const int32_t last = imin(tile.first + C::kTileRows, tile.rows) - 1;
    tile.chunks = ceil_div(args.seen(tile, last), C::kChunk);
    if (tile.chunks > 0) visit(tile);
  }
}

}  // namespace sparse_attn::cuda::extremes

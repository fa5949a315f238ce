// What the thread blocks of extremes_hopper.cu share: sizes, shared memory, arguments, and which
// rows meet which key blocks.
#pragma once

#include <cuda.h>

#include "../../divisor.h"
#include "extremes_hopper.h"

namespace sparse_attn::cuda::extremes {

constexpr int kWarpgroup = 128, kWarps = kWarpgroup / 32;
constexpr int kRows = 64;             // of a product
constexpr int kTileRows = 2 * kRows;  // of a tile, which a warpgroup has for itself
constexpr int kRowBytes = 128;        // of a slab
constexpr int kQuerySlab = 64;        // columns
constexpr int kKeySlab = 32;          // columns, of two extremes each
constexpr int kChunk = 128;           // key blocks of a product
constexpr int kQuarter = 64;          // key blocks that are looked at together
constexpr int kItems = 2;             // tiles claimed ahead
constexpr int32_t kFillTiles = 3;     // as many tiles take as long as other extremes to come
constexpr int kWarpgroupBarrier = 1;  // and one more for each warpgroup; 0 is __syncthreads

/// What becomes of a tile's scores.
enum class Pass {
  kTotals,  // the mass of the tile, by row
  kShares,  // shares, from the masses of all tiles
};

template <Dtype kDtype_, int HEAD_DIM_>
struct Config {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int kColumns = extreme_columns(HEAD_DIM);
  static constexpr int kConsumers = HEAD_DIM <= 128 ? 4 : 2;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : 232, kLoaderRegisters = 32;
  static constexpr int kQueryBytes = kRows * HEAD_DIM * 2;
  static constexpr int kKeyBytes = kColumns * HEAD_DIM * 4;
};

/// A tile, as the loader hands it to a warpgroup.
struct Item {
  int32_t head;                // of the launch; negative: there is none
  int32_t row, column;         // in tiles
  int32_t halves;              // that have rows
  int32_t fill;                // how often extremes have come
  int32_t rows, keys, offset;  // of the batch entry
};

template <typename C>
struct alignas(1024) Storage {
  uint8_t query[C::kConsumers][C::kQueryBytes];
  uint8_t key[C::kKeyBytes];
  alignas(16) float sums[C::kConsumers][2][kWarps][C::kColumns];  // of a warp's rows
  Item item[C::kConsumers][kItems];
  uint64_t item_full[C::kConsumers][kItems], item_empty[C::kConsumers][kItems];
  uint64_t query_full[C::kConsumers], query_empty[C::kConsumers];
  uint64_t key_wanted, key_full;
};

struct Arguments {
  SelectParams params;
  CUtensorMap query, key;
  Divisor block_kv;
  int32_t first_head, heads;  // of the launch, among the heads of all batch entries
  int32_t pitch;
  float* masses;  // [heads, Sq, pitch], log2; of the first tile: of all
  float* shares;  // [B, Hq, num_q, num_kv]

  __device__ int32_t batch(int32_t head) const {
    return (first_head + head) / params.problem.heads_q;
  }
  __device__ int32_t head_q(int32_t head) const {
    return (first_head + head) % params.problem.heads_q;
  }
  /// The key blocks that a row sees end here.
  __device__ int32_t seen(const Item& item, int32_t i) const {
    const int32_t end = imax(0, end_of_keys(params.causal, i + item.offset, item.keys));
    return block_kv.divide(end + params.block_kv - 1);
  }
  __device__ float* masses_of(int32_t head, int32_t i) const {
    return masses + (int64_t{head} * params.problem.seq_q + i) * pitch;
  }
};

/// The tiles of a head: by columns, and of each from the first row on that sees some of it.
template <typename C>
struct HeadTiles {
  const Arguments& args;
  Item item;  // of the head
  int32_t rows, columns;

  __device__ HeadTiles(const Arguments& args, int32_t head) : args(args) {
    const int32_t batch = args.batch(head);
    item = {};
    item.head = head;
    item.rows = args.params.rows(batch);
    item.keys = args.params.entry_keys(batch);
    item.offset = args.params.offset(batch);
    rows = ceil_div(item.rows, kTileRows);
    columns = item.rows > 0 ? ceil_div(args.seen(item, item.rows - 1), C::kColumns) : 0;
  }
  __device__ int32_t first_row(int32_t column) const {
    if (!args.params.causal) return 0;
    return imax(0, column * C::kColumns * args.params.block_kv - item.offset) / kTileRows;
  }
  /// Tiles, and what coming extremes count as.
  __device__ int64_t length() const {
    int64_t sum = 0;
    for (int32_t c = 0; c < columns; ++c) sum += kFillTiles + rows - first_row(c);
    return sum;
  }
  /// Calls `visit(column, row)` for what lies in `own` of that length.
  template <typename Visit>
  __device__ void for_each(int64_t begin, int64_t end, const Visit& visit) const {
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t first = first_row(c);
      begin -= kFillTiles;
      end -= kFillTiles;
      const int64_t last = end < rows - first ? end : rows - first;
      for (int64_t at = begin > 0 ? begin : 0; at < last; ++at) {
        visit(c, first + static_cast<int32_t>(at));
      }
      begin -= rows - first;
      end -= rows - first;
    }
  }
};

}  // namespace sparse_attn::cuda::extremes

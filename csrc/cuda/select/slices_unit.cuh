// What the thread blocks of slices_hopper.cu share: sizes, shared memory, arguments, and the order
// of tiles.
#pragma once

#include <cuda.h>

#include "../common/slab.h"
#include "slices_hopper.h"

namespace sparse_attn::cuda::slices {

constexpr int kConsumers = 2;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kWarps = kConsumers * kWarpgroup / 32;
constexpr int kRows = 64;  // query vectors of a warpgroup
constexpr int kTileRows = kConsumers * kRows;
constexpr int kQueryBytes = kTileRows * kSlabRowBytes;
constexpr int kKeyBytes = kSliceKeys * kSlabRowBytes;
constexpr int kStages = 4;
constexpr int kItems = 2;  // tiles claimed ahead
constexpr int kBand = 16;  // tiles of queries that walk over the keys together, in L2
constexpr int kConsumerRegisters = 232, kLoaderRegisters = 40;

/// Vectors of so many rows, and how many of its slices the last one has.
struct Count {
  int32_t vectors, last;
  SPARSE_ATTN_HD static Count of(int32_t rows, int32_t slices) {
    const int32_t vectors = ceil_div(rows, slices);
    return {vectors, rows - (vectors - 1) * slices};
  }
};

struct Tile {
  int32_t head;         // of the launch; negative: there is none
  int32_t row, column;  // in tiles
  Count queries, keys;  // vectors that the batch entry has
};

struct alignas(1024) Storage {
  uint8_t query[kStages][kQueryBytes];
  uint8_t key[kStages][kKeyBytes];
  Tile item[kItems];
  uint64_t item_full[kItems], item_empty[kItems];
  uint64_t full[kStages], empty[kStages];
};

struct Arguments {
  SelectParams params;
  Estimate estimate;
  // By slice: vectors that have a row there, and all but the last one, which has none.
  CUtensorMap query[2], key[2];
  int32_t last_query, last_key;   // slices that the tensors have of their last vectors
  int32_t num_queries, num_keys;  // vectors of a batch entry, at most
  int32_t first_head, heads;      // of the launch, among the heads of all batch entries
  int32_t pitch;
  float* masses;  // [heads, num_queries, pitch], log2
  float* shares;  // [B, Hq, num_q, num_kv]

  __device__ int32_t batch(int32_t head) const {
    return (first_head + head) / params.problem.heads_q;
  }
  __device__ int32_t head_q(int32_t head) const {
    return (first_head + head) % params.problem.heads_q;
  }
  /// The key vectors that a query vector sees end here.
  __device__ int32_t seen(int32_t head, int32_t vector) const {
    return estimate.seen(params, batch(head), head_q(head), vector).end;
  }
  /// Vectors that exist.
  __device__ Count queries(int32_t head) const {
    return Count::of(params.rows(batch(head)), estimate.rows);
  }
  __device__ Count keys(int32_t head) const {
    return Count::of(params.num_keys(batch(head)), estimate.slices);
  }
  /// The tiles of keys that some of `vectors` vectors sees in these tiles: the last one, if any.
  __device__ int32_t columns(int32_t head, Interval rows, int32_t vectors) const {
    const int32_t end = imin(rows.end * kTileRows, vectors);
    return end <= rows.begin * kTileRows ? 0 : ceil_div(seen(head, end - 1), kSliceKeys);
  }
};

/// The tiles of a thread block: by head, then by bands of queries, the longest first, then by keys.
struct TileOrder {
  const Arguments& args;
  int64_t next = blockIdx.x;  // from the band's first tile on
  int32_t head = 0, band, columns = 0;
  Count queries, keys;  // of the head

  __device__ explicit TileOrder(const Arguments& args)
      : args(args), band(bands()), queries(args.queries(0)), keys(args.keys(0)) {
    advance();
  }
  __device__ int32_t rows() const { return ceil_div(args.num_queries, kTileRows); }
  __device__ int32_t bands() const { return ceil_div(rows(), kBand); }
  __device__ void advance() {
    if (band == 0) {
      band = bands();
      if (++head < args.heads) {
        queries = args.queries(head);
        keys = args.keys(head);
      }
    }
    --band;
    if (head >= args.heads) return;
    columns = args.columns(head, {band * kBand, (band + 1) * kBand}, queries.vectors);
  }
  /// The next one with a key that is seen.
  __device__ Tile take() {
    while (true) {
      while (head < args.heads && next >= int64_t{columns} * kBand) {
        next -= int64_t{columns} * kBand;
        advance();
      }
      if (head >= args.heads) return {-1, 0, 0, {}, {}};
      const Tile tile = {head, band * kBand + static_cast<int32_t>(next % kBand),
                         static_cast<int32_t>(next / kBand), queries, keys};
      next += gridDim.x;
      const Interval own = {tile.row, tile.row + 1};
      if (tile.column < args.columns(head, own, queries.vectors)) return tile;
    }
  }
};

}  // namespace sparse_attn::cuda::slices

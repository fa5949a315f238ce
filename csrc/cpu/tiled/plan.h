// How the tiled engine cuts a call: tiles of query rows, chunks of keys, what is packed to float32
// rows beforehand, and where everything lies in the workspace. A function of the parameters and,
// for the numbers of scratch areas, of heads that share a tile and of heads packed at a time alone,
// of the number of threads.
#pragma once

#include <cstdint>

#include "cpu/topk/select_topk.h"
#include "cpu/vector/vector_math.h"
#include "params.h"

namespace sparse_attn::cpu {

/// Tiles of query rows, the same for every head.
struct QueryCut {
  int32_t tile_rows = 0;        // rows of a tile, at most
  int32_t tiles_per_class = 0;  // of a class of rows; of a layout row for block lists
  int32_t num_classes = 0;      // classes that have rows; layout rows for block lists
  int32_t heads_per_tile = 1;   // heads of a group share a tile when rows are few
  int32_t num_tiles() const { return tiles_per_class * num_classes; }
  int32_t max_rows() const { return tile_rows * heads_per_tile; }
};

/// Keys and values packed to contiguous rows of float32 (or of bfloat16), per key head: the main
/// view class by class, and the side view (leading keys on an axis of their own, or scattered
/// global tokens).
struct PackCut {
  bool key = false, value = false;  // of the main view; else they lie so already, or rows are few
  bool panels = false;     // keys as panels, packed here or by tiles, for products without BLAS
  bool bfloat = false;     // panels of bfloat16, and values in pairs of rows, packed here ...
  int32_t parts = 1;       // ... which elements are sums of
  int64_t class_rows = 0;  // rows from one class to the next
  int64_t main_rows = 0;
  int64_t side_rows = 0;
  /// Columns of a row of `dim` as products take it.
  int32_t columns(int32_t dim) const { return bfloat ? bfloat_columns(dim) : dim; }
  /// Floats' room that a packed row takes.
  int64_t row_floats(int32_t dim) const { return bfloat ? columns(dim) * parts / 2 : dim; }
  int64_t heads_per_round = 0;  // heads packed at a time, so that they stay in the cache
};

struct Plan {
  QueryCut query;
  PackCut pack;
  int32_t few_rows = 0;      // of a head, which are multiplied one by one, from keys where they lie
  int32_t chunk_keys = 0;    // columns of a tile of scores
  int64_t score_stride = 0;  // floats from a row of scores to the next
  // For token top-k: tiles of up to whole_columns keep whole rows of scores, others candidates; of
  // those, tiles of up to dense_columns multiply zeros too.
  int32_t whole_columns = 0;
  int32_t dense_columns = 0;
  int64_t whole_stride = 0;
  TopkRoom topk;  // of a row's candidates
  int32_t num_workers = 1;
};

Plan make_plan(const AttentionParams& params, int32_t num_workers);

/// Whether the leading keys have an axis of their own.
inline bool has_side_lead(const AttentionParams& params) {
  return params.pattern.has_lead() && !params.pattern.shared_axis();
}

}  // namespace sparse_attn::cpu

// One query tile of the tiled engine, from packed queries to finished rows of out and lse. Used by
// the workers of tiled.cpp; token top-k keeps the best scores of a row, everything else runs
// online.
#pragma once

#include "arena.h"
#include "cpu/tiled/dense_mask.h"
#include "cpu/tiled/keys.h"
#include "cpu/tiled/plan.h"
#include "cpu/tiled/tile.h"
#include "cpu/tiled/visible.h"
#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {

/// What a worker holds for the tile it works on.
struct TileScratch {
  float* query = nullptr;   // [rows, D]
  float* out = nullptr;     // [rows, value_dim, or zeros after it], not yet divided by l
  float* scores = nullptr;  // [rows, score_stride]
  float* m = nullptr;       // [rows]
  float* l = nullptr;       // [rows]
  Row* rows = nullptr;      // [rows]
  Span* visible = nullptr;  // [rows]
  Span* read = nullptr;     // [rows], columns of P that its product with values reads
  float* mask = nullptr;    // [chunk_keys], one row of attn_mask
  float* key = nullptr;     // [chunk_keys, D], gathered blocks, or panels of a run
  float* value = nullptr;   // [chunk_keys, value_dim]
  // For products of bfloat16, whose queries lie in `query`; elements as in bfloat_rows.h:
  uint16_t* edges = nullptr;  // [2 runs, 32, elements], values with rows outside their run
  // For top-k:
  float* whole_scores = nullptr;    // [rows, whole_stride]
  TopkRow* kept = nullptr;          // [rows]
  float* kept_scores = nullptr;     // [rows, topk.stride]
  int32_t* kept_columns = nullptr;  // [rows, topk.stride]
  int32_t* cursor = nullptr;        // [rows], walks through kept
  float* terms = nullptr;           // [chunk_keys], of attn_mask at the kept columns

  TileScratch(const AttentionParams& params, const Plan& plan, Arena* arena);
};

/// The columns that some of the rows see.
inline Interval seen_by(const Span* seen, int32_t rows, int32_t num_columns) {
  Interval columns = {num_columns, 0};
  for (int32_t row = 0; row < rows; ++row) {
    if (seen[row].begin >= seen[row].end) continue;
    columns = {imin(columns.begin, seen[row].begin), imax(columns.end, seen[row].end)};
  }
  return columns;
}

class QueryTile {
 public:
  QueryTile(const AttentionParams& params, const Pattern& pattern, const Plan& plan,
            const VectorMath& math, const Tile& tile, const PackedHead& packed,
            const TileScratch& scratch);

  /// False when a product failed.
  bool run();

 private:
  /// Scores need more than a positive factor: attn_mask, softcap, or a scale that is not positive.
  bool transforms() const;
  void load_queries();
  void gather(const Chunk& chunk);
  bool score(const Chunk& chunk);
  bool multiply_keys(const Chunk& chunk);
  bool multiply_values(const Chunk& chunk, bool first);
  void bfloat_keys(const Chunk& chunk);
  void bfloat_values(const Chunk& chunk);
  void panel_keys(const Chunk& chunk);
  void multiply_panels(const Chunk& chunk, int32_t begin, int32_t end, int32_t first_column);
  void panel_values(const Chunk& chunk);
  template <class Visit>
  void for_each_group(int32_t num_columns, const Visit& visit);
  template <class Product>
  bool for_each_part(const Chunk& chunk, const Product& product);
  void find_visible(const Chunk& chunk);
  void transform_row(const Chunk& chunk, int32_t row, float* scores, float scale);
  void find_read(int32_t num_columns);
  SoftmaxTile softmax_tile() const;
  bool run_online();
  void clear_out();
  void finish();

  // Token top-k, in topk_tile.cpp.
  bool run_topk();
  void prepare(const Chunk& chunk, int32_t row);
  void clear_kept();
  void finish_kept();
  bool select_columns();
  template <class Visit>
  void for_each_again(const Visit& visit);
  Span next_kept(int32_t row, int32_t end);
  void transform_kept();
  void add_kept(const Chunk& chunk, int32_t first);
  bool add_kept_values();

  // The same on whole rows of scores, in whole_rows.cpp.
  template <class Visit>
  void for_each_of_whole_rows(const Visit& visit);
  template <class Change>
  void change_whole_rows(const Change& change);
  int32_t find_whole_visible();
  bool score_whole_rows();
  void select_from_whole_rows();
  bool multiply_whole_rows();

  const AttentionParams& params_;
  const Pattern& pattern_;
  const Plan& plan_;
  const VectorMath& math_;
  const Tile& tile_;
  const TileScratch& scratch_;
  HeadRows keys_;
  HeadRows values_;
  DenseMask mask_;
  float scale_;      // of q.k
  bool bfloat_;      // products of bfloat16 ...
  bool panels_;      // ... or with panels of keys ...
  bool row_by_row_;  // ... or by rows, instead of BLAS
  int32_t out_dim_;  // columns of a row of scratch_.out
  float* scores_;    // of the chunk, [rows, score_stride_]
  int64_t score_stride_;
  const float* query_;  // of the tile's first row: scratch_.query, or the caller's
  int64_t query_stride_;
  bool gathered_ = false;  // the chunk's rows lie in scratch_.key and scratch_.value
};

/// Calls product(column, length, keys, values) for the parts of the chunk that lie together.
template <class Product>
bool QueryTile::for_each_part(const Chunk& chunk, const Product& product) {
  if (gathered_) {
    return product(0, chunk.columns,
                   Rows{scratch_.key, params_.problem.head_dim, Element::kFloat32},
                   Rows{scratch_.value, params_.problem.value_dim, Element::kFloat32});
  }
  bool one_by_one = chunk.axis == Axis::kGlobal && plan_.pack.side_rows == 0;
  int32_t column = 0;
  for (int32_t i = 0; i < chunk.num_runs; ++i) {
    const ChunkRun& run = chunk.runs[i];
    int32_t step = one_by_one ? 1 : run.length;
    for (int32_t begin = 0; begin < run.length; begin += step) {
      if (!product(column, step, keys_.at(chunk.axis, tile_.slice, run.begin + begin),
                   values_.at(chunk.axis, tile_.slice, run.begin + begin))) {
        return false;
      }
      column += step;
    }
  }
  return true;
}

}  // namespace sparse_attn::cpu

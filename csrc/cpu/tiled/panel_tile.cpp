// The products of a query tile with panels of keys: groups of rows, each with the columns that some
// row of the group sees, so that windows and diagonals cost what they cover. A group's rows are of
// one head: their sums begin where the group's columns do.
#include <algorithm>

#include "cpu/tiled/query_tile.h"

namespace sparse_attn::cpu {

/// Calls visit(first row, rows, columns) for groups of nearly equal size; `columns` holds what the
/// group's rows see of the chunk's.
template <class Visit>
void QueryTile::for_each_group(int32_t num_columns, const Visit& visit) {
  const int32_t head_rows = tile_.rows.size(), groups = ceil_div(head_rows, math_.group_rows);
  const int32_t each = head_rows / groups, more = head_rows % groups;
  for (int32_t group = 0, row = 0; row < tile_.size(); ++group) {
    const int32_t rows = each + (group % groups < more);
    Interval columns = seen_by(scratch_.visible + row, rows, num_columns);
    if (!columns.empty()) visit(row, rows, columns);
    row += rows;
  }
}

/// Finds what the product with values reads of each row of P: with panels, what its group sees.
void QueryTile::find_read(int32_t num_columns) {
  std::fill_n(scratch_.read, tile_.size(), Span{0, num_columns});
  if (!panels_ || bfloat_) return;
  for_each_group(num_columns, [&](int32_t row, int32_t rows, Interval columns) {
    std::fill_n(scratch_.read + row, rows, Span{columns.begin, columns.end});
  });
}

void QueryTile::panel_keys(const Chunk& chunk) {
  if (keys_.has_panels(chunk.axis)) {
    multiply_panels(chunk, 0, chunk.num_runs, 0);
    return;
  }
  for (int32_t i = 0, column = 0; i < chunk.num_runs; column += chunk.runs[i++].length) {
    copy_panels(math_, keys_.at(chunk.axis, tile_.slice, chunk.runs[i].begin), chunk.runs[i].length,
                params_.problem.head_dim, scratch_.key);
    multiply_panels(chunk, i, i + 1, column);
  }
}

/// Scores with the runs [begin, end), whose first has the chunk's column `first_column`.
void QueryTile::multiply_panels(const Chunk& chunk, int32_t begin, int32_t end,
                                int32_t first_column) {
  constexpr int32_t kMost = Chunk::kMaxColumns / kPanelKeys + 2 * Chunk::kMaxRuns;
  const int32_t head_dim = params_.problem.head_dim;
  const bool packed = keys_.has_panels(chunk.axis);
  for_each_group(chunk.columns, [&](int32_t row, int32_t rows, Interval columns) {
    const float* panels[kMost];
    int32_t count = 0, column = first_column;
    float* target = nullptr;  // of the first panel's scores
    auto multiply_all = [&] {
      math_.panel_scores(query_ + row * query_stride_, query_stride_, rows, head_dim, panels, count,
                         target, score_stride_);
      count = 0;
    };
    for (int32_t i = begin; i < end; column += chunk.runs[i++].length) {
      const ChunkRun& run = chunk.runs[i];
      Interval piece = intersect(columns, {column, column + run.length});
      if (piece.empty()) continue;
      int32_t first = piece.begin - column, place = first % kPanelKeys;
      const float* panel = packed ? keys_.panel(chunk.axis, tile_.slice, run.begin + first, &place)
                                  : scratch_.key + int64_t{first - place} * head_dim;
      float* scores = scores_ + row * score_stride_ + piece.begin - place;
      if (count > 0 && scores != target + count * kPanelKeys) multiply_all();
      if (count == 0) target = scores;
      const int32_t num_panels = ceil_div(place + piece.size(), kPanelKeys);
      for (int32_t p = 0; p < num_panels; ++p) {
        panels[count++] = panel + int64_t{p} * kPanelKeys * head_dim;
      }
    }
    if (count > 0) multiply_all();
  });
}

void QueryTile::panel_values(const Chunk& chunk) {
  for_each_group(chunk.columns, [&](int32_t row, int32_t rows, Interval columns) {
    ValueRun runs[Chunk::kMaxRuns];
    int32_t num_runs = 0, column = 0;
    int64_t stride = 0;
    for (int32_t i = 0; i < chunk.num_runs; ++i) {
      const ChunkRun& run = chunk.runs[i];
      Interval piece = intersect(columns, {column, column + run.length});
      if (!piece.empty()) {
        Rows values = values_.at(chunk.axis, tile_.slice, run.begin + piece.begin - column);
        runs[num_runs++] = {static_cast<const float*>(values.data), piece.size()};
        stride = values.stride;
      }
      column += run.length;
    }
    math_.panel_values(scores_ + row * score_stride_ + columns.begin, score_stride_, rows, runs,
                       num_runs, stride, params_.problem.value_dim,
                       scratch_.out + int64_t{row} * params_.problem.value_dim);
  });
}

}  // namespace sparse_attn::cpu

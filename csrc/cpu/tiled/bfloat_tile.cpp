// The products of a query tile with bfloat16 keys and values: groups of 32 rows, each with the
// columns that some row of the group sees. Values come in blocks of 32 rows, of which those that no
// row of the tile sees are zeros: P is 0 there, but 0 times NaN is not.
#include "cpu/tiled/query_tile.h"

namespace sparse_attn::cpu {

void QueryTile::bfloat_keys(const Chunk& chunk) {
  int32_t head_dim = params_.problem.head_dim, column = 0;
  const uint16_t* query = reinterpret_cast<const uint16_t*>(scratch_.query);
  uint16_t* made = reinterpret_cast<uint16_t*>(scratch_.key);
  for (int32_t i = 0; i < chunk.num_runs; ++i) {
    const Run& run = chunk.runs[i];
    const bool packed = keys_.has_panels(chunk.axis);
    if (!packed) {
      copy_bfloat_panels(math_, keys_.at(chunk.axis, tile_.slice, run.begin), run.length, head_dim,
                         made);
    }
    for (int32_t row = 0; row < tile_.size(); row += kBfloatRows) {
      int32_t rows = imin(kBfloatRows, tile_.size() - row);
      Interval piece = intersect(seen_by(scratch_.visible + row, rows, chunk.columns),
                                 {column, column + run.length});
      if (piece.empty()) continue;
      const int32_t first = piece.begin - column;
      int32_t place = first % kPanelKeys;
      const uint16_t* panel = packed ? reinterpret_cast<const uint16_t*>(keys_.panel(
                                           chunk.axis, tile_.slice, run.begin + first, &place))
                                     : made + int64_t{first - place} * head_dim;
      math_.bfloat->scores(query + int64_t{row} * head_dim, rows, head_dim, panel,
                           ceil_div(place + piece.size(), kPanelKeys),
                           scores_ + row * score_stride_ + piece.begin - place, score_stride_);
    }
    column += run.length;
  }
}

void QueryTile::bfloat_values(const Chunk& chunk) {
  constexpr int32_t kMaxBlocks = Chunk::kMaxColumns / kBfloatRows + 2 * Chunk::kMaxRuns;
  int32_t value_dim = params_.problem.value_dim, num_blocks = 0, column = 0;
  BfloatBlock blocks[kMaxBlocks];
  uint16_t *edge = scratch_.edges, *made = reinterpret_cast<uint16_t*>(scratch_.value);
  Interval any = seen_by(scratch_.visible, tile_.size(), chunk.columns);
  for (int32_t i = 0; i < chunk.num_runs; column += chunk.runs[i++].length) {
    const Run& run = chunk.runs[i];
    Interval piece = intersect(any, {column, column + run.length});
    if (piece.empty()) continue;
    const int32_t begin = run.begin + piece.begin - column;
    if (!values_.has_panels(chunk.axis)) {
      const int32_t rows = round_up(piece.size(), kBfloatRows);
      copy_bfloat_pairs(values_.at(chunk.axis, tile_.slice, begin), piece.size(), value_dim, made);
      clear_pairs(piece.size(), rows, value_dim, made);
      for (int32_t first = 0; first < rows; first += kBfloatRows, made += kBfloatRows * value_dim) {
        blocks[num_blocks++] = {
            made, piece.begin + first, {0, imin(piece.size() - first, kBfloatRows)}};
      }
      continue;
    }
    int32_t place;
    const uint16_t* values = values_.pair(chunk.axis, tile_.slice, begin, &place);
    for (int32_t first = -place; first < piece.size(); first += kBfloatRows) {
      Span inside = {imax(-first, 0), imin(piece.size() - first, kBfloatRows)};
      blocks[num_blocks] = {values, piece.begin + first, inside};
      if (inside.end - inside.begin < kBfloatRows) {
        copy_inside(values, inside, kBfloatRows, value_dim, edge);
        blocks[num_blocks].values = edge;
        edge += kBfloatRows * value_dim;
      }
      ++num_blocks;
      values += kBfloatRows * value_dim;
    }
  }
  for (int32_t row = 0; row < tile_.size(); row += kBfloatRows) {
    int32_t rows = imin(kBfloatRows, tile_.size() - row);
    Interval seen = seen_by(scratch_.visible + row, rows, chunk.columns);
    int32_t first = 0, end = num_blocks;
    while (first < end && blocks[first].column + kBfloatRows <= seen.begin) ++first;
    while (first < end && blocks[end - 1].column >= seen.end) --end;
    if (first == end || seen.empty()) continue;
    math_.bfloat->values(scores_ + row * score_stride_, score_stride_, rows, blocks + first,
                         end - first, value_dim, scratch_.rounded,
                         scratch_.out + int64_t{row} * value_dim);
  }
}

}  // namespace sparse_attn::cpu

// The products of a query tile with keys and values in bfloat16: groups of 32 rows, each with the
// columns that some row of the group sees. Values come in blocks of 32 rows, of which those that no
// row of the tile sees are zeros: P is 0 there, but 0 times NaN is not.
#include "cpu/tiled/query_tile.h"

namespace sparse_attn::cpu {

void QueryTile::bfloat_keys(const Chunk& chunk) {
  const int32_t head_dim = params_.problem.head_dim, columns = bfloat_columns(head_dim);
  const int32_t elements = columns * plan_.pack.parts;
  int32_t column = 0;
  const uint16_t* query = reinterpret_cast<const uint16_t*>(scratch_.query);
  uint16_t* made = reinterpret_cast<uint16_t*>(scratch_.key);
  for (int32_t i = 0; i < chunk.num_runs; ++i) {
    const ChunkRun& run = chunk.runs[i];
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
                                     : made + int64_t{first - place} * elements;
      math_.bfloat->scores(query + int64_t{row} * elements, rows, columns, plan_.pack.parts, panel,
                           ceil_div(place + piece.size(), kPanelKeys),
                           scores_ + row * score_stride_ + piece.begin - place, score_stride_);
    }
    column += run.length;
  }
}

void QueryTile::bfloat_values(const Chunk& chunk) {
  constexpr int32_t kMaxBlocks = Chunk::kMaxColumns / kBfloatRows + 2 * Chunk::kMaxRuns;
  const int32_t value_dim = params_.problem.value_dim, elements = out_dim_ * plan_.pack.parts;
  int32_t num_blocks = 0, column = 0;
  BfloatBlock blocks[kMaxBlocks];
  uint16_t *edge = scratch_.edges, *made = reinterpret_cast<uint16_t*>(scratch_.value);
  Interval any = seen_by(scratch_.visible, tile_.size(), chunk.columns);
  for (int32_t i = 0; i < chunk.num_runs; column += chunk.runs[i++].length) {
    const ChunkRun& run = chunk.runs[i];
    Interval piece = intersect(any, {column, column + run.length});
    if (piece.empty()) continue;
    const int32_t begin = run.begin + piece.begin - column;
    const bool packed = values_.has_panels(chunk.axis);
    const uint16_t* values = made;
    int32_t place = begin % 2;
    if (packed) {
      values = values_.pair(chunk.axis, tile_.slice, begin, &place);
    } else {
      const int32_t rows = round_up(place + piece.size(), kBfloatRows);
      copy_bfloat_pairs(math_, values_.at(chunk.axis, tile_.slice, begin), piece.size(), value_dim,
                        place, made);
      clear_pairs(place + piece.size(), rows, elements, made);
      made += int64_t{rows} * elements;
    }
    for (int32_t first = -place; first < piece.size(); first += kBfloatRows) {
      Span inside = {imax(-first, 0), imin(piece.size() - first, kBfloatRows)};
      blocks[num_blocks] = {values, piece.begin + first, inside};
      if (packed && inside.end - inside.begin < kBfloatRows) {
        copy_inside(values, inside, kBfloatRows, elements, edge);
        blocks[num_blocks].values = edge;
        edge += kBfloatRows * elements;
      }
      ++num_blocks;
      values += kBfloatRows * elements;
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
                         end - first, out_dim_, plan_.pack.parts,
                         scratch_.out + int64_t{row} * out_dim_);
  }
}

}  // namespace sparse_attn::cpu

// Token top-k of a query tile whose rows of scores are kept whole: a row's threshold is found among
// all its scores at once. Such a tile visits one run of keys. A key's column counts from the first
// panel, so that a panel which two chunks share writes the same scores twice.
#include "cpu/tiled/query_tile.h"

namespace sparse_attn::cpu {

/// Calls visit(chunk) for every chunk, with scores_ at its columns.
template <class Visit>
void QueryTile::for_each_of_whole_rows(const Visit& visit) {
  int32_t first = tile_.visited.main.begin / kPanelKeys * kPanelKeys;
  for_each_chunk(pattern_, tile_, plan_.chunk_keys, [&](const Chunk& chunk) {
    scores_ = scratch_.whole_scores + chunk.runs[0].begin - first;
    visit(chunk);
  });
  scores_ = scratch_.whole_scores;
}

/// Calls change(chunk, row), with what the row sees of the chunk in scratch_.visible.
template <class Change>
void QueryTile::change_whole_rows(const Change& change) {
  for_each_of_whole_rows([&](const Chunk& chunk) {
    find_visible(chunk);
    mask_.begin_chunk();
    for (int32_t row = 0; row < tile_.size(); ++row) change(chunk, row);
  });
}

/// What the rows see, in columns of whole rows; returns how many there are.
int32_t QueryTile::find_whole_visible() {
  Interval main = tile_.visited.main;
  int32_t first = main.begin / kPanelKeys * kPanelKeys;
  for (int32_t row = 0; row < tile_.size(); ++row) {
    Interval seen = intersect(scratch_.rows[row].keys, main);
    scratch_.visible[row] = seen.empty() ? Span{} : Span{seen.begin - first, seen.end - first};
  }
  return main.end - first;
}

bool QueryTile::score_whole_rows() {
  bool ran = true;
  score_stride_ = plan_.whole_stride;
  for_each_of_whole_rows([&](const Chunk& chunk) { ran = ran && score(chunk); });
  if (transforms()) {
    change_whole_rows([&](const Chunk& chunk, int32_t row) { prepare(chunk, row); });
  }
  return ran;
}

/// Selects each row's keys, with a threshold from the start that few others are above.
void QueryTile::select_from_whole_rows() {
  clear_kept();
  find_whole_visible();
  int32_t place = tile_.visited.main.begin % kPanelKeys;
  for (int32_t row = 0; row < tile_.size(); ++row) {
    float* scores = scores_ + row * score_stride_;
    TopkRow& kept = scratch_.kept[row];
    Span seen = scratch_.visible[row];
    if (seen.end - seen.begin > pattern_.topk) {
      kept.threshold = math_.low_threshold(scores, seen, pattern_.topk);
    }
    for (int32_t begin = seen.begin; begin < seen.end; begin += plan_.chunk_keys) {
      kept.add(math_, plan_.topk, scores + begin, imin(plan_.chunk_keys, seen.end - begin),
               begin - place);
    }
  }
  finish_kept();
}

/// Softmax and O += P v over whole rows, with -inf in place of what is not kept.
bool QueryTile::multiply_whole_rows() {
  SoftmaxTile softmax = softmax_tile();
  softmax.read = scratch_.read;
  int32_t columns = find_whole_visible();
  for (int32_t row = 0; row < tile_.size(); ++row) {
    Span seen = scratch_.visible[row];
    if (seen.end - seen.begin <= pattern_.topk) continue;
    math_.keep_only(scores_ + row * score_stride_, seen, pattern_.topk);
  }
  if (transforms()) {
    float scale = scale_ > 0 ? scale_ : 1.0f;
    change_whole_rows(
        [&](const Chunk& chunk, int32_t row) { transform_row(chunk, row, scores_, scale); });
    find_whole_visible();
  }
  find_read(columns);
  math_.online_softmax(softmax);
  bool ran = true, first = true;
  clear_out();
  for_each_of_whole_rows([&](const Chunk& chunk) {
    find_visible(chunk);
    ran = ran && multiply_values(chunk, first);
    first = false;
  });
  return ran;
}

}  // namespace sparse_attn::cpu

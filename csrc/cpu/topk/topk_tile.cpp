// Token top-k of a query tile: q.k chunk by chunk, the k highest of each row, softmax over those.
// Ranking is by scale q.k alone; softcap and the terms of attn_mask come after it, and a key that
// attn_mask hides is no candidate. Three ways, by how many keys a tile visits and how many of them
// are kept: candidates chunk by chunk; whole rows of scores (whole_rows.cpp), the kept values then
// added one by one; or whole rows and the dense product.
#include <cstring>

#include "cpu/tiled/query_tile.h"

namespace sparse_attn::cpu {

/// Makes scores what keys are ranked by: times a scale that is not positive, and -inf for what
/// attn_mask hides.
void QueryTile::prepare(const Chunk& chunk, int32_t row) {
  Span span = scratch_.visible[row];
  if (span.begin >= span.end) return;
  float* scores = scores_ + row * score_stride_;
  if (!(scale_ > 0)) {
    math_.transform(scores + span.begin, span.end - span.begin, scale_, 0, nullptr);
  }
  if (!mask_.present()) return;
  const float* terms = mask_.row(tile_, chunk, row);
  for (int32_t column = span.begin; column < span.end; ++column) {
    scores[column] =
        terms[column] == kMinusInfinity ? kMinusInfinity : scores[column];  // no branch: vectors
  }
}

void QueryTile::clear_kept() {
  for (int32_t row = 0; row < tile_.size(); ++row) {
    int64_t first = row * plan_.topk.stride;
    scratch_.kept[row] = {scratch_.kept_scores + first, scratch_.kept_columns + first};
  }
}

/// Leaves each row's k highest scores and what the softmax sees of them.
void QueryTile::finish_kept() {
  for (int32_t row = 0; row < tile_.size(); ++row) {
    scratch_.kept[row].finish(math_, plan_.topk);
    scratch_.visible[row] = {0, scratch_.kept[row].count};
  }
}

/// Selects each row's keys chunk by chunk; false on failure.
bool QueryTile::select_columns() {
  bool ran = true;
  int32_t first = 0;
  clear_kept();
  for_each_chunk(pattern_, tile_, plan_.chunk_keys, [&](const Chunk& chunk) {
    mask_.begin_chunk();
    ran = ran && score(chunk);
    for (int32_t row = 0; row < tile_.size() && ran; ++row) {
      Span span = scratch_.visible[row];
      if (span.begin >= span.end) continue;
      prepare(chunk, row);
      scratch_.kept[row].add(math_, plan_.topk, scores_ + row * score_stride_ + span.begin,
                             span.end - span.begin, first + span.begin);
    }
    first += chunk.columns;
  });
  finish_kept();
  return ran;
}

/// Calls visit(chunk, first column) for every chunk again.
template <class Visit>
void QueryTile::for_each_again(const Visit& visit) {
  int32_t column = 0;
  std::memset(scratch_.cursor, 0, sizeof(int32_t) * tile_.size());
  for_each_chunk(pattern_, tile_, plan_.chunk_keys, [&](const Chunk& chunk) {
    visit(chunk, column);
    column += chunk.columns;
  });
}

/// The row's kept entries before column `end`, from where the last call ended.
Span QueryTile::next_kept(int32_t row, int32_t end) {
  const TopkRow& kept = scratch_.kept[row];
  int32_t begin = scratch_.cursor[row];
  const int32_t* next = kept.columns + begin;
  for (int32_t n = kept.count - begin; n > 0;) {  // halves without a branch on a column
    int32_t half = (n + 1) / 2;
    next += half * (next[half - 1] < end);
    n -= half;
  }
  Span entries = {begin, static_cast<int32_t>(next - kept.columns)};
  scratch_.cursor[row] = entries.end;
  return entries;
}

/// Scale, softcap and mask of the kept scores.
void QueryTile::transform_kept() {
  float scale = scale_ > 0 ? scale_ : 1.0f;
  for_each_again([&](const Chunk& chunk, int32_t first) {
    mask_.begin_chunk();
    for (int32_t row = 0; row < tile_.size(); ++row) {
      Span entries = next_kept(row, first + chunk.columns);
      const TopkRow& kept = scratch_.kept[row];
      const float* terms = mask_.present() ? mask_.row(tile_, chunk, row) : nullptr;
      for (int32_t i = entries.begin; i < entries.end && mask_.present(); ++i) {
        scratch_.terms[i - entries.begin] = terms[kept.columns[i] - first];
      }
      math_.transform(kept.scores + entries.begin, entries.end - entries.begin, scale,
                      params_.scores.softcap, mask_.present() ? scratch_.terms : nullptr);
    }
  });
}

/// O += P v over the chunk's kept keys, one by one.
void QueryTile::add_kept(const Chunk& chunk, int32_t first) {
  for_each_part(chunk, [&](int32_t column, int32_t length, const Rows&, const Rows& value) {
    Rows from_column_0 = strided(value, -first - column, 1);
    for (int32_t row = 0; row < tile_.size(); ++row) {
      Span entries = next_kept(row, first + column + length);
      const TopkRow& kept = scratch_.kept[row];
      math_.row_accumulate(kept.scores + entries.begin, kept.columns + entries.begin,
                           entries.end - entries.begin, from_column_0, params_.problem.value_dim,
                           scratch_.out + int64_t{row} * out_dim_);
    }
    return true;
  });
}

bool QueryTile::add_kept_values() {
  if (transforms()) transform_kept();
  SoftmaxTile softmax = softmax_tile();
  softmax.scores = scratch_.kept_scores;
  softmax.stride = plan_.topk.stride;
  math_.online_softmax(softmax);
  clear_out();
  for_each_again([&](const Chunk& chunk, int32_t first) {
    gather(chunk);
    add_kept(chunk, first);
  });
  return true;
}

bool QueryTile::run_topk() {
  int32_t columns = tile_.visited.main.size();
  if (pattern_.list.present() || columns > plan_.whole_columns) {
    return select_columns() && add_kept_values();
  }
  if (!score_whole_rows()) return false;
  if (columns <= plan_.dense_columns) return multiply_whole_rows();
  select_from_whole_rows();
  return add_kept_values();
}

}  // namespace sparse_attn::cpu

// Token top-k of a query tile: q.k chunk by chunk, the k highest of each row, softmax over those.
// Ranking is by scale q.k alone; softcap and the terms of attn_mask come after it, and a key that
// attn_mask hides is no candidate.
#include <cstring>

#include "query_tile.h"

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kSparseShare = 3;  // fewer kept than 1/3 of the keys: values are added one by one

}  // namespace

/// Writes -inf over what attn_mask hides of what the row sees of the chunk.
void QueryTile::hide_masked(const Chunk& chunk, int32_t row, float* scores) {
  if (!mask_.present()) return;
  const float* terms = mask_.row(tile_, chunk, row);
  Span span = scratch_.visible[row];
  for (int32_t column = span.begin; column < span.end; ++column) {
    if (terms[column] == kHidden) scores[column] = kHidden;
  }
}

/// Chooses each row's keys; returns how many columns the tile visits, -1 on failure.
int32_t QueryTile::select_columns() {
  int32_t columns = 0;
  for (int32_t row = 0; row < tile_.size(); ++row) {
    scratch_.kept[row] = {scratch_.kept_scores + row * plan_.topk.stride,
                          scratch_.kept_columns + row * plan_.topk.stride};
  }
  for_each_chunk(pattern_, tile_, plan_.chunk_keys, [&](const Chunk& chunk) {
    if (columns < 0) return;
    mask_.begin_chunk();
    if (!score(chunk)) {
      columns = -1;
      return;
    }
    for (int32_t row = 0; row < tile_.size(); ++row) {
      float* scores = scratch_.scores + row * plan_.score_stride;
      Span span = scratch_.visible[row];
      if (span.begin >= span.end) continue;
      int32_t seen = span.end - span.begin;
      if (!(params_.scale > 0)) {
        math_.transform(scores + span.begin, seen, params_.scale, 0, nullptr);
      }
      hide_masked(chunk, row, scores);
      scratch_.kept[row].add(math_, plan_.topk, scores + span.begin, seen, columns + span.begin);
    }
    columns += chunk.columns;
  });
  for (int32_t row = 0; row < tile_.size(); ++row) {
    scratch_.kept[row].finish(math_, plan_.topk);
    scratch_.visible[row] = {0, scratch_.kept[row].count};
  }
  return columns;
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
  Span entries = {scratch_.cursor[row], scratch_.cursor[row]};
  constexpr int32_t kStep = 16;  // looked at without a branch for each
  int32_t before = kStep;
  for (; before == kStep && entries.end + kStep <= kept.count; entries.end += before) {
    before = 0;
    for (int32_t i = 0; i < kStep; ++i) before += kept.columns[entries.end + i] < end;
  }
  while (entries.end < kept.count && kept.columns[entries.end] < end) ++entries.end;
  scratch_.cursor[row] = entries.end;
  return entries;
}

/// Scale, softcap and mask of the kept scores.
void QueryTile::transform_kept() {
  float scale = params_.scale > 0 ? params_.scale : 1.0f;
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
                      params_.softcap, mask_.present() ? scratch_.terms : nullptr);
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
                           entries.end - entries.begin, from_column_0, params_.head_dim,
                           scratch_.out + int64_t{row} * params_.head_dim);
    }
    return true;
  });
}

/// O += P v by BLAS, with zeros in P for the keys that are not kept.
bool QueryTile::multiply_kept(const Chunk& chunk, int32_t first) {
  int32_t count = 0;
  for (int32_t row = 0; row < tile_.size(); ++row) {
    float* weights = scratch_.scores + row * plan_.score_stride;
    Span entries = next_kept(row, first + chunk.columns);
    const TopkRow& kept = scratch_.kept[row];
    std::memset(weights, 0, chunk.columns * sizeof(float));
    for (int32_t i = entries.begin; i < entries.end; ++i) {
      weights[kept.columns[i] - first] = kept.scores[i];
    }
    count += entries.end - entries.begin;
  }
  return count == 0 || multiply_values(chunk, nullptr, false);
}

bool QueryTile::run_topk() {
  int32_t columns = select_columns();
  if (columns < 0) return false;
  if (transforms()) transform_kept();
  SoftmaxTile softmax = softmax_tile();
  softmax.scores = scratch_.kept_scores;
  softmax.stride = plan_.topk.stride;
  math_.online_softmax(softmax);
  clear_out();
  bool ran = true, sparse = row_by_row_ || pattern_.topk < columns / kSparseShare;
  for_each_again([&](const Chunk& chunk, int32_t first) {
    gather(chunk);
    if (sparse) {
      add_kept(chunk, first);
    } else {
      ran = ran && multiply_kept(chunk, first);
    }
  });
  return ran;
}

}  // namespace sparse_attn::cpu

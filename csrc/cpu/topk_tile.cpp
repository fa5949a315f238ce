// Token top-k of a query tile: whole rows of q.k, the k highest of each, softmax over those.
// Ranking is by scale q.k alone; softcap and the terms of attn_mask come after it, and a key that
// attn_mask hides is no candidate.
#include <cstring>

#include "query_tile.h"
#include "select_topk.h"

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kSparseShare = 8;  // fewer kept than 1/8 of the keys: values are added one by one

/// Columns [0, count) of P to the kept columns of the whole row, zeros elsewhere.
void expand(float* weights, const int32_t* kept, int32_t count, int32_t columns) {
  int32_t end = columns;
  for (int32_t i = count - 1; i >= 0; --i) {
    float weight = weights[i];
    std::memset(weights + kept[i] + 1, 0, (end - kept[i] - 1) * sizeof(float));
    weights[kept[i]] = weight;
    end = kept[i];
  }
  std::memset(weights, 0, end * sizeof(float));
}

}  // namespace

/// Writes -inf over what the row does not see of the chunk.
void QueryTile::hide_unseen(const Chunk& chunk, int32_t row, float* scores) {
  Span span = scratch_.visible[row];
  for (int32_t column = 0; column < span.begin; ++column) scores[column] = kHidden;
  for (int32_t column = span.end; column < chunk.columns; ++column) scores[column] = kHidden;
  if (!mask_.present()) return;
  const float* terms = mask_.row(tile_, chunk, row);
  for (int32_t column = span.begin; column < span.end; ++column) {
    if (terms[column] == kHidden) scores[column] = kHidden;
  }
}

/// Fills the rows of scores and where each ends; returns how many columns there are, -1 on failure.
int32_t QueryTile::score_whole_rows() {
  int32_t columns = 0;
  std::memset(scratch_.seen_end, 0, sizeof(int32_t) * tile_.size());
  for_each_chunk(pattern_, tile_, plan_.chunk_keys, [&](const Chunk& chunk) {
    if (columns < 0 || columns + chunk.columns > plan_.score_columns) return;
    mask_.begin_chunk();
    gather(chunk);
    if (!multiply_keys(chunk, scratch_.scores + columns)) {
      columns = -1;
      return;
    }
    find_visible(chunk, scratch_.scores + columns);
    for (int32_t row = 0; row < tile_.size(); ++row) {
      float* scores = scratch_.scores + row * plan_.score_stride + columns;
      if (!(params_.scale > 0)) {
        math_.transform(scores, chunk.columns, params_.scale, 0, nullptr);
      }
      hide_unseen(chunk, row, scores);
      Span span = scratch_.visible[row];
      if (span.begin < span.end) scratch_.seen_end[row] = columns + span.end;
    }
    columns += chunk.columns;
  });
  return columns;
}

/// Chooses each row's columns and moves their scores to the front.
void QueryTile::select_columns() {
  for (int32_t row = 0; row < tile_.size(); ++row) {
    float* scores = scratch_.scores + row * plan_.score_stride;
    int32_t* kept = scratch_.kept + row * plan_.kept_stride;
    int32_t count = select_topk(math_, scores, scratch_.seen_end[row], pattern_.topk,
                                scratch_.candidates, scratch_.ranks);
    std::memcpy(kept, scratch_.candidates, count * sizeof(int32_t));
    for (int32_t i = 0; i < count; ++i) scores[i] = scores[kept[i]];
    scratch_.visible[row] = {0, count};
  }
}

/// Calls visit(chunk, first column) for the chunks that have been scored.
template <class Visit>
void QueryTile::for_each_scored(int32_t columns, const Visit& visit) {
  int32_t column = 0;
  for_each_chunk(pattern_, tile_, plan_.chunk_keys, [&](const Chunk& chunk) {
    if (column + chunk.columns > columns) return;
    visit(chunk, column);
    column += chunk.columns;
  });
}

/// The row's kept entries in columns [begin, end), given where the last call ended.
Span QueryTile::next_kept(int32_t row, int32_t end) {
  const int32_t* kept = scratch_.kept + row * plan_.kept_stride;
  Span entries = {scratch_.cursor[row], scratch_.cursor[row]};
  while (entries.end < scratch_.visible[row].end && kept[entries.end] < end) ++entries.end;
  scratch_.cursor[row] = entries.end;
  return entries;
}

/// Scale, softcap and mask of the kept scores.
void QueryTile::transform_kept(int32_t columns) {
  float scale = params_.scale > 0 ? params_.scale : 1.0f;
  std::memset(scratch_.cursor, 0, sizeof(int32_t) * tile_.size());
  for_each_scored(columns, [&](const Chunk& chunk, int32_t first) {
    mask_.begin_chunk();
    for (int32_t row = 0; row < tile_.size(); ++row) {
      Span entries = next_kept(row, first + chunk.columns);
      const int32_t* kept = scratch_.kept + row * plan_.kept_stride;
      const float* terms = mask_.present() ? mask_.row(tile_, chunk, row) : nullptr;
      for (int32_t i = entries.begin; i < entries.end && mask_.present(); ++i) {
        scratch_.terms[i - entries.begin] = terms[kept[i] - first];
      }
      math_.transform(scratch_.scores + row * plan_.score_stride + entries.begin,
                      entries.end - entries.begin, scale, params_.softcap,
                      mask_.present() ? scratch_.terms : nullptr);
    }
  });
}

/// out = P v over the kept keys: one by one where they are few, else by BLAS on expanded rows.
bool QueryTile::weigh_kept(int32_t columns) {
  bool ran = true, sparse = row_by_row_ || pattern_.topk < columns / kSparseShare;
  clear_out();
  std::memset(scratch_.cursor, 0, sizeof(int32_t) * tile_.size());
  for (int32_t row = 0; row < tile_.size() && !sparse; ++row) {
    expand(scratch_.scores + row * plan_.score_stride, scratch_.kept + row * plan_.kept_stride,
           scratch_.visible[row].end, columns);
  }
  for_each_scored(columns, [&](const Chunk& chunk, int32_t first) {
    gather(chunk);
    if (!sparse) {
      int32_t kept = 0;
      for (int32_t row = 0; row < tile_.size(); ++row) {
        Span entries = next_kept(row, first + chunk.columns);
        kept += entries.end - entries.begin;
      }
      if (kept > 0) ran = ran && multiply_values(chunk, scratch_.scores + first, false);
      return;
    }
    for_each_part(chunk, [&](int32_t column, int32_t length, const Rows&, const Rows& value) {
      for (int32_t row = 0; row < tile_.size(); ++row) {
        Span entries = next_kept(row, first + column + length);
        int32_t* kept = scratch_.kept + row * plan_.kept_stride;
        for (int32_t i = entries.begin; i < entries.end; ++i) kept[i] -= first + column;
        math_.row_accumulate(scratch_.scores + row * plan_.score_stride + entries.begin,
                             kept + entries.begin, entries.end - entries.begin, value,
                             params_.head_dim, scratch_.out + int64_t{row} * params_.head_dim);
      }
      return true;
    });
  });
  return ran;
}

bool QueryTile::run_topk() {
  int32_t columns = score_whole_rows();
  if (columns < 0) return false;
  select_columns();
  if (transforms()) transform_kept(columns);
  SoftmaxTile softmax = softmax_tile();
  for (int32_t row = 0; row < tile_.size(); ++row) {
    softmax.columns = imax(softmax.columns, scratch_.visible[row].end);
  }
  math_.online_softmax(softmax);
  return weigh_kept(columns);
}

}  // namespace sparse_attn::cpu

// Estimates by selector. A row's scores are scale * q.k with softcap, in float32; sums over rows
// and keys are float64.
#include "cpu/select/select_estimate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "cpu/tensor_rows.h"

namespace sparse_attn::cpu {
namespace {

/// Divides shares by their sum; where that is 0 they stay.
void normalise(Interval blocks, double* share) {
  double total = 0;
  for (int32_t j = blocks.begin; j < blocks.end; ++j) total += share[j];
  if (total == 0) return;
  for (int32_t j = blocks.begin; j < blocks.end; ++j) share[j] /= total;
}

Interval rows_of_group(Interval rows, int32_t size, int32_t index) {
  return intersect(rows, {rows.begin + index * size, rows.begin + (index + 1) * size});
}

/// row += the row of half or single precision.
void add_row(const VectorMath& math, const Rows& rows, int64_t index, int32_t head_dim,
             float* sum) {
  float row[kMaxHeadDim];
  math.to_float(rows.element, strided(rows, index, 1).data, row, head_dim);
  for (int32_t d = 0; d < head_dim; ++d) sum[d] += row[d];
}

}  // namespace

void join_halves(Interval blocks, double* share, double* half) {
  normalise(blocks, share);
  normalise(blocks, half);
  for (int32_t j = blocks.begin; j < blocks.end; ++j) share[j] += half[j];
}

BlockEstimator::BlockEstimator(const SelectParams& params, int64_t workers, Arena* arena)
    : params_(params),
      math_(vector_math()),
      width_(params.selector == Selector::kMinMax ? 2 * params.problem.head_dim
                                                  : params.problem.head_dim),
      groups_(params.selector == Selector::kMixed ? params.groups : 1),
      slash_step_(std::gcd(params.block_q, params.block_kv)),
      num_slashes_(
          (int64_t{params.num_q} * params.block_q + int64_t{params.num_kv} * params.block_kv) /
          slash_step_),
      sketch_masses_(params, workers, arena) {
  const bool sketched = params.selector == Selector::kSketch;  // which reads no keys or means
  int64_t batch = params.problem.batch, keys = sketched ? 0 : params.problem.seq_kv;
  int64_t num_vectors = sketched ? 0 : int64_t{params.num_kv} * groups_;
  exists_ = arena->take<uint8_t>(batch * keys);
  present_ = arena->take<uint8_t>(batch * num_vectors);
  vectors_ = arena->take<float>(batch * params.problem.heads_kv * num_vectors * width_);
  bool lines = params.selector == Selector::kVerticalSlash;
  columns_ = arena->take<double>(lines ? batch * params.problem.heads_q * params.num_kv : 0);
  slashes_ = arena->take<double>(lines ? batch * params.problem.heads_q * num_slashes_ : 0);
  scores_ = arena->take<float>(workers * 2 * (keys + num_vectors));
  half_ = arena->take<double>(workers * params.num_kv);
  differences_ = arena->take<double>(lines ? workers * (keys + kLastRows) : 0);
}

BlockEstimator::Scratch BlockEstimator::scratch(int32_t worker) const {
  int64_t keys = params_.problem.seq_kv + int64_t{params_.num_kv} * groups_;
  float* scores = scores_ + worker * 2 * keys;
  return {scores, scores + keys, half_ + int64_t{worker} * params_.num_kv,
          differences_ + int64_t{worker} * (params_.problem.seq_kv + kLastRows)};
}

BlockEstimator::KeyVectors BlockEstimator::vectors(int64_t batch, int64_t head_q) const {
  int64_t count = int64_t{params_.num_kv} * groups_;
  int64_t head = batch * params_.problem.heads_kv + head_q / params_.problem.group();
  return {vectors_ + head * count * width_, present_ + batch * count};
}

int64_t BlockEstimator::difference(int32_t query_block, int32_t key_block) const {
  int64_t rows = int64_t{query_block} * params_.block_q;
  int64_t keys = int64_t{params_.num_kv - key_block} * params_.block_kv;
  return (rows + keys) / slash_step_;
}

void BlockEstimator::find_keys(int64_t batch) const {
  uint8_t* exists = exists_ + batch * params_.problem.seq_kv;
  std::memset(exists, 0, params_.problem.seq_kv);
  int32_t heads = params_.scores.bounds.stride_h == 0 ? 1 : params_.problem.heads_q;
  int32_t first = params_.rows_grow() ? params_.problem.seq_q - 1 : 0;
  const Interval held = {0, params_.held_keys(batch)};
  Interval marked = {0, 0};
  for (int32_t head = 0; head < heads; ++head) {
    for (int32_t i = first; i < params_.problem.seq_q; ++i) {
      const Interval keys = intersect(params_.keys_of_row(batch, head, i), held);
      if (keys.empty() || marked.holds(keys)) continue;
      std::memset(exists + keys.begin, 1, keys.size());
      marked = keys;
    }
  }
  int32_t size = params_.block_kv / groups_;
  uint8_t* present = present_ + batch * params_.num_kv * groups_;
  for (int32_t group = 0; group < params_.num_kv * groups_; ++group) {
    const uint8_t* begin =
        exists + std::min(int64_t{group} * size, int64_t{params_.problem.seq_kv});
    const uint8_t* end =
        exists + std::min(int64_t{group + 1} * size, int64_t{params_.problem.seq_kv});
    present[group] = std::find(begin, end, 1) != end;
  }
}

void BlockEstimator::pool_keys(int64_t batch, int64_t head_kv, int32_t block) const {
  if (params_.selector == Selector::kAntidiagonal || params_.selector == Selector::kScores ||
      params_.selector == Selector::kVerticalSlash) {
    return;
  }
  int64_t head = batch * params_.problem.heads_kv + head_kv;
  float* vector = vectors_ + (head * params_.num_kv + block) * groups_ * width_;
  Interval range = {block * params_.block_kv,
                    imin((block + 1) * params_.block_kv, params_.problem.seq_kv)};
  if (params_.selector == Selector::kMinMax) return pool_extremes(batch, head_kv, range, vector);
  for (int32_t group = 0; group < groups_; ++group, vector += width_) {
    std::memset(vector, 0, width_ * sizeof(float));
    const Interval members = rows_of_group(range, params_.block_kv / groups_, group);
    const int32_t count = sum_keys(batch, head_kv, members, vector);
    if (count == 0) continue;
    for (int32_t d = 0; d < width_; ++d) vector[d] /= static_cast<float>(count);
  }
}

/// Adds the keys that exist, or what a given sketch has of them; returns how many.
int32_t BlockEstimator::sum_keys(int64_t batch, int64_t head_kv, Interval keys, float* sum) const {
  const SketchView& sketch = params_.sketch;
  const Problem& problem = params_.problem;
  const Rows rows = rows_of(params_.keys.key, problem.dtype, batch, head_kv);
  const uint8_t* exists = exists_ + batch * problem.seq_kv;
  const int32_t step = sketch.present() ? sketch.group : 1;  // keys that are added at once
  int32_t count = 0;
  for (int32_t j = keys.begin; j < keys.end;) {
    const int32_t begin = j, end = imin((j / step + 1) * step, keys.end);
    while (j < end && exists[j]) ++j;
    count += j - begin;
    if (j == begin) {
      ++j;
    } else if (sketch.present()) {
      add_sketched_keys(sketch, problem.dtype, params_.sketch_entry(sketch, batch, begin), head_kv,
                        SelectParams::sketch_row(sketch, begin), j - begin, sum);
    } else {
      add_row(math_, rows, begin, problem.head_dim, sum);
    }
  }
  return count;
}

/// The greatest and the least elements, NaN aside: of the keys that exist, or of a given sketch's
/// groups with such a key.
void BlockEstimator::pool_extremes(int64_t batch, int64_t head_kv, Interval keys,
                                   float* extremes) const {
  const SketchView& sketch = params_.sketch;
  const Problem& problem = params_.problem;
  const Rows rows = rows_of(params_.keys.key, problem.dtype, batch, head_kv);
  const uint8_t* exists = exists_ + batch * problem.seq_kv;
  const int32_t step = sketch.present() ? sketch.group : 1;
  float* greatest = extremes;
  float* least = extremes + problem.head_dim;
  std::fill(greatest, least, kMinusInfinity);
  std::fill(least, least + problem.head_dim, -kMinusInfinity);
  for (int32_t j = keys.begin; j < keys.end; j += step) {
    const uint8_t* end = exists + imin(j + step, keys.end);
    if (std::find(exists + j, end, 1) == end) continue;
    float low[kMaxHeadDim], high[kMaxHeadDim];
    if (sketch.present()) {
      sketch_ranges(sketch, problem.dtype, params_.sketch_entry(sketch, batch, j), head_kv,
                    SelectParams::sketch_row(sketch, j), low, high);
    } else {
      math_.to_float(rows.element, strided(rows, j, 1).data, low, problem.head_dim);
      std::copy(low, low + problem.head_dim, high);
    }
    for (int32_t d = 0; d < problem.head_dim; ++d) {
      greatest[d] = high[d] > greatest[d] ? high[d] : greatest[d];
      least[d] = low[d] < least[d] ? low[d] : least[d];
    }
  }
}

void BlockEstimator::mean_query(const QueryBlock& block, Interval rows, float* mean) const {
  std::memset(mean, 0, params_.problem.head_dim * sizeof(float));
  Rows queries = rows_of(params_.query, params_.problem.dtype, block.batch, block.head_q);
  for (int32_t i = rows.begin; i < rows.end; ++i) {
    add_row(math_, queries, i, params_.problem.head_dim, mean);
  }
  for (int32_t d = 0; d < params_.problem.head_dim; ++d) mean[d] /= static_cast<float>(rows.size());
}

/// share[element / per_block] += softmax over the elements seen that are present.
void BlockEstimator::add_softmax(float* scores, Interval seen, const uint8_t* present,
                                 int32_t per_block, double* share) const {
  float highest = kMinusInfinity;
  for (int32_t x = seen.begin; x < seen.end; ++x) {
    if (present != nullptr && !present[x]) scores[x] = kMinusInfinity;
    highest = scores[x] > highest ? scores[x] : highest;
  }
  double total = 0;
  for (int32_t x = seen.begin; x < seen.end; ++x) {
    bool hidden = present != nullptr && !present[x];
    scores[x] = hidden ? 0.0f : std::exp(scores[x] - highest);
    total += scores[x];
  }
  if (total == 0) return;
  for (int32_t x = seen.begin; x < seen.end; ++x) share[x / per_block] += scores[x] / total;
}

/// Scores of one row and the keys that it sees, which are returned.
Interval BlockEstimator::score_keys(const QueryBlock& block, int32_t row, float* scores) const {
  Interval keys = params_.keys_of_row(block.batch, block.head_q, row);
  if (keys.empty()) return {};
  float query[kMaxHeadDim];
  mean_query(block, {row, row + 1}, query);
  Rows rows = rows_of(params_.keys.key, params_.problem.dtype, block.batch,
                      block.head_q / params_.problem.group());
  math_.row_scores(query, 0, 1, strided(rows, keys.begin, 1), keys.size(), params_.problem.head_dim,
                   scores + keys.begin, 0);
  math_.transform(scores + keys.begin, keys.size(), params_.scores.scale, params_.scores.softcap,
                  nullptr);
  return keys;
}

/// Means of groups of queries against means of groups of keys.
void BlockEstimator::add_groups(const QueryBlock& block, double* share) const {
  Interval rows = params_.rows_of_block(block.batch, block.index);
  KeyVectors keys = vectors(block.batch, block.head_q);
  float* scores = scratch(block.worker).scores;
  int32_t keys_a_group = params_.block_kv / groups_;
  for (int32_t group = 0; group < groups_; ++group) {
    Interval members = rows_of_group(rows, params_.block_q / groups_, group);
    Interval seen = SelectParams::blocks_of(
        params_.keys_of_rows(block.batch, block.head_q, members), keys_a_group);
    if (seen.empty()) continue;
    float query[kMaxHeadDim];
    mean_query(block, members, query);
    Rows vectors = {keys.data + int64_t{seen.begin} * width_, width_, Element::kFloat32};
    math_.row_scores(query, 0, 1, vectors, seen.size(), width_, scores + seen.begin, 0);
    math_.transform(scores + seen.begin, seen.size(), params_.scores.scale, params_.scores.softcap,
                    nullptr);
    add_softmax(scores, seen, keys.present, groups_, share);
  }
}

/// Rows row_step - 1, 2 row_step - 1, ... against every key.
void BlockEstimator::add_sampled_rows(const QueryBlock& block, double* share) const {
  Interval rows = params_.rows_of_block(block.batch, block.index);
  float* scores = scratch(block.worker).scores;
  int32_t first = static_cast<int32_t>(round_up(rows.begin + 1, params_.row_step)) - 1;
  for (int64_t i = first; i < rows.end; i += params_.row_step) {
    Interval keys = score_keys(block, static_cast<int32_t>(i), scores);
    if (!keys.empty()) add_softmax(scores, keys, nullptr, params_.block_kv, share);
  }
}

/// Squares of `stride` rows and keys: the mean of scale q.k over the pairs of an antidiagonal that
/// exist, softmax over the squares of `stride` rows.
void BlockEstimator::add_antidiagonals(const QueryBlock& block, double* share) const {
  const int32_t stride = params_.stride;
  Interval rows = params_.rows_of_block(block.batch, block.index);
  Rows keys = rows_of(params_.keys.key, params_.problem.dtype, block.batch,
                      block.head_q / params_.problem.group());
  const uint8_t* exists = exists_ + block.batch * params_.problem.seq_kv;
  float* scores = scratch(block.worker).scores;
  float* products = scratch(block.worker).products;
  for (; !rows.empty(); rows.begin += stride) {
    Interval members = {rows.begin, imin(rows.begin + stride, rows.end)};
    Interval seen =
        SelectParams::blocks_of(params_.keys_of_rows(block.batch, block.head_q, members), stride);
    if (seen.empty()) continue;
    // Pairs that exist are counted in `present`; a square without one says nothing.
    uint8_t* present =
        reinterpret_cast<uint8_t*>(products + ceil_div(params_.problem.seq_kv, stride));
    std::fill(scores + seen.begin, scores + seen.end, 0.0f);
    std::memset(present + seen.begin, 0, seen.size());
    for (int32_t s = 0; s < members.size(); ++s) {
      int32_t first = seen.begin * stride + stride - 1 - s;
      int32_t count = imin(seen.size(), ceil_div(params_.problem.seq_kv - first, stride));
      if (count <= 0) continue;
      float query[kMaxHeadDim];
      mean_query(block, {members.begin + s, members.begin + s + 1}, query);
      math_.row_scores(query, 0, 1, strided(keys, first, stride), count, params_.problem.head_dim,
                       products, 0);
      for (int32_t x = 0; x < count; ++x) {
        if (!exists[first + x * stride]) continue;
        scores[seen.begin + x] += products[x];
        ++present[seen.begin + x];
      }
    }
    for (int32_t x = seen.begin; x < seen.end; ++x) {
      if (present[x] > 0) scores[x] /= static_cast<float>(present[x]);
    }
    math_.transform(scores + seen.begin, seen.size(), params_.scores.scale, params_.scores.softcap,
                    nullptr);
    add_softmax(scores, seen, present, params_.block_kv / stride, share);
  }
}

/// The most that a row's score can be in a block: sum over d of max(q_d least_d, q_d greatest_d).
void BlockEstimator::add_bounds(const QueryBlock& block, double* share) const {
  Interval rows = params_.rows_of_block(block.batch, block.index);
  KeyVectors keys = vectors(block.batch, block.head_q);
  float* scores = scratch(block.worker).scores;
  const float sign = params_.scores.scale < 0 ? -1.0f : 1.0f;
  for (int32_t i = rows.begin; i < rows.end; ++i) {
    Interval seen = SelectParams::blocks_of(params_.keys_of_row(block.batch, block.head_q, i),
                                            params_.block_kv);
    if (seen.empty()) continue;
    float query[kMaxHeadDim], parts[2 * kMaxHeadDim];
    mean_query(block, {i, i + 1}, query);
    for (int32_t d = 0; d < params_.problem.head_dim; ++d) {
      float x = sign * query[d];
      parts[d] = x > 0 ? x : 0.0f;
      parts[params_.problem.head_dim + d] = x > 0 ? 0.0f : x;
    }
    Rows extremes = {keys.data + int64_t{seen.begin} * width_, width_, Element::kFloat32};
    math_.row_scores(parts, 0, 1, extremes, seen.size(), width_, scores + seen.begin, 0);
    math_.transform(scores + seen.begin, seen.size(), sign * params_.scores.scale,
                    params_.scores.softcap, nullptr);
    add_softmax(scores, seen, keys.present, 1, share);
  }
}

void BlockEstimator::score_means(const QueryBlock& block, Interval visible, double* rank) const {
  KeyVectors keys = vectors(block.batch, block.head_q);
  float* scores = scratch(block.worker).scores;
  float query[kMaxHeadDim];
  mean_query(block, params_.rows_of_block(block.batch, block.index), query);
  Rows vectors = {keys.data + int64_t{visible.begin} * width_, width_, Element::kFloat32};
  math_.row_scores(query, 0, 1, vectors, visible.size(), width_, scores, 0);
  math_.transform(scores, visible.size(), params_.scores.scale, params_.scores.softcap, nullptr);
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    rank[j] = keys.present[j] ? scores[j - visible.begin] : kMinusInfinity;
  }
}

namespace {

/// Shares by the softmax of scores; NaN and infinity, which keep their blocks, stand apart.
void shares_of_scores(Interval visible, double* share, double* rank) {
  double highest = kMinusInfinity;
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    if (rank[j] == std::numeric_limits<double>::infinity()) rank[j] = std::nan("");
    highest = rank[j] > highest ? rank[j] : highest;
  }
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    share[j] = rank[j] == kMinusInfinity ? 0.0 : std::exp(rank[j] - highest);
  }
}

}  // namespace

void BlockEstimator::estimate(const QueryBlock& block, Interval visible, double* share,
                              double* rank) const {
  std::fill(share + visible.begin, share + visible.end, 0.0);
  switch (params_.selector) {
    case Selector::kMean:
      score_means(block, visible, rank);
      keep_not_held(block, rank);
      return shares_of_scores(visible, share, rank);
    case Selector::kScores: {
      const float* scores = params_.given.row(block.batch, block.head_q, block.index);
      for (int32_t j = visible.begin; j < visible.end; ++j) {
        rank[j] = scores[j * params_.given.stride_kv];
      }
      return shares_of_scores(visible, share, rank);
    }
    case Selector::kMixed: {
      double* half = scratch(block.worker).half;
      std::fill(half + visible.begin, half + visible.end, 0.0);
      add_groups(block, share);
      add_sampled_rows(block, half);
      join_halves(visible, share, half);
      break;
    }
    case Selector::kAntidiagonal:
      add_antidiagonals(block, share);
      break;
    case Selector::kMinMax:
      add_bounds(block, share);
      keep_not_held(block, share);
      break;
    case Selector::kSketch:
      add_sketched_rows(block, share);
      keep_not_held(block, share);
      break;
    case Selector::kVerticalSlash:
      add_lines(block, visible, share);
      break;
  }
  std::copy(share + visible.begin, share + visible.end, rank + visible.begin);
}

}  // namespace sparse_attn::cpu

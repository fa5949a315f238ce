// The steps of one query tile: S = q k^T per chunk, what each row sees of it, online softmax, O +=
// P v.
#include "cpu/tiled/query_tile.h"

#include <cmath>
#include <cstring>

#include "cpu/torch_host.h"

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kGatherBelow = 128;  // keys of a run that are worth a product of their own

}  // namespace

TileScratch::TileScratch(const AttentionParams& params, const Plan& plan, Arena* arena) {
  int64_t max_rows = round_up(plan.query.max_rows(), kBfloatRows);  // whole groups of bfloat16
  const int32_t head_dim = params.problem.head_dim;
  const int64_t value_dim = plan.pack.columns(params.problem.value_dim);
  query = arena->take<float>(max_rows * plan.pack.row_floats(head_dim));
  out = arena->take<float>(max_rows * value_dim);
  // Panels that begin before a chunk write into the end of the row before.
  scores = arena->take<float>(max_rows * plan.score_stride + kPanelKeys);
  if (scores != nullptr) scores += kPanelKeys;
  m = arena->take<float>(max_rows);
  l = arena->take<float>(max_rows);
  rows = arena->take<Row>(max_rows);
  visible = arena->take<Span>(max_rows);
  read = arena->take<Span>(max_rows);
  if (params.scores.mask.kind != MaskKind::kNone || params.scores.alibi.slopes != nullptr)
    mask = arena->take<float>(plan.chunk_keys);
  const int64_t runs = params.pattern.list.present() ? Chunk::kMaxRuns : 1;
  if (plan.pack.panels ? !plan.pack.key : params.pattern.list.present()) {
    key = arena->take<float>(plan.chunk_keys * plan.pack.row_floats(head_dim));
    const int64_t pairs = (plan.chunk_keys + runs * kBfloatRows) / 2;  // a float's room each
    const int64_t rows = plan.pack.bfloat   ? pairs * plan.pack.parts
                         : plan.pack.panels ? 0
                                            : plan.chunk_keys;
    value = arena->take<float>(rows * value_dim);
  }
  if (plan.pack.bfloat)
    edges = arena->take<uint16_t>(2 * runs * kBfloatRows * value_dim * plan.pack.parts);
  if (params.pattern.topk == 0) return;
  if (plan.whole_columns > 0) whole_scores = arena->take<float>(max_rows * plan.whole_stride);
  if (plan.dense_columns == params.problem.seq_kv) return;
  kept = arena->take<TopkRow>(max_rows);
  kept_scores = arena->take<float>(max_rows * plan.topk.stride);
  kept_columns = arena->take<int32_t>(max_rows * plan.topk.stride);
  cursor = arena->take<int32_t>(max_rows);
  terms = arena->take<float>(plan.chunk_keys);
}

QueryTile::QueryTile(const AttentionParams& params, const Pattern& pattern, const Plan& plan,
                     const VectorMath& math, const Tile& tile, const PackedHead& packed,
                     const TileScratch& scratch)
    : params_(params),
      pattern_(pattern),
      plan_(plan),
      math_(math),
      tile_(tile),
      scratch_(scratch),
      keys_(pattern, plan.pack, params.problem.head_dim,
            rows_of(params.keys.key, params.problem.dtype, tile.batch, tile.head_kv), packed.key,
            packed.side_key),
      values_(pattern, plan.pack, params.problem.value_dim,
              rows_of(params.keys.value, params.problem.dtype, tile.batch, tile.head_kv),
              packed.value, packed.side_value),
      mask_(params, pattern, math, scratch.mask),
      scale_(params.score_scale(tile.batch, tile.head)),
      bfloat_(plan.pack.bfloat),
      panels_(plan.pack.panels),
      row_by_row_(!panels_ && tile.rows.size() <= plan.few_rows),
      out_dim_(plan.pack.columns(params.problem.value_dim)),
      scores_(scratch.scores),
      score_stride_(plan.score_stride) {}

bool QueryTile::transforms() const {
  constexpr Features kPlain = kScaledScores.with(Features::of(Feature::kOddScale));
  return !params_.features.within(kPlain) || !(scale_ > 0);
}

bool QueryTile::run() {
  load_queries();
  if (bfloat_) math_.bfloat->begin();
  bool ran = pattern_.topk > 0 ? run_topk() : run_online();
  if (bfloat_) math_.bfloat->end();
  finish();
  return ran;
}

void QueryTile::load_queries() {
  // Panels take a row's elements one by one, so the caller's float32 rows do as well as a copy.
  bool copies = !panels_ || params_.problem.dtype != Dtype::kFloat32 || tile_.num_heads > 1;
  query_ = scratch_.query;
  query_stride_ = params_.problem.head_dim;
  if (!copies) {
    Rows head = rows_of(params_.query, params_.problem.dtype, tile_.batch, tile_.head);
    Rows rows = strided(head, tile_.query_of(0), tile_.slice.rows.step);
    query_ = static_cast<const float*>(rows.data);
    query_stride_ = rows.stride;
  }
  for (int32_t row = 0; row < tile_.size(); ++row) {
    int32_t query = tile_.query_of(row);
    Rows head = rows_of(params_.query, params_.problem.dtype, tile_.batch, tile_.head_of(row));
    int64_t target = int64_t{row} * params_.problem.head_dim;
    if (bfloat_) {
      const int32_t elements = elements_of(head.element, params_.problem.head_dim);
      copy_bfloat_row(math_, head, query, params_.problem.head_dim,
                      reinterpret_cast<uint16_t*>(scratch_.query) + int64_t{row} * elements);
    } else if (copies) {
      copy_rows(math_, strided(head, query, 1), 1, params_.problem.head_dim,
                scratch_.query + target);
    }
    Interval bounds =
        params_.scores.bounds.row(tile_.batch, tile_.head_of(row), query, params_.problem.seq_kv);
    scratch_.rows[row] = make_row(pattern_, tile_.slice, tile_.slice_row(row), bounds);
    scratch_.m[row] = kMinusInfinity;
    scratch_.l[row] = 0;
  }
}

/// Copies short runs together, so that one product takes them all.
void QueryTile::gather(const Chunk& chunk) {
  gathered_ = !row_by_row_ && !panels_ && chunk.num_runs > 1 &&
              chunk.columns < chunk.num_runs * kGatherBelow;
  if (!gathered_) return;
  int64_t column = 0;
  for (int32_t i = 0; i < chunk.num_runs; ++i) {
    const ChunkRun& run = chunk.runs[i];
    const int32_t head_dim = params_.problem.head_dim, value_dim = params_.problem.value_dim;
    copy_rows(math_, keys_.at(chunk.axis, tile_.slice, run.begin), run.length, head_dim,
              scratch_.key + column * head_dim);
    copy_rows(math_, values_.at(chunk.axis, tile_.slice, run.begin), run.length, value_dim,
              scratch_.value + column * value_dim);
    column += run.length;
  }
}

bool QueryTile::multiply_keys(const Chunk& chunk) {
  int32_t head_dim = params_.problem.head_dim;
  if (panels_) {
    bfloat_ ? bfloat_keys(chunk) : panel_keys(chunk);
    return true;
  }
  if (row_by_row_) {
    return for_each_part(chunk, [&](int32_t column, int32_t length, const Rows& key, const Rows&) {
      math_.row_scores(scratch_.query, head_dim, tile_.size(), key, length, head_dim,
                       scores_ + column, score_stride_);
      return true;
    });
  }
  Matrix query(scratch_.query, tile_.size(), head_dim, head_dim);
  return for_each_part(chunk, [&](int32_t column, int32_t length, const Rows& key, const Rows&) {
    return multiply(
        query,
        Matrix::transposed(static_cast<const float*>(key.data), length, head_dim, key.stride),
        Matrix(scores_ + column, tile_.size(), length, score_stride_), false);
  });
}

/// O += P v over the chunk, or O = P v at first; what no row sees may be left out.
bool QueryTile::multiply_values(const Chunk& chunk, bool first) {
  int32_t value_dim = params_.problem.value_dim;
  if (panels_) {
    bfloat_ ? bfloat_values(chunk) : panel_values(chunk);
    return true;
  }
  if (row_by_row_) {
    return for_each_part(chunk,
                         [&](int32_t column, int32_t length, const Rows&, const Rows& value) {
                           math_.row_values(scores_ + column, score_stride_, tile_.size(), value,
                                            length, value_dim, scratch_.out);
                           return true;
                         });
  }
  Matrix out(scratch_.out, tile_.size(), value_dim, value_dim);
  return for_each_part(chunk, [&](int32_t column, int32_t length, const Rows&, const Rows& value) {
    return multiply(Matrix(scores_ + column, tile_.size(), length, score_stride_),
                    Matrix(static_cast<const float*>(value.data), length, value_dim, value.stride),
                    out, !(first && column == 0));
  });
}

void QueryTile::find_visible(const Chunk& chunk) {
  bool masked = chunk.axis != Axis::kMain || chunk.partial;
  for (int32_t i = 0; i < chunk.num_runs && !masked; ++i) {
    masked = tile_.visited.needs_mask(chunk.runs[i].interval());
  }
  RowView view(pattern_, tile_, chunk);
  for (int32_t row = 0; row < tile_.size(); ++row) {
    const int32_t block_row = tile_.query_of(row) - tile_.layout_row * pattern_.list.block_q;
    scratch_.visible[row] =
        masked ? view.columns(scratch_.rows[row], block_row, scores_ + row * score_stride_)
               : Span{0, chunk.columns};
  }
}

/// Scores of the chunk and what each row sees of them.
bool QueryTile::score(const Chunk& chunk) {
  gather(chunk);
  if (panels_) find_visible(chunk);
  bool ran = multiply_keys(chunk);
  // Hidden columns inside a span are marked in the scores, so after the product.
  constexpr Features kRuns =
      kWindowsAlone.with(Features::of(Feature::kList, Feature::kPartialBlocks));
  const bool has_gaps = chunk.num_runs > 1 || chunk.partial || chunk.axis != Axis::kMain ||
                        !params_.features.within(kRuns);
  if (!panels_ || has_gaps) find_visible(chunk);
  return ran;
}

/// Scales, caps and masks what the row sees of the chunk.
void QueryTile::transform_row(const Chunk& chunk, int32_t row, float* scores, float scale) {
  Span span = scratch_.visible[row];
  if (span.begin >= span.end) return;
  const float* terms = mask_.present() ? mask_.row(tile_, chunk, row) + span.begin : nullptr;
  math_.transform(scores + row * score_stride_ + span.begin, span.end - span.begin, scale,
                  params_.scores.softcap, terms);
}

SoftmaxTile QueryTile::softmax_tile() const {
  SoftmaxTile softmax;
  softmax.scores = scores_;
  softmax.stride = score_stride_;
  softmax.rows = tile_.size();
  softmax.visible = scratch_.visible;
  softmax.m = scratch_.m;
  softmax.l = scratch_.l;
  softmax.out = scratch_.out;
  softmax.value_dim = out_dim_;
  softmax.factor = transforms() ? kLog2E : scale_ * kLog2E;
  return softmax;
}

bool QueryTile::run_online() {
  SoftmaxTile softmax = softmax_tile();
  softmax.read = scratch_.read;
  bool first = true, ran = true;
  for_each_chunk(pattern_, tile_, plan_.chunk_keys, [&](const Chunk& chunk) {
    mask_.begin_chunk();
    if (!ran || mask_.hides_all(tile_, chunk)) return;
    if (first && (row_by_row_ || panels_)) clear_out();
    ran = score(chunk);
    find_read(chunk.columns);
    if (transforms()) {
      for (int32_t row = 0; row < tile_.size(); ++row) {
        mask_.expect(tile_, chunk, row + 2);
        transform_row(chunk, row, scores_, scale_);
        math_.online_softmax(softmax.row(row));
      }
    } else {
      math_.online_softmax(softmax);
    }
    ran = ran && multiply_values(chunk, first);
    first = false;
  });
  return ran;
}

void QueryTile::clear_out() {
  std::memset(scratch_.out, 0, sizeof(float) * tile_.size() * out_dim_);
}

/// Divides by l, with the learned sink's share in it, and stores rows and lse.
void QueryTile::finish() {
  double unit = transforms() ? 1.0 : scale_;  // of m, in natural units
  float value_scale = params_.value_scale(tile_.batch, tile_.head);
  for (int32_t row = 0; row < tile_.size(); ++row) {
    int64_t head = tile_.head_of(row), query = tile_.query_of(row);
    double m = scratch_.m[row] * unit, sum = scratch_.l[row];
    bool empty = scratch_.m[row] == kMinusInfinity;
    if (params_.outputs.lse != nullptr) {
      params_.outputs
          .lse[tile_.batch * params_.outputs.lse_stride_b + head * params_.outputs.lse_stride_h +
               query * params_.outputs.lse_stride_s] =
          empty ? kMinusInfinity : static_cast<float>(m + std::log(sum));
    }
    if (params_.scores.sink_logits != nullptr)
      sum += std::exp(params_.scores.sink_logits[head] - m);
    float* out = scratch_.out + int64_t{row} * out_dim_;
    if (empty) std::memset(out, 0, sizeof(float) * params_.problem.value_dim);
    Rows target =
        strided(rows_of(params_.outputs.out, params_.problem.dtype, tile_.batch, head), query, 1);
    math_.from_float(target.element, out, empty ? 1.0f : static_cast<float>(value_scale / sum),
                     const_cast<void*>(target.data), params_.problem.value_dim);
  }
}

}  // namespace sparse_attn::cpu

// Arguments of block selection, and the rules that both devices follow: which key blocks a query
// block may see, which are forced, how many a budget allows (docs/design.md, "Block top-k").
// Filled by ops/, which has checked everything; the tools trust it, allocate nothing and throw
// nothing.
#pragma once

#include "params.h"
#include "sketch_params.h"

namespace sparse_attn {

/// How the share of a query block's probability that a key block has is estimated.
enum class Selector : int32_t {
  kMean,           // products of block means
  kMixed,          // products of group means, and sampled rows against every key
  kAntidiagonal,   // sums along the antidiagonals of squares of `stride` rows and keys
  kMinMax,         // the bound of a row's scores by the least and greatest key elements of a block
  kVerticalSlash,  // columns and diagonals of the last rows' probabilities
  kSketch,         // each row against every key of a sketch
  kScores,         // the caller's own scores
};

constexpr int32_t kSketchQueries = 16;  // that the sketch selects for, at most
constexpr int32_t kLastRows = 64;       // whose columns and diagonals stand for all rows'

/// The caller's scores [B|1, 1|Hkv|Hq, num_q, num_kv], float32: strides of broadcast dimensions are
/// 0, and `heads_per_score` query heads share one.
struct ScoresView {
  const float* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_kv = 1;
  int32_t heads_per_score = 1;

  SPARSE_ATTN_HD const float* row(int64_t b, int64_t head_q, int32_t query_block) const {
    return data + b * stride_b + head_q / heads_per_score * stride_h + query_block * stride_q;
  }
};

struct SelectParams {
  Problem problem;
  Sequences sequences;
  const int32_t* used_rows = nullptr;  // [B], queries that exist, of gathered ones; null: all
  TensorView query;                    // [B, Hq, Sq, D]
  KeySource keys;                      // whose values are not read
  Scores scores;                       // scale, softcap and bounds of them
  bool causal = false;

  int32_t block_q = 0, block_kv = 0;  // rows of a query block, keys of a key block
  Selector selector = Selector::kMean;
  int32_t groups = 1;        // mixed: means of a block
  int32_t row_step = 1;      // mixed: every row_step-th row is sampled, the last of each step
  int32_t stride = 8;        // antidiagonal
  SketchView sketch;         // sketch, minmax, mean: the caller's; bits of a call's own are set
  ScoresView given;          // scores: the caller's
  bool by_group = false;     // one list for the query heads of a key head
  double mass = 0;           // share of the estimate to keep; 0 keeps what the budget allows
  int32_t budget_count = 0;  // most blocks of a query block; 0 takes the share
  double budget_share = 1;   // of the blocks that the query block may see, rounded up
  int32_t sink_blocks = 0, local_blocks = 0;  // forced, inside the budget

  int32_t num_q = 0, num_kv = 0;  // blocks
  int32_t* counts = nullptr;      // [B, lists(), num_q]
  int32_t* indices = nullptr;     // [B, lists(), num_q, num_kv], ascending
  void* workspace = nullptr;
  void* stream = nullptr;
  int32_t device = 0;

  // Selections that know nothing of packed sequences, nor, but by a sketch, of pages choose for
  // them (cpu/select/select_blocks.cpp, cuda/select/gather.cu); lists count the blocks of their
  // sequence.

  /// Queries of a batch entry.
  SPARSE_ATTN_HD int32_t rows(int64_t b) const {
    return used_rows == nullptr ? problem.seq_q : used_rows[b];
  }
  /// Keys of a batch entry.
  SPARSE_ATTN_HD int32_t entry_keys(int64_t b) const {
    const int32_t* used = sequences.used_keys;
    return used == nullptr ? problem.seq_kv : imax(0, imin(used[b], problem.seq_kv));
  }
  /// Up to which key of a batch entry the caller's sketch may hold them; all where there is none.
  SPARSE_ATTN_HD int32_t held_keys(int64_t b) const {
    return sketch.present() ? sketch.held(b, entry_keys(b)) : entry_keys(b);
  }
  SPARSE_ATTN_HD int32_t offset(int64_t b) const {
    if (sequences.used_keys != nullptr && sequences.query_offsets == nullptr) {
      return lower_right(rows(b), entry_keys(b));
    }
    return sequences.offset(b);
  }
  /// Whether keys are read, which the caller's scores or sketch spare.
  bool reads_keys() const { return selector != Selector::kScores && !sketch.present(); }
  /// Whether those have 8 bits: as numbers of the queries' type, scaled and rounded.
  bool reads_codes() const { return reads_keys() && keys.dtype == Dtype::kFloat8; }
  /// Lists of a batch entry, and query heads that share one.
  SPARSE_ATTN_HD int32_t lists() const { return by_group ? problem.heads_kv : problem.heads_q; }
  SPARSE_ATTN_HD int32_t heads_per_list() const { return by_group ? problem.group() : 1; }

  /// Key position of query i.
  SPARSE_ATTN_HD int32_t position(int64_t b, int32_t i) const { return i + offset(b); }
  /// How many keys of a batch entry may be read.
  SPARSE_ATTN_HD int32_t num_keys(int64_t b) const {
    return readable_keys(causal, {rows(b), entry_keys(b), offset(b)});
  }
  /// The keys that query i may see.
  SPARSE_ATTN_HD Interval keys_of_row(int64_t b, int64_t head_q, int32_t i) const {
    Interval seen = scores.bounds.row(b, head_q, i, entry_keys(b));
    // The position may lie in memory: it is read under causal alone.
    if (causal) seen.end = end_of_keys(causal, position(b, i), seen.end);
    return seen;
  }
  /// Whether each row sees what the rows before it do: nothing but causality hides keys.
  SPARSE_ATTN_HD bool rows_grow() const { return scores.bounds.data == nullptr; }
  /// From the first to the last key that some of the rows may see.
  SPARSE_ATTN_HD Interval keys_of_rows(int64_t b, int64_t head_q, Interval rows) const {
    if (rows.empty()) return {};
    if (rows_grow()) return keys_of_row(b, head_q, rows.end - 1);
    Interval all = {problem.seq_kv, 0};
    for (int32_t i = rows.begin; i < rows.end; ++i) {
      Interval keys = keys_of_row(b, head_q, i);
      if (!keys.empty()) all = {imin(all.begin, keys.begin), imax(all.end, keys.end)};
    }
    return all;
  }
  /// From the first to the last key that some row of the batch entry may see.
  SPARSE_ATTN_HD Interval keys_of_entry(int64_t b) const {
    Interval all = {problem.seq_kv, 0};
    const int32_t heads = rows_grow() || scores.bounds.stride_h == 0 ? 1 : problem.heads_q;
    for (int32_t head = 0; head < heads; ++head) {
      Interval keys = keys_of_rows(b, head, {0, rows(b)});
      if (!keys.empty()) all = {imin(all.begin, keys.begin), imax(all.end, keys.end)};
    }
    return all;
  }
  /// Elements from the start of the keys to key j of a batch entry and key head.
  SPARSE_ATTN_HD int64_t key_at(int64_t b, int64_t head, int32_t j) const {
    return keys.locate(keys.key, {}, b, head, j);
  }
  /// The entry of the sketch that holds key j of a batch entry, and its row there.
  SPARSE_ATTN_HD int64_t sketch_entry(const SketchView& view, int64_t b, int32_t j) const {
    return view.paged ? keys.page_of(b, j) : b;
  }
  SPARSE_ATTN_HD static int32_t sketch_row(const SketchView& view, int32_t j) {
    return view.paged ? j % view.rows : j;
  }
  /// The rows of query blocks of a batch entry, none past its end.
  SPARSE_ATTN_HD Interval rows_of_blocks(int64_t b, Interval blocks) const {
    const int32_t end = rows(b);
    return {imin(blocks.begin * block_q, end), imin(blocks.end * block_q, end)};
  }
  SPARSE_ATTN_HD Interval rows_of_block(int64_t b, int32_t query_block) const {
    return rows_of_blocks(b, {query_block, query_block + 1});
  }
  /// The blocks of `size` keys that hold the keys.
  SPARSE_ATTN_HD static Interval blocks_of(Interval keys, int32_t size) {
    return keys.empty() ? Interval{} : Interval{keys.begin / size, ceil_div(keys.end, size)};
  }
  /// Where the keys of a batch entry end that the caller's sketch holds of key j's group.
  SPARSE_ATTN_HD int32_t held_end(int64_t b, int32_t j) const {
    if (!sketch.paged) return held_keys(b);
    const int32_t row = sketch_row(sketch, j);
    const int32_t held = sketch.lengths[sketch.length_at(sketch_entry(sketch, b, j), row)];
    return j - row % sketch.group + imax(0, imin(held, sketch.group));
  }
  /// Whether it lacks some of the keys, so that a list keeps their block.
  SPARSE_ATTN_HD bool lacks_some_of(int64_t b, Interval keys) const {
    for (int32_t j = keys.begin; j < keys.end;) {
      const int32_t end = sketch.end_of_group(j, keys.end);
      if (held_end(b, j) < end) return true;
      j = end;
    }
    return false;
  }

  /// The forced key blocks around the positions of a query block, the diagonal among them.
  SPARSE_ATTN_HD Interval diagonal(int64_t b, int32_t query_block) const {
    Interval rows = rows_of_block(b, query_block);
    int32_t low = floor_div(position(b, rows.begin), block_kv);
    int32_t high = floor_div(position(b, rows.end - 1), block_kv);
    int32_t after = causal ? 0 : local_blocks;
    return {imin(low, high + 1 - local_blocks), high + 1 + after};
  }
  /// The forced first blocks, from the one that holds the origin of the text on.
  SPARSE_ATTN_HD Interval sinks(int64_t b) const {
    const int32_t first = floor_div(sequences.origin(b), block_kv);
    return {first, first + sink_blocks};
  }

  /// Most blocks of a list, forced ones beyond the budget aside; 0 where only a mass says.
  int32_t expected_blocks() const {
    return budget_count > 0 || budget_share < 1 ? budget(num_kv) : 0;
  }
  /// Most blocks that the budget allows a query block that sees `visible` of them.
  SPARSE_ATTN_HD int32_t budget(int32_t visible) const {
    if (budget_count > 0) return imin(budget_count, visible);
    double share = budget_share * visible;
    int32_t blocks = static_cast<int32_t>(share);
    return imin(blocks + (blocks < share), visible);
  }
};

}  // namespace sparse_attn

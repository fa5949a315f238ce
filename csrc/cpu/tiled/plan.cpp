// Tile sizes, from measurements on 2 cores of an EPYC 7003 with 512 KiB of L2 a core.
#include "cpu/tiled/plan.h"

#include <algorithm>

#include "cpu/tiled/bfloat_rows.h"
#include "cpu/tiled/chunks.h"
#include "cpu/vector/vector_math.h"

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kChunkKeys = Chunk::kMaxColumns;
constexpr int32_t kChunkFloats = 1 << 15;  // of a chunk's keys in panels, which stay in L2
constexpr int32_t kPanelGroups = 16;       // of rows, in a tile for panels
constexpr int32_t kFewListedRows = 32;     // of a list's block, for which BLAS packs too much
constexpr int64_t kCachedFloats = int64_t{1} << 18;  // of a round, unless its tiles are few ...
constexpr int64_t kPackedFloats = int64_t{1} << 24;  // ... up to so many, or one head's
constexpr int64_t kTopkFloats = int64_t{1} << 18;    // of a tile's scores for token top-k
constexpr int64_t kTopkRows = 24;                    // in steps: whole groups of 6 and of 12 ...
constexpr int64_t kTopkMost = 96;                    // ... up to so many
constexpr int64_t kWholeColumns = 4096;  // of whole rows of scores, where few of them are kept
constexpr int64_t kDenseShare = 3;       // of the keys 1/3: so many kept values are worth zeros
constexpr int64_t kBfloatDenseShare = 18;

/// Rows of a tile for panels, or for bfloat16.
int32_t panel_rows() { return kPanelGroups * vector_math().group_rows; }

/// Whether products take panels of keys instead of BLAS, where rows are not too few for either.
bool use_panels(const AttentionParams& params) {
  const VectorMath& math = vector_math();
  const BlockList& list = params.pattern.list;
  bool few_rows = list.present() && list.block_q <= kFewListedRows;
  const int32_t head_dim = params.problem.head_dim, value_dim = params.problem.value_dim;
  return math.group_rows > 0 && value_dim >= kPanelKeys &&
         (few_rows || imax(head_dim, value_dim) <= math.panel_head_dim);
}

/// Whether rows fill what bfloat16 products take at a time, without zeros.
bool fills_bfloat(const Problem& problem) {
  return problem.head_dim % kBfloatRows == 0 && problem.value_dim % kBfloatRows == 0;
}

/// Whether products take bfloat16, which float16 and, for top-k, float32 are split to; three parts
/// with zeros gain nothing.
bool use_bfloat(const AttentionParams& params) {
  const bool half = params.problem.dtype != Dtype::kFloat32;
  return vector_math().bfloat != nullptr &&
         (half || (params.pattern.topk > 0 && fills_bfloat(params.problem)));
}

/// Up to how many rows a head's are multiplied one by one, from the keys where they lie: more where
/// keys would be converted or packed first, none where the rest of a vector is slow. Figures in
/// docs/kernels/cpu.md; of narrower vectors there are none.
int32_t few_rows(const AttentionParams& params) {
  constexpr int32_t kUsual = 4, kPacked = 8, kWidened = 16, kConverted = 32, kWideLanes = 16;
  constexpr int32_t kShort = 64;   // keys, for which starting a product takes longest
  constexpr int32_t kNarrow = 64;  // head dim up to which packing takes little
  const Pattern& pattern = params.pattern;
  const int32_t lanes = vector_math().lanes;
  if (pattern.topk > 0 || pattern.list.present() || pattern.dilation > 1) return kUsual;
  if (lanes < kWideLanes) return kUsual;
  if (use_bfloat(params)) return fills_bfloat(params.problem) ? kUsual : kPacked;
  const Problem& problem = params.problem;
  const bool half = problem.dtype != Dtype::kFloat32;
  const bool whole = problem.head_dim % lanes == 0 && problem.value_dim % lanes == 0;
  const bool wide = imax(problem.head_dim, problem.value_dim) > kNarrow;
  const bool packs_twice = params.global_tokens != nullptr;  // as keys and as tokens
  if (use_panels(params) && !(wide && packs_twice)) {
    if (half && whole) return wide ? kWidened : kPacked;
    return half || whole || wide ? kUsual : 0;
  }
  if (half) return kConverted;
  return whole && problem.seq_kv <= kShort ? kShort : kPacked;
}

/// Rows of a class, or of a list's block, of one head.
int32_t class_rows(const AttentionParams& params) {
  const Pattern& pattern = params.pattern;
  if (pattern.list.present()) return imin(pattern.list.block_q, params.problem.seq_q);
  return ceil_div(params.problem.seq_q, pattern.dilation);
}

int32_t chunk_keys(const AttentionParams& params) {
  const bool row_by_row = class_rows(params) <= few_rows(params);
  const bool float_panels = use_panels(params) && !use_bfloat(params) && !row_by_row;
  int32_t fit = float_panels ? kChunkFloats / params.problem.head_dim / 16 * 16 : kChunkKeys;
  return imin(imin(fit, kChunkKeys), static_cast<int32_t>(round_up(params.problem.seq_kv, 16)));
}

TopkRoom topk_room(const AttentionParams& params) {
  const BlockList& list = params.pattern.list;
  int64_t columns = params.problem.seq_kv;
  // A list that is not trusted may name a block many times.
  if (list.present()) columns = int64_t{list.max_count} * list.block_kv;
  if (has_side_lead(params)) columns += params.pattern.most_lead(params.problem.seq_kv);
  return TopkRoom(params.pattern.topk, columns, chunk_keys(params));
}

/// Columns up to which top-k takes the dense product, and keeps whole rows of scores, if its tiles
/// visit one run of keys.
void fit_topk(const AttentionParams& params, Plan* plan) {
  const bool one_run = params.features.within(kWindowsAlone);
  if (!one_run || params.problem.seq_q <= few_rows(params)) return;
  const int32_t parts = parts_of(static_cast<Element>(params.problem.dtype));
  int64_t share = use_bfloat(params) ? kBfloatDenseShare / parts : kDenseShare;
  const int64_t k = params.pattern.topk;
  int64_t whole = std::max((share + 1) * k, kWholeColumns);
  plan->dense_columns = static_cast<int32_t>(std::min(share * k, int64_t{params.problem.seq_kv}));
  plan->whole_columns = static_cast<int32_t>(std::min(whole, int64_t{params.problem.seq_kv}));
  // Room for a row that begins and ends inside a panel; a line more than whole lines keeps rows out
  // of the same cache sets.
  plan->whole_stride = round_up(plan->whole_columns, kPanelKeys) + 3 * kPanelKeys;
}

int32_t topk_rows(const AttentionParams& params) {
  Plan plan;
  fit_topk(params, &plan);
  bool whole = plan.whole_columns == params.problem.seq_kv;
  int64_t fit = kTopkFloats / (whole ? plan.whole_stride : 2 * topk_room(params).stride);
  int64_t step = use_bfloat(params) ? kBfloatRows : kTopkRows;
  return static_cast<int32_t>(std::max(step, std::min(fit / step * step, kTopkMost)));
}

/// Rows of a tile: many amortise the packing inside BLAS, few waste less at the window's edges.
int32_t preferred_rows(const AttentionParams& params) {
  if (params.pattern.topk > 0) return topk_rows(params);
  if (use_panels(params) || use_bfloat(params)) return panel_rows();
  const Pattern& pattern = params.pattern;
  const int32_t keys = pattern.most_window(ceil_div(params.problem.seq_kv, pattern.dilation));
  return keys >= 2048 ? 192 : keys >= 1024 ? 96 : keys >= 96 ? 64 : 32;
}

QueryCut cut_rows(int32_t rows, int32_t num_classes, int32_t preferred) {
  QueryCut cut;
  cut.num_classes = num_classes;
  cut.tiles_per_class = ceil_div(rows, preferred);
  cut.tile_rows =
      imin(rows, static_cast<int32_t>(round_up(ceil_div(rows, cut.tiles_per_class), 8)));
  cut.tiles_per_class = ceil_div(rows, cut.tile_rows);
  return cut;
}

/// Query rows that read a key: of a class, of all the heads of a group.
int64_t rows_of_key(const AttentionParams& params) {
  return int64_t{ceil_div(params.problem.seq_q, params.pattern.dilation)} * params.problem.group();
}

/// Whether tiles make the panels that they need, in the cache: few rows share them.
bool tiles_make_panels(const AttentionParams& params) {
  return (use_panels(params) || use_bfloat(params)) && rows_of_key(params) <= panel_rows();
}

/// Heads of a group that share tiles, so that each key is read and packed once: as many as leave
/// every thread a tile. No bit depends on it: heads whose rows see other keys do not share.
int32_t heads_per_tile(const AttentionParams& params, int32_t num_workers) {
  const bool worth = class_rows(params) <= few_rows(params) || tiles_make_panels(params);
  if (!worth || !params.heads_see_alike()) return 1;
  const int32_t group = params.problem.group();
  const int64_t tiles = int64_t{params.problem.batch} * params.problem.heads_kv;
  int32_t parts = 1;
  while (parts < group && (group % parts != 0 || tiles * parts < num_workers)) ++parts;
  return group / parts;
}

QueryCut cut_queries(const AttentionParams& params, int32_t num_workers) {
  const Pattern& pattern = params.pattern;
  const int32_t seq_q = params.problem.seq_q, block = pattern.list.block_q;
  const int32_t classes = pattern.list.present() ? ceil_div(seq_q, block) : pattern.classes(seq_q);
  QueryCut cut = cut_rows(class_rows(params), classes, preferred_rows(params));
  cut.heads_per_tile = heads_per_tile(params, num_workers);
  return cut;
}

/// Rows that BLAS can read where they lie, with the bits that packed rows would give.
bool is_packed(const AttentionParams& params, const TensorView& view, int32_t columns) {
  constexpr int64_t kLine = 64 / sizeof(float);
  return params.problem.dtype == Dtype::kFloat32 && params.pattern.dilation == 1 &&
         view.stride_s == columns && reinterpret_cast<uintptr_t>(view.data) % 64 == 0 &&
         view.stride_b % kLine == 0 && view.stride_h % kLine == 0;
}

PackCut cut_keys(const AttentionParams& params, const QueryCut& query, int32_t num_workers) {
  const Pattern& pattern = params.pattern;
  PackCut pack;
  int64_t heads = int64_t{params.problem.batch} * params.problem.heads_kv;
  pack.heads_per_round = heads;
  if (query.tile_rows <= few_rows(params)) return pack;
  pack.bfloat = use_bfloat(params);
  if (pack.bfloat) pack.parts = parts_of(static_cast<Element>(params.problem.dtype));
  pack.panels = pack.bfloat || use_panels(params);
  pack.key = pack.panels ? !tiles_make_panels(params)
                         : !is_packed(params, params.keys.key, params.problem.head_dim);
  pack.value =
      pack.bfloat ? pack.key : !is_packed(params, params.keys.value, params.problem.value_dim);
  // Classes start on even rows: two rows of a head dim that is a multiple of 8 fill cache lines.
  int32_t together = pack.panels ? kPanelKeys : 2;
  pack.class_rows = round_up(ceil_div(params.problem.seq_kv, pattern.dilation), together);
  pack.main_rows = pack.class_rows * imin(pattern.dilation, params.problem.seq_kv);
  if (has_side_lead(params)) {
    pack.side_rows = round_up(pattern.most_lead(params.problem.seq_kv), together);
  } else if (params.global_tokens != nullptr) {
    pack.side_rows = round_up(imin(params.num_global_tokens, params.problem.seq_kv), together);
  }
  int64_t floats =
      (pack.key * pack.main_rows + pack.side_rows) * pack.row_floats(params.problem.head_dim) +
      (pack.value * pack.main_rows + pack.side_rows) * pack.row_floats(params.problem.value_dim);
  const int64_t tiles = int64_t{query.num_tiles()} * params.problem.group() / query.heads_per_tile;
  const int64_t busy = 2 * num_workers / std::max<int64_t>(tiles, 1) + 1;
  int64_t fit = heads;
  if (floats > 0) fit = std::min(std::max(kCachedFloats / floats, busy), kPackedFloats / floats);
  pack.heads_per_round = std::clamp<int64_t>(fit, 1, heads);
  return pack;
}

}  // namespace

Plan make_plan(const AttentionParams& params, int32_t num_workers) {
  Plan plan;
  plan.few_rows = few_rows(params);
  plan.query = cut_queries(params, num_workers);
  plan.pack = cut_keys(params, plan.query, num_workers);
  plan.chunk_keys = chunk_keys(params);
  // One line more than a power of two keeps rows out of the same cache sets.
  plan.score_stride = round_up(plan.chunk_keys, 16) + 16;
  if (params.pattern.topk > 0) {
    plan.topk = topk_room(params);
    fit_topk(params, &plan);
  }
  plan.num_workers = num_workers;
  return plan;
}

}  // namespace sparse_attn::cpu

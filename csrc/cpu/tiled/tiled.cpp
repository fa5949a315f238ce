// The tiled engine: out = softmax(scale q k^T) v over the tiles that the pattern visits, with an
// online softmax (Dao et al. 2022, algorithm 1) and no score matrix. Products are in float32, with
// panels of keys where the instruction set has them, else by torch's BLAS; half precision is
// converted on the way in and out, or multiplied in bfloat16 where the processor can
// (bfloat_tile.cpp). Threads take query tiles, heavy ones first, and share nothing but the packed
// keys.
#include <algorithm>
#include <atomic>

#include "cpu/engines.h"
#include "cpu/global_tokens.h"
#include "cpu/sequences.h"
#include "cpu/tiled/keys.h"
#include "cpu/tiled/query_tile.h"
#include "cpu/torch_host.h"

namespace sparse_attn::cpu {
namespace {

struct TileWork {
  int64_t work = 0;  // visited pairs
  int32_t index = 0;
};

/// The workspace, piece by piece.
struct Workspace {
  GlobalTokens globals;
  TileWork* order = nullptr;       // [num_tiles], heavy first
  float* packed = nullptr;         // [heads_per_round, head_floats]
  TileScratch* scratch = nullptr;  // [num_workers]

  Workspace(const AttentionParams& params, const Plan& plan, Arena* arena) {
    globals.take(params, arena);
    order = arena->take<TileWork>(plan.query.num_tiles());
    packed = arena->take<float>(plan.pack.heads_per_round *
                                PackedHeads(plan.pack, params.problem).head_floats());
    scratch = arena->take<TileScratch>(plan.num_workers);
    for (int32_t worker = 0; worker < plan.num_workers; ++worker) {
      TileScratch piece(params, plan, arena);
      if (scratch != nullptr) scratch[worker] = piece;
    }
  }
};

/// Runs of the longest list that some head has for a row of query blocks.
int64_t longest_list(const AttentionParams& params, const BlockList& list, int32_t row) {
  int32_t longest = 0;
  int32_t batches = list.count_stride_b == 0 ? 1 : params.problem.batch;
  int32_t heads = list.count_stride_h == 0 ? 1 : params.problem.heads_q;
  for (int32_t batch = 0; batch < batches; ++batch) {
    for (int32_t head = 0; head < heads; ++head) {
      longest = imax(longest, list.runs(batch, head, row, list.block_kv).count);
    }
  }
  return longest;
}

/// Query tiles by descending work: of all heads' lists the longest, else that of the first head.
void sort_tiles(const AttentionParams& params, const Pattern& pattern, const Plan& plan,
                TileWork* order) {
  int32_t count = plan.query.num_tiles();
  for (int32_t index = 0; index < count; ++index) {
    Tile tile = make_tile(params, pattern, plan.query, 0, 0, index);
    int64_t keys = tile.visited.count();
    if (pattern.list.present()) {
      int64_t listed = longest_list(params, pattern.list, tile.layout_row) * pattern.list.block_kv;
      keys = std::min<int64_t>(listed, tile.visited.seen_keys.size());
    }
    order[index] = {keys * tile.size(), index};
  }
  std::sort(order, order + count, [](const TileWork& a, const TileWork& b) {
    return a.work != b.work ? a.work > b.work : a.index > b.index;
  });
}

/// The call without token top-k where that keeps every key.
AttentionParams without_idle_topk(AttentionParams params) {
  if (params.pattern.topk >= params.problem.seq_kv) params.pattern.topk = 0;
  return params;
}

int64_t plain_workspace_bytes(const AttentionParams& call) {
  const AttentionParams params = without_idle_topk(call);
  Arena arena(nullptr);
  Workspace(params, make_plan(params, num_workers()), &arena);
  return arena.used();
}

Status run_plain(const AttentionParams& call) {
  const AttentionParams params = without_idle_topk(call);
  const VectorMath& math = vector_math();
  Plan plan = make_plan(params, num_workers());
  Arena arena(params.workspace);
  Workspace workspace(params, plan, &arena);
  const Pattern pattern = workspace.globals.marked_pattern(params);
  sort_tiles(params, pattern, plan, workspace.order);

  PackedHeads packed(plan.pack, params.problem);
  packed.base = workspace.packed;
  Packer packer(params, pattern, plan.pack);
  int64_t units = packer.units();
  int64_t heads = int64_t{params.problem.batch} * params.problem.heads_kv;
  int64_t tiles_per_head =
      int64_t{plan.query.num_tiles()} * (params.problem.group() / plan.query.heads_per_tile);
  std::atomic<bool> failed{false};

  for (int64_t first = 0; first < heads; first += plan.pack.heads_per_round) {
    int64_t round = std::min(plan.pack.heads_per_round, heads - first);
    bool ran = for_each_item(plan.num_workers, round * units, [&](int32_t, int64_t item) {
      int64_t slot = item / units, head = first + slot;
      packer.pack(math, packed.head(slot), head / params.problem.heads_kv,
                  head % params.problem.heads_kv, item % units);
    });
    ran = ran && for_each_item(
                     plan.num_workers, round * tiles_per_head, [&](int32_t worker, int64_t item) {
                       int64_t slot = item / tiles_per_head, head_kv = first + slot;
                       int64_t in_head = item % tiles_per_head;
                       int32_t group_head = static_cast<int32_t>(in_head / plan.query.num_tiles());
                       int32_t head = head_kv % params.problem.heads_kv * params.problem.group() +
                                      group_head * plan.query.heads_per_tile;
                       int32_t index = workspace.order[in_head % plan.query.num_tiles()].index;
                       Tile tile = make_tile(params, pattern, plan.query,
                                             head_kv / params.problem.heads_kv, head, index);
                       if (tile.rows.empty()) return;
                       QueryTile query_tile(params, pattern, plan, math, tile, packed.head(slot),
                                            workspace.scratch[worker]);
                       if (!query_tile.run()) failed.store(true);
                     });
    if (!ran || failed.load()) return {1, "a matrix product or the thread pool failed"};
  }
  return {};
}

constexpr PlainEngine kPlain = {plain_workspace_bytes, run_plain};

}  // namespace

const Engine kTiled = engine_of_sequences<kPlain>("tiled");

}  // namespace sparse_attn::cpu

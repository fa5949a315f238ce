// The tools' table, and block selection as its launches: estimate, by selector, then choose.
#include <algorithm>
#include <type_traits>

#include "../../arena.h"
#include "../cache/append.h"
#include "../common/launch.cuh"
#include "../engines.h"
#include "../sketch/sketch.h"
#include "gather.h"
#include "slices_hopper.h"

namespace sparse_attn::cuda {
namespace {

constexpr int64_t kGatheredBytes = 512 << 20;  // of a call's workspace, or as one entry needs

/// Masses of a query head that are kept for all its query vectors at once.
int64_t masses_of_head(const SelectParams& params) {
  if (params.selector != Selector::kAntidiagonal) return 0;
  return slice_masses(params) * ceil_div(params.problem.seq_q, params.stride);
}

void lay_out(const SelectParams& params, Arena* arena, SelectWorkspace* workspace) {
  auto take = [&](auto** pointer, int64_t elements) {
    *pointer = arena->take<std::remove_reference_t<decltype(**pointer)>>(elements);
  };
  const int64_t heads_q = int64_t{params.problem.batch} * params.problem.heads_q;
  const int64_t heads_kv = int64_t{params.problem.batch} * params.problem.heads_kv;
  const int64_t query_blocks = heads_q * params.num_q, key_blocks = heads_kv * params.num_kv;
  const int64_t row_bytes = int64_t{params.problem.head_dim} * size_of(params.problem.dtype);
  take(&workspace->scores, query_blocks * params.num_kv);
  const Selector selector = params.selector;
  if (params.scores.bounds.data != nullptr && selector != Selector::kSketch) {
    take(&workspace->key_marks, int64_t{params.problem.batch} * (params.problem.seq_kv + 1));
  }
  if (selector == Selector::kMean) {
    take(&workspace->query_means, query_blocks * params.problem.head_dim);
    take(&workspace->key_means, key_blocks * params.problem.head_dim);
  }
  auto take_vectors = [&](void** pointer, int64_t vectors) {
    *pointer = arena->take<char>(vectors * row_bytes);
  };
  if (selector == Selector::kMixed) {
    take_vectors(&workspace->query_vectors, query_blocks * params.groups);
    take_vectors(&workspace->key_vectors, key_blocks * params.groups);
  }
  if (selector == Selector::kMinMax) take_vectors(&workspace->key_vectors, 2 * key_blocks);
  if (selector == Selector::kVerticalSlash) {
    LineWorkspace& lines = workspace->lines;
    take(&lines.partial, heads_q * ceil_div(params.problem.seq_kv, kLineKeys) * kLastRows);
    take(&lines.lse, heads_q * kLastRows);
    take(&lines.sums, heads_q * (int64_t{params.num_kv} + params.problem.seq_kv + kLastRows));
    take(&lines.slashes, heads_q * num_slashes(params));
  } else if (selector == Selector::kSketch) {
    SketchView& sketch = workspace->sketch = params.sketch;
    if (!sketch.present()) {
      sketch.rows = ceil_div(params.problem.seq_kv, kSketchGroup) * kSketchGroup;
      const int64_t rows = heads_kv * sketch.rows;
      take(&sketch.codes, rows * sketch.row_words());
      take_vectors(&sketch.ranges, rows / sketch.group * 2);
    }
    if (tiles_are_blocks(params)) {
      workspace->tile_masses = workspace->scores;
    } else {
      take(&workspace->tile_masses, heads_q * params.problem.seq_q * num_sketch_tiles(params));
    }
  } else if (selector != Selector::kMean && selector != Selector::kScores) {
    const int64_t of_walk = int64_t{params.num_kv} * kEstimateRows;
    auto room = [&](int64_t bytes) {
      return std::max<int64_t>(query_blocks * params.num_kv, bytes / sizeof(float));
    };
    // Three at least, and as many for each query block: work goes to teams of warpgroups.
    const int64_t most = std::min<int64_t>(kMostWalks, 3 * query_blocks);
    const int64_t inputs =
        (heads_q * params.problem.seq_q + heads_kv * params.problem.seq_kv) * row_bytes;
    const int64_t bytes = std::max(kMassBytes, std::min(kWalkBytes, inputs / 2));
    const int64_t walks = std::max<int64_t>(3, std::min(room(bytes) / of_walk, most));
    const int64_t of_head = std::max<int64_t>(masses_of_head(params), 1);
    const int64_t heads = std::max<int64_t>(1, std::min(room(kMassBytes) / of_head, heads_q));
    workspace->walks = static_cast<int32_t>(walks);
    workspace->mass_heads = static_cast<int32_t>(heads);
    take(&workspace->masses, std::max(walks * of_walk, heads * of_head));
    take(&workspace->counter, 1);
  }
}

Status launch_estimates(const SelectParams& params, const SelectWorkspace& workspace) {
  switch (params.selector) {
    case Selector::kScores:
      return launch_given_scores(params, workspace);
    case Selector::kVerticalSlash:
      return launch_lines(params, workspace);
    case Selector::kSketch: {
      Status status;
      if (!params.sketch.present()) status = launch_call_sketch(params, workspace.sketch);
      if (status.ok()) {
        status = launch_sketch_masses(params, workspace.sketch, workspace.tile_masses);
      }
      if (!status.ok() || tiles_are_blocks(params)) return status;
      return launch_sketch_shares(params, workspace.tile_masses, workspace.scores);
    }
    case Selector::kMean: {
      Status status = launch_block_means(params, workspace);
      if (status.ok()) status = launch_block_scores(params, workspace);
      return status.ok() ? launch_not_held(params, workspace) : status;
    }
    default:
      return launch_products(params, workspace);
  }
}

int64_t walk_bytes(const SelectParams& params) {
  SelectWorkspace workspace;
  Arena arena(nullptr);
  lay_out(params, &arena, &workspace);
  return arena.used();
}

Status select_entries(const SelectParams& params) {
  SelectWorkspace workspace;
  Arena arena(params.workspace);
  lay_out(params, &arena, &workspace);
  Status status;
  if (workspace.key_marks != nullptr) status = launch_marks(params, workspace.key_marks);
  if (status.ok()) status = launch_estimates(params, workspace);
  if (status.ok()) status = launch_choose(params, workspace);
  return status;
}

/// Workspace of `count` gathered batch entries.
int64_t gathered_bytes(const SelectParams& params, int32_t count) {
  Arena arena(nullptr);
  arena.take<char>(walk_bytes(gathered_entries(params, 0, count, &arena)));
  return arena.used();
}

/// Batch entries that are gathered at once.
int32_t entries_at_once(const SelectParams& params) {
  const int64_t entries = kGatheredBytes / gathered_bytes(params, 1);
  return static_cast<int32_t>(
      std::max<int64_t>(1, std::min<int64_t>(entries, params.problem.batch)));
}

}  // namespace

int64_t select_workspace_bytes(const SelectParams& params) {
  if (!is_gathered(params)) return walk_bytes(params);
  return gathered_bytes(params, entries_at_once(params));
}

Status select_blocks(const SelectParams& params) {
  if (!is_gathered(params)) return select_entries(params);
  const int32_t at_once = entries_at_once(params);
  Status status;
  for (int32_t first = 0; status.ok() && first < params.problem.batch; first += at_once) {
    Arena arena(params.workspace);
    SelectParams entries =
        gathered_entries(params, first, imin(at_once, params.problem.batch - first), &arena);
    entries.workspace = arena.take<char>(walk_bytes(entries));
    status = gather_entries(params, first, entries);
    if (status.ok()) status = select_entries(entries);
  }
  return status;
}

const Tools kTools = {select_workspace_bytes, select_blocks,    list_from_mask, merge_states,
                      append_to_cache,        append_to_sketch, sketch_pages};

}  // namespace sparse_attn::cuda

// The decode engine: few queries, split over their keys. The workspace of the partial results and
// the two launches: chunks, then the merge; for token top-k scores, then what is kept (topk.h).
#include "../../arena.h"
#include "../engines.h"
#include "config.cuh"
#include "launch.h"
#include "row_tile.cuh"
#include "topk.h"

namespace sparse_attn::cuda {
namespace decode {
namespace {

int32_t attribute(cudaDeviceAttr name, int32_t device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

/// The shape of the kernel that serves a head dim; it is the same for both dtypes.
template <typename Function>
auto with_config(int32_t head_dim, const Function& function) {
  switch (head_dim_bucket(head_dim)) {
    case 64:
      return function(Config<__half, 64, kFragmentRows>{});
    case 128:
      return function(Config<__half, 128, kFragmentRows>{});
    default:
      return function(Config<__half, 256, kFragmentRows>{});
  }
}

SplitGrid grid_of(const AttentionParams& params) {
  return with_config(params.problem.widest_dim(), [&](auto config) {
    using Shape = decltype(config);
    using Codes = Config<HalfOfEitherKind, Shape::HEAD_DIM, kFragmentRows>;
    DeviceShape device;
    device.clusters = params.pattern.topk == 0 && has_clusters();
    auto room = [&](auto tile) {
      using Tile = decltype(tile);
      return TileRoom{Tile::kBlocksPerSm, device.clusters ? Tile::kKeptRows : 0};
    };
    device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, params.device);
    const bool float8 = params.keys.dtype == Dtype::kFloat8;
    device.flat = float8 ? room(Codes()) : room(Shape());
    if constexpr (has_tall_tiles(Shape::HEAD_DIM)) {
      using Tall = Config<typename Shape::T, Shape::HEAD_DIM, kTallRows>;
      using TallCodes = Config<HalfOfEitherKind, Shape::HEAD_DIM, kTallRows>;
      if (params.pattern.topk == 0) device.tall = float8 ? room(TallCodes()) : room(Tall());
    }
    return plan_grid(params, device);
  });
}

/// The partial results of a call's chunks, in the workspace.
PartialRows lay_out(const AttentionParams& params, const SplitGrid& grid, Arena* arena) {
  PartialRows partials;
  partials.rows = params.problem.seq_q;
  partials.heads = params.problem.batch * params.problem.heads_q;
  partials.max_chunks = grid.places;
  partials.columns = params.problem.value_dim;
  partials.group = grid.group;
  partials.gaps = grid.gaps;
  if (grid.merging == Merging::kNone) return partials;
  const int64_t rows = int64_t{partials.heads} * partials.rows;
  partials.out = arena->take<float>(rows * grid.places * partials.columns);
  partials.state = arena->take<float2>(rows * grid.places);
  partials.chunks = arena->take<RowChunks>(rows);
  return partials;
}

int64_t workspace_bytes(const AttentionParams& params) {
  Arena arena(nullptr);
  if (params.pattern.topk > 0) {
    arena.take<float>(TopkParts(params.problem, params.sequences).scores());
  } else {
    lay_out(params, grid_of(params), &arena);
  }
  return arena.used();
}

/// Scores, then what is kept of them, of as many key heads at a time as the workspace holds.
Status run_topk(const AttentionParams& params) {
  Arena arena(params.workspace);
  const TopkParts parts(params.problem, params.sequences);
  ScoreRows rows;
  rows.scores = arena.take<float>(parts.scores());
  rows.pitch = parts.pitch;
  SplitGrid grid = grid_of(params);
  grid.shares = 0;  // each sequence has as many thread blocks
  const int32_t of_head = grid.tiles * grid.splits;
  for (int32_t first = 0; first < parts.all; first += parts.at_once) {
    const int32_t heads = imin(parts.at_once, parts.all - first);
    grid.first_block = first * of_head;
    rows.first = int64_t{first} * parts.rows;
    rows.count = heads * parts.rows;
    Status status = with_config(params.problem.widest_dim(), [&](auto config) {
      constexpr int kHeadDim = decltype(config)::HEAD_DIM;
      return params.problem.dtype == Dtype::kFloat16
                 ? launch_scores<__half, kHeadDim>(params, grid, heads * of_head, rows)
                 : launch_scores<__nv_bfloat16, kHeadDim>(params, grid, heads * of_head, rows);
    });
    if (status.ok()) status = attend_highest(params, rows);
    if (!status.ok()) return status;
  }
  return {};
}

Status run(const AttentionParams& params) {
  if (params.pattern.topk > 0) return run_topk(params);
  Arena arena(params.workspace);
  LaunchPlan plan;
  plan.grid = grid_of(params);
  plan.aligned = !params.features.has(Feature::kUnaligned);
  plan.partials = lay_out(params, plan.grid, &arena);
  Status status = with_config(params.problem.widest_dim(), [&](auto config) {
    constexpr int kHeadDim = decltype(config)::HEAD_DIM;
    return params.problem.dtype == Dtype::kFloat16 ? launch<__half, kHeadDim>(params, plan)
                                                   : launch<__nv_bfloat16, kHeadDim>(params, plan);
  });
  const bool merged_after = plan.grid.merging == Merging::kByKernel;
  return status.ok() && merged_after ? merge_chunks(params, plan.partials) : status;
}

}  // namespace
}  // namespace decode

const Engine kDecode = {"decode", decode::workspace_bytes, decode::run};

}  // namespace sparse_attn::cuda

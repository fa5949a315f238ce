// The portable engine: any GPU from sm_75. Chooses kernel and tile by the case and by the device's
// opt-in shared memory, lays out the workspace (bits of global tokens, thresholds of top-k, partial
// results), and launches.
#include <array>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "../../arena.h"
#include "../common/launch.cuh"
#include "../common/plain_scores.h"
#include "../common/radix_select.cuh"
#include "../engines.h"
#include "../select/global_tokens.h"
#include "key_split.h"
#include "launch.h"
#include "work.cuh"

namespace sparse_attn::cuda {
namespace {

using portable::KernelKind;
using portable::kTiles;
using portable::LaunchChoice;

/// Where rows and keys lie and how wide they are; every kernel takes that as it is, so that a
/// sequence has the same bits packed, paged and alone.
constexpr Features kPlaces = Features::of(Feature::kQueryOffsets, Feature::kPacked,
                                          Feature::kUsedKeys, Feature::kPaged, Feature::kValueDim);
/// What the kernels of ranges and lists of blocks serve beside plain calls.
constexpr Features kDense =
    Features::of(Feature::kKeyBounds, Feature::kKeyOrigins, Feature::kSinkLogits, Feature::kWindow,
                 Feature::kDilation, Feature::kLead, Feature::kColumns, Feature::kGlobalRows,
                 Feature::kGlobalIndices, Feature::kList, Feature::kFloat8Keys)
        .with(kPlaces);
/// What those of token top-k serve.
constexpr Features kPlainTopK =
    Features::of(Feature::kTopK, Feature::kKeyBounds, Feature::kSinkLogits, Feature::kWindow,
                 Feature::kDilation)
        .with(kPlaces);
static_assert(kDense.with(kPlainTopK).within(kScaledScores), "their kernels transform no scores");

/// The kernel that the call's pattern and features ask for; lengths change nothing, since those of
/// packed sequences differ.
KernelKind wanted_kernel(const AttentionParams& params) {
  const Pattern& pattern = params.pattern;
  if (!params.features.within(kDense)) return KernelKind::kGeneral;
  if (!pattern.list.present()) return KernelKind::kDense;
  return portable::kernel_for_blocks(pattern.list.block_q, pattern.list.block_kv,
                                     params.problem.widest_dim());
}

__global__ void code_probe() {}

/// The device's limit, or the smaller one that a test sets in SPARSE_ATTN_SMEM_LIMIT. Code older
/// than sm_80 has no dense kernels and is held to what its own devices have.
int32_t smem_limit(int32_t device) {
  constexpr int32_t kTuringLimit = 64 << 10;
  int limit = 0;
  cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (code_level(code_probe) < 80) limit = imin(limit, kTuringLimit);
  const char* override_limit = std::getenv("SPARSE_ATTN_SMEM_LIMIT");
  return override_limit == nullptr ? limit : imin(limit, std::atoi(override_limit));
}

/// The kernel of a float32 call. Rows of one chunk have the same bits in all, so that calls without
/// chunks take the one that knows none.
KernelKind float_kernel(const AttentionParams& params) {
  if (params.pattern.topk > 0) return KernelKind::kFloat;  // thresholds are those of whole rows
  if (params.problem.seq_q <= tile_shape(KernelKind::kFloatLow, 1).block_q) {
    return KernelKind::kFloatLow;  // a warp for each tile: the others would have no rows
  }
  const auto tile = tile_shape(KernelKind::kFloatChunks, params.problem.widest_dim());
  return portable::most_chunks(params, tile) > 1 ? KernelKind::kFloatChunks : KernelKind::kFloat;
}

LaunchChoice choose(const AttentionParams& params) {
  LaunchChoice choice;
  choice.aligned = !params.features.has(Feature::kUnaligned);
  choice.smem_limit = smem_limit(params.device);
  choice.kind = portable::choose_kernel(params.problem.dtype, wanted_kernel(params),
                                        params.problem.widest_dim(), choice.smem_limit);
  if (params.features.has(Feature::kTopK) && params.features.within(kPlainTopK) &&
      portable::topk_fits(params.problem.widest_dim(), choice.smem_limit)) {
    choice.kind = KernelKind::kTop;
  }
  if (choice.kind == KernelKind::kFloat) choice.kind = float_kernel(params);
  return choice;
}

int32_t key_tile(const AttentionParams& params, const LaunchChoice& choice) {
  return tile_shape(choice.kind, params.problem.widest_dim()).block_kv;
}

using Launch = Status (*)(const AttentionParams&, const LaunchChoice&);

template <KernelKind kKind, int HEAD_DIM>
constexpr Launch launcher() {
  if constexpr (kKind == KernelKind::kTop) {
    return portable::launch_topk<HEAD_DIM>;
  } else if constexpr (kKind == KernelKind::kRank) {
    return nullptr;  // launched with kTop
  } else {
    return portable::launch<kKind, HEAD_DIM>;
  }
}

/// The launchers of the kernels in kTiles.
template <std::size_t... kTile>
constexpr std::array<Launch, sizeof...(kTile)> launchers(std::index_sequence<kTile...>) {
  return {launcher<kTiles[kTile].kind, kTiles[kTile].shape.head_dim>()...};
}

/// Thread blocks of a tile's kernel that a device holds at once.
int32_t resident_blocks(const AttentionParams& params, const portable::TileShape& tile) {
  constexpr int32_t kResidentThreads = 256;  // by their registers
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  return multiprocessors * kResidentThreads / tile.threads();
}

/// Room for the chunks that thread blocks share out, where they do.
PartialRows lay_out_partials(const AttentionParams& params, const LaunchChoice& choice,
                             Arena* arena) {
  PartialRows partials;
  partials.max_chunks = 1;
  if (!has_chunks(choice.kind)) return partials;
  const portable::TileShape tile = tile_shape(choice.kind, params.problem.widest_dim());
  const portable::GridPlan grid = portable::plan_grid(params, tile.block_q);
  partials.max_chunks = portable::plan_split(params, tile, int64_t{grid.tiles} * grid.heads,
                                             resident_blocks(params, tile));
  if (partials.max_chunks == 1) return partials;
  partials.rows = params.problem.seq_q;
  partials.heads = grid.heads;
  partials.columns = portable::partial_columns(params.problem.value_dim);
  const int64_t rows = int64_t{partials.heads} * partials.rows;
  partials.out = arena->take<float>(rows * partials.max_chunks * partials.columns);
  partials.state = arena->take<float2>(rows * partials.max_chunks);
  partials.chunks = arena->take<RowChunks>(rows);
  return partials;
}

struct Workspace {
  Threshold* thresholds = nullptr;  // [B, Hq, Sq], with top-k
  PartialRows partials;
  char* global_tokens = nullptr;  // scattered ones
};

Workspace lay_out(const AttentionParams& params, const LaunchChoice& choice, Arena* arena) {
  Workspace workspace;
  if (params.pattern.topk > 0) {
    workspace.thresholds = arena->take<Threshold>(int64_t{params.problem.batch} *
                                                  params.problem.heads_q * params.problem.seq_q);
  }
  workspace.partials = lay_out_partials(params, choice, arena);
  workspace.global_tokens = arena->take<char>(global_token_bytes(params, key_tile(params, choice)));
  return workspace;
}

int64_t workspace_bytes(const AttentionParams& params) {
  Arena arena(nullptr);
  lay_out(params, choose(params), &arena);
  return arena.used();
}

Status run(const AttentionParams& given) {
  AttentionParams params = given;
  LaunchChoice choice = choose(params);
  Arena arena(params.workspace);
  const Workspace workspace = lay_out(params, choice, &arena);
  choice.thresholds = workspace.thresholds;
  choice.partials = workspace.partials;
  Status status = mark_global_tokens(&params, key_tile(params, choice), workspace.global_tokens);
  if (!status.ok()) return status;
  constexpr auto kLaunchers = launchers(std::make_index_sequence<std::size(kTiles)>());
  return kLaunchers[tile_index(choice.kind, params.problem.widest_dim())](params, choice);
}

}  // namespace

const Engine kPortable = {"portable", workspace_bytes, run};

}  // namespace sparse_attn::cuda

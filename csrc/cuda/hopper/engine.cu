// The Hopper engine: takes the kernel of a call from table.h and launches it. What it does not
// serve (capability.h keeps such calls away) is float32, attn_mask beside lists or at wide heads,
// lists of query blocks that no tile height divides.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/plain_scores.h"
#include "../engines.h"
#include "config.h"
#include "launch.h"
#include "lay_out.h"
#include "scattered.h"
#include "sections.h"
#include "softmax.cuh"
#include "tensor_maps.h"
#include "tile_order.h"

namespace sparse_attn::cuda {
namespace hopper {
namespace {

constexpr int64_t kCounterBytes = 256;

/// Most keys for which tiles of 128 rows beat those of 192 under causal.
constexpr int32_t kShortCausal = 1536;

/// Rows of all tiles of a (batch, head) that this many consumers work on, those past its end too.
int32_t tile_rows(const AttentionParams& params, int32_t consumers) {
  const int32_t height = consumers * kConsumerRows;
  return ceil_div(ceil_div(params.problem.seq_q, params.pattern.classes(params.problem.seq_q)),
                  height) *
         height;
}

/// Whether three consumers are faster than two, which waste less of short calls.
bool prefers_three(const AttentionParams& params) {
  constexpr float kGain = 1.15f;
  if (params.pattern.causal && params.problem.seq_kv <= kShortCausal) return false;
  return tile_rows(params, 3) <= kGain * tile_rows(params, 2);
}

/// Whether which keys exist is known on the device alone, or for classes of keys of their own.
bool has_raw_values(const AttentionParams& params) {
  if (params.scores.bounds.data != nullptr || !params.sequences.same_lengths()) return true;
  const bool cut = params.sequences.offsets_on_device() ||
                   params.num_keys(params.sequences.of(0)) < params.problem.seq_kv;
  return params.pattern.causal && cut && !has_short_maps(params);
}

/// The kernel of a call.
Entry choose(const AttentionParams& params) {
  const KeySplit plan = plan_key_split(params, split_tile(params));
  const Split split = plan.chunks == 0 ? Split::kNone : plan.all ? Split::kAll : Split::kGlobalRows;
  const Wanted wanted = {params.features, split, has_raw_values(params),
                         params.pattern.list.block_q};
  const Entry entry = find_kernel(params.problem.widest_dim(), wanted);
  // A plain kernel of three consumers is followed by that of two.
  if (!entry.exists() || kKernels[entry.kernel].consumers < 3) return entry;
  const Entry lower = {entry.kernel + 1, entry.head_dim};
  return lower.keys() > 0 && !prefers_three(params) ? lower : entry;
}

/// Launches the chosen kernel if it is of this head dim.
template <Dtype kDtype, int32_t kHeadDim>
void launch_at(Entry entry, const Arguments& args, Status* status) {
  if constexpr (is_built(kHeadDim)) {
    if (kHeadDim != entry.head_dim) return;
    *status = launch_head_dim<kDtype, kHeadDim>(entry.kernel, args);
  }
}

template <Dtype kDtype, std::size_t... kIndex>
Status launch(Entry entry, const Arguments& args, std::index_sequence<kIndex...>) {
  Status status = {cudaErrorNotSupported, "the hopper engine has no kernel for this call"};
  (launch_at<kDtype, kHeadDims[kIndex]>(entry, args, &status), ...);
  return status;
}

/// Whether all query tiles take the same time, so that they may be dealt out in turn.
bool even_tiles(const AttentionParams& params) {
  const Pattern& pattern = params.pattern;
  return params.sequences.same_lengths() && !pattern.causal && !pattern.list.present() &&
         params.scores.bounds.data == nullptr && pattern.left >= params.problem.seq_kv &&
         pattern.right >= params.problem.seq_kv;
}

/// The partial results of a call.
struct PartialPlan {
  KeySplit split;
  HeadPacking packing;
  bool folds = false;  // a thread block keeps the sum of its tile's chunks
  int32_t strips = 0;  // of a head and class
  int64_t heads = 0;   // that have room at once; whole groups where heads share tiles
  int64_t all_strips = 0, bytes = 0;
};

int32_t multiprocessors_of(int32_t device) {
  int32_t count = 1;  // where this fails, so does the launch
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

/// Whether so many query tiles keep a device busy to the end.
bool fills(int64_t tiles, int32_t multiprocessors) {
  constexpr float kLeast = 0.85f;
  return tiles >= kLeast * ceil_div64(tiles, multiprocessors) * multiprocessors;
}

PartialPlan plan_partials(const AttentionParams& params, KernelTile tile, int32_t multiprocessors) {
  constexpr int64_t kMostBytes = int64_t{64} << 20;  // or what one head, or group, takes
  PartialPlan plan;
  plan.split = plan_key_split(params, tile);
  plan.packing = {1, tile.block_q};
  plan.folds = may_split(params);
  if (plan.split.chunks == 0) return plan;
  const int32_t classes = params.pattern.classes(params.problem.seq_q);
  plan.strips = ceil_div(ceil_div(plan.split.rows(params.problem, tile), classes), kStripRows);
  plan.packing = pack_heads(params, tile, plan.split);
  const int64_t least = plan.packing.heads > 1 ? params.problem.group() : 1;
  const int64_t heads = int64_t{params.problem.batch} * params.problem.heads_q;
  const int64_t tiles =
      heads / least * ceil_div64(least, plan.packing.heads) * classes * plan.split.tiles;
  plan.folds = tile.folds && params.outputs.rows == nullptr && fills(tiles, multiprocessors);
  if (plan.folds) {
    plan.heads = heads;
    return plan;
  }
  const int64_t head_strips = int64_t{classes} * plan.strips;
  const int64_t strip_bytes = Partials::strip_bytes(plan.split.chunks, tile.head_dim);
  const int64_t room = kMostBytes / (head_strips * strip_bytes) / least;
  plan.heads = std::min(std::max<int64_t>(room, 1) * least, heads);
  plan.all_strips = plan.heads * head_strips;
  plan.bytes = plan.all_strips * strip_bytes;
  return plan;
}

int64_t call_bytes(const AttentionParams& params) {
  if (params.pattern.topk > 0) {
    const int64_t rows =
        int64_t{params.problem.batch} * params.problem.heads_q * params.problem.seq_q;
    return kCounterBytes + rows * static_cast<int64_t>(sizeof(Threshold));
  }
  const PartialPlan partials =
      plan_partials(params, tile_of(choose(params)), multiprocessors_of(params.device));
  const int64_t most_tiles = int64_t{params.problem.batch} * params.problem.heads_q *
                             ceil_div(params.problem.seq_q, kConsumerRows);
  const int64_t order_bytes = orders_lists(params) ? most_tiles * sizeof(int32_t)
                                                   : ragged_order(params, kConsumerRows).bytes;
  return kCounterBytes + padding_bytes(params) + partials.bytes + order_bytes;
}

/// How scores become exponents of 2.
void prepare_scores(Arguments* args) {
  constexpr float kMostCap = 1e30f;  // leaves every score as it is, and no product overflows
  constexpr float kMostRate = std::numeric_limits<float>::max();
  const Scores& scores = args->params.scores;
  const Features features = args->params.features;
  args->capped = scores.softcap != 0.0f;
  args->biased = features.has(Feature::kAlibi) ||
                 (features.has(Feature::kMask) && scores.mask.kind != MaskKind::kBool);
  args->transform = args->capped || args->biased || features.has(Feature::kOddScale);
  args->scale_log2 = args->transform ? kLog2e : scores.scale * kLog2e;
  args->score_rate = scores.scale;
  if (args->capped) {
    const float softcap = std::min(scores.softcap, kMostCap);
    const float rate = scores.scale / softcap / kTanhUnit;
    if (!args->biased) args->scale_log2 = softcap * kLog2e;
    args->cap_unit = softcap;
    args->score_rate = std::max(-kMostRate, std::min(rate, kMostRate));
  }
}

/// How the mask is read; of padding the keys that it leaves.
Status prepare_mask(Arguments* args) {
  const AttentionParams& params = args->params;
  const MaskView& mask = params.scores.mask;
  if (mask.kind == MaskKind::kNone) return {};
  const int64_t pair_bytes = mask.kind == MaskKind::kBool      ? 2
                             : mask.kind == MaskKind::kFloat32 ? 8
                                                               : 4;
  const bool consecutive = mask.stride_k == 1 && params.pattern.shared_axis();
  const bool even =
      (params.problem.seq_kv | mask.stride_b | mask.stride_h | mask.stride_q) % 2 == 0;
  args->mask_in_pairs =
      consecutive && even && reinterpret_cast<uintptr_t>(mask.data) % pair_bytes == 0;
  if (!is_padding(params)) return {};
  const int64_t bytes = padding_bytes(params);
  args->mask_has_bounds = true;
  Status status = find_padding(&args->params, args->scratch);
  args->scratch += bytes;
  return status;
}

/// Whether the bits that a tile needs of a partial block lie in one piece.
bool copies_bits(const BlockList& list, KernelTile tile, int32_t box_rows) {
  return list.has_bits() && list.block_kv == box_rows && box_rows >= 32 &&
         list.block_q % tile.block_q == 0 && reinterpret_cast<uintptr_t>(list.bits) % 16 == 0;
}

Status run_call(const AttentionParams& params) {
  Arguments args;
  args.params = params;
  args.multiprocessors = multiprocessors_of(params.device);
  args.scratch = static_cast<char*>(params.workspace) + kCounterBytes;
  prepare_scores(&args);
  if (Status status = prepare_mask(&args); !status.ok()) return status;
  args.raw = has_raw_values(args.params);
  if (!even_tiles(args.params)) args.counter = static_cast<int32_t*>(params.workspace);
  if (params.pattern.topk > 0) args.thresholds = reinterpret_cast<Threshold*>(args.scratch);
  constexpr auto kIndices = std::make_index_sequence<kNumHeadDims>();
  const Entry entry = choose(args.params);
  return params.problem.dtype == Dtype::kFloat16 ? launch<Dtype::kFloat16>(entry, args, kIndices)
                                                 : launch<Dtype::kBFloat16>(entry, args, kIndices);
}

int64_t typed_bytes(const AttentionParams& params) {
  if (params.num_global_tokens == 0) return call_bytes(params);
  const ScatteredCalls calls = scattered_calls(params);
  return scattered_bytes(params) + std::max(call_bytes(calls.columns), call_bytes(calls.rows));
}

/// Runs a call whose keys are of query's dtype.
Status run_typed(const AttentionParams& params) {
  if (params.num_global_tokens == 0) return run_call(params);
  const ScatteredCalls calls = scattered_calls(params);
  Status status = gather_globals(params, calls);
  if (status.ok()) status = run_call(calls.columns);
  return status.ok() ? run_call(calls.rows) : status;
}

int64_t workspace_bytes(const AttentionParams& params) {
  if (!lays_out(params)) return typed_bytes(params);
  const Sections sections(params);
  auto bytes = [&](int32_t section) {
    return typed_bytes(sections.laid_out(sections.part(section)));
  };
  return sections.bytes() + std::max(bytes(0), bytes(sections.count() - 1));  // the last is smaller
}

Status run(const AttentionParams& params) {
  if (params.problem.batch == 0 || params.problem.heads_q == 0 || params.problem.seq_q == 0)
    return {};
  if (!lays_out(params)) return run_typed(params);
  const Sections sections(params);
  Status status;
  for (int32_t section = 0; section < sections.count() && status.ok(); ++section) {
    const AttentionParams part = sections.part(section), call = sections.laid_out(part);
    status = lay_out(part, call);
    if (status.ok()) status = run_typed(call);
  }
  return status;
}

}  // namespace

void arrange_tiles(KernelTile tile, Arguments* args) {
  const AttentionParams& params = args->params;
  const Pattern& pattern = params.pattern;
  args->group = params.problem.group();
  args->classes = pattern.classes(params.problem.seq_q);
  TileGrid& grid = args->grid;
  grid.row_blocks = ceil_div(ceil_div(params.problem.seq_q, args->classes), tile.block_q);
  const int32_t problems = params.problem.batch * params.problem.heads_q * args->classes;
  grid.problems = problems;
  args->num_tiles = problems * grid.row_blocks;
  char* memory = args->scratch;
  if (orders_lists(params)) args->order = reinterpret_cast<int32_t*>(memory);
  if (!params.sequences.same_lengths()) {
    const RaggedOrder order = ragged_order(params, tile.block_q);
    grid.section = order.section;
    args->num_tiles =
        static_cast<int32_t>(std::min<int64_t>(order.most_rows * order.section, kUnlimited));
    args->tile_rows = reinterpret_cast<TileRow*>(memory);
    args->sequences = reinterpret_cast<int32_t*>(args->tile_rows + order.most_rows);
    args->sequence_ends = args->sequences + params.problem.batch;
  }
  const PartialPlan plan = plan_partials(params, tile, args->multiprocessors);
  args->split = plan.split;
  args->packing = plan.packing;
  args->folds = plan.folds;
  if (args->split.chunks > 0) {
    Partials& partials = args->partials;
    partials.strips = plan.strips;
    partials.heads = static_cast<int32_t>(plan.heads);
    partials.max_chunks = args->parts();
    partials.columns = tile.head_dim;
    partials.tile_rows = args->split.all ? 0 : tile.block_q;
    const int64_t states = plan.all_strips * partials.max_chunks * kStripRows;
    partials.out = reinterpret_cast<float4*>(memory);
    partials.state = reinterpret_cast<float2*>(partials.out + states * partials.columns / 4);
    partials.chunks = reinterpret_cast<int32_t*>(partials.state + states);
    args->split_items = args->items_of(partials.heads);
    args->num_tiles = args->split_items + (args->split.all ? 0 : args->num_tiles);
  }

  args->box_rows = tile.block_kv;
  if (pattern.list.present()) {
    while (pattern.list.block_kv % args->box_rows != 0) args->box_rows /= 2;
  }
  args->boxes = tile.block_kv / args->box_rows;
  args->copies_bits = copies_bits(pattern.list, tile, args->box_rows);
  args->copy_rows = args->box_rows;
  if (params.keys.paged()) {
    const int32_t page_size = params.keys.page_size;
    args->copy_rows = std::gcd(args->box_rows, page_size);
    while (page_size >> (args->page_shift + 1) > 0) ++args->page_shift;
    if (page_size != 1 << args->page_shift) args->page_shift = -1;
  }
  args->copies = tile.block_kv / args->copy_rows;

  // A query head's tiles follow each other, but where their lengths differ the longest of several
  // heads come first: under causal of as many as fit L2, with global rows of all. Under causal as
  // many of the shortest as have their keys in L2 are left to the end, where blocks of all heads
  // then finish together.
  if (args->tile_rows != nullptr) return;
  if (pattern.global_count > 0 && !pattern.causal && args->split.chunks == 0) {
    grid.section = problems;
    args->last_first = false;
  } else if (params.scores.mask.kind != MaskKind::kNone && params.scores.mask.stride_h == 0 &&
             !pattern.causal) {  // heads share rows of the mask
    grid.section = params.problem.heads_q * args->classes;
  } else if (pattern.causal && pattern.left >= params.problem.seq_kv) {
    grid.section = section_of(params, args->classes, params.problem.seq_kv, problems);
    const int64_t tile_bytes =
        int64_t{params.problem.batch} * params.problem.heads_kv * tile.block_q * key_bytes(params);
    grid.tail =
        static_cast<int32_t>(std::min<int64_t>(kCacheBytes / tile_bytes, grid.row_blocks / 2));
  }
}

bool next_section(Arguments* args) {
  Partials& partials = args->partials;
  const Problem& problem = args->params.problem;
  partials.first_head += partials.heads;
  partials.heads = imin(partials.heads, problem.batch * problem.heads_q - partials.first_head);
  args->split_items = args->num_tiles = args->items_of(partials.heads);
  return partials.heads > 0;
}

}  // namespace hopper

const Engine kHopper = {"hopper", hopper::workspace_bytes, hopper::run};

}  // namespace sparse_attn::cuda

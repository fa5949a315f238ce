// The Hopper engine: takes the kernel of a call from table.h and launches it. A call with scattered
// global tokens becomes two (scattered.h), and keys that the copy engine brings badly or not at all
// are laid out first, in sections (sections.h). capability.cpp says what it does not serve.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "../../arena.h"
#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/plain_scores.h"
#include "../engines.h"
#include "arrange.h"
#include "config.h"
#include "launch.h"
#include "lay_out.h"
#include "padding.h"
#include "scattered.h"
#include "sections.h"
#include "softmax.cuh"
#include "tensor_maps.h"

namespace sparse_attn::cuda {
namespace hopper {
namespace {

/// Most keys for which tiles of 128 rows beat those of 192 under causal.
constexpr int32_t kShortCausal = 1536;

/// Whether all tiles visit nearly as many keys.
bool has_like_tiles(const AttentionParams& params) {
  constexpr int32_t kSmallPart = 4;  // one of so many
  return !params.pattern.causal || params.problem.seq_q <= params.problem.seq_kv / kSmallPart;
}

/// Whether three consumers are faster than two, which waste less of short calls. Few tiles of like
/// length end all at once, and then some multiprocessors have one more of them than others.
bool prefers_three(const AttentionParams& params, int32_t multiprocessors) {
  constexpr float kGain = 1.15f, kFewTurns = 4;
  const Problem& problem = params.problem;
  if (params.pattern.causal && problem.seq_kv <= kShortCausal) return false;
  const int32_t classes = params.pattern.classes(problem.seq_q);
  const Sequences& sequences = params.sequences;
  const int64_t most_rows = int64_t{problem.batch} * problem.seq_q;
  auto turns = [&](int32_t consumers) {  // of a multiprocessor
    const int32_t rows = consumers * kConsumerRows;
    int64_t row_blocks = int64_t{problem.batch} * ceil_div(ceil_div(problem.seq_q, classes), rows);
    if (sequences.packed() && sequences.packed_rows < most_rows) {
      // Of lengths that differ the last tile of each is half full.
      row_blocks = sequences.packed_rows / (classes * rows) + problem.batch / 2;
    }
    const int64_t tiles = row_blocks * problem.heads_q * classes;
    return static_cast<float>(tiles) / static_cast<float>(multiprocessors);
  };
  const float of_three = turns(3), of_two = turns(2);
  const bool whole = of_three <= kFewTurns && has_like_tiles(params);
  return whole ? 3 * std::ceil(of_three) <= kGain * 2 * std::ceil(of_two)
               : 3 * of_three <= kGain * 2 * of_two;
}

/// With these alone the host knows which keys exist, but for the offsets of causal queries.
constexpr Features kKeysOnHost =
    Features::of(Feature::kMask, Feature::kQueryOffsets, Feature::kKeyOrigins, Feature::kSoftcap,
                 Feature::kOddScale, Feature::kSinkLogits, Feature::kAlibi, Feature::kWindow,
                 Feature::kDilation, Feature::kLead, Feature::kColumns, Feature::kGlobalRows,
                 Feature::kGlobalIndices, Feature::kList, Feature::kPartialBlocks, Feature::kTopK,
                 Feature::kValueDim, Feature::kFloat8Keys);

/// Whether which keys exist is known on the device alone, or for classes of keys of their own.
/// Bounds may also be those of a mask of padding.
bool has_raw_values(const AttentionParams& params) {
  if (params.scores.bounds.data != nullptr || !params.features.within(kKeysOnHost)) return true;
  const bool cut = params.sequences.offsets_on_device() ||
                   params.num_keys(params.sequences.common()) < params.problem.seq_kv;
  return params.pattern.causal && cut && !has_short_maps(params);
}

/// The kernel of a call.
Entry choose(const AttentionParams& params, int32_t multiprocessors) {
  const KeySplit plan = plan_key_split(params, split_tile(params), multiprocessors);
  const bool all = plan.chunks > 0 ? plan.all : may_deal(params, multiprocessors);
  const Split split = all                 ? Split::kAll
                      : plan.chunks > 0   ? Split::kGlobalRows
                      : may_split(params) ? Split::kSequences
                                          : Split::kNone;
  const Wanted wanted = {params.features, split, has_raw_values(params),
                         params.pattern.list.block_q};
  const Entry entry = find_kernel(params.problem.widest_dim(), wanted);
  // A plain kernel of three consumers is followed by that of two.
  if (!entry.exists() || kKernels[entry.kernel].consumers < 3) return entry;
  const Entry lower = {entry.kernel + 1, entry.head_dim};
  return lower.keys() > 0 && !prefers_three(params, multiprocessors) ? lower : entry;
}

/// Launches the chosen kernel if it is of this part.
template <Part kPart, Dtype kDtype, int32_t kHeadDim>
void launch_if(Entry entry, const Arguments& args, Status* status) {
  if constexpr (has_part(kPart, kHeadDim)) {
    if (kKernels[entry.kernel].part() != kPart) return;
    *status = launch_part<kPart, kDtype, kHeadDim>(entry.kernel, args);
  }
}

/// Launches the chosen kernel if it is of this head dim.
template <Dtype kDtype, int32_t kHeadDim>
void launch_at(Entry entry, const Arguments& args, Status* status) {
  if (kHeadDim != entry.head_dim) return;
  launch_if<Part::kWhole, kDtype, kHeadDim>(entry, args, status);
  launch_if<Part::kBiased, kDtype, kHeadDim>(entry, args, status);
  launch_if<Part::kRagged, kDtype, kHeadDim>(entry, args, status);
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

int32_t multiprocessors_of(int32_t device) {
  int32_t count = 1;  // where this fails, so does the launch
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

/// What run_call needs besides what Arguments hold.
struct CallPlan {
  Entry kernel;
  int32_t* padding = nullptr;  // entries of padding.h
};

/// Chooses the kernel of `args->params` and arranges its tiles; takes the workspace, of which the
/// counter is the first piece.
CallPlan plan_call(Arena* arena, Arguments* args) {
  const AttentionParams& params = args->params;
  args->multiprocessors = multiprocessors_of(params.device);
  CallPlan plan = {choose(params, args->multiprocessors)};
  if (!plan.kernel.exists()) return plan;
  args->counter = arena->take<int32_t>(1);
  if (is_padding(params)) plan.padding = arena->take<int32_t>(padding_entries(params));
  if (params.pattern.topk > 0) {
    args->thresholds = arena->take<Threshold>(int64_t{params.problem.batch} *
                                              params.problem.heads_q * params.problem.seq_q);
  }
  arrange_tiles(tile_of(plan.kernel), arena, args);
  return plan;
}

int64_t call_bytes(const AttentionParams& params) {
  Arguments args;
  args.params = params;
  Arena arena(nullptr);
  plan_call(&arena, &args);
  return arena.used();
}

/// Whether kernels that have no code for transforms of scores serve calls without any.
constexpr bool plain_kernels_take_plain_scores() {
  for (const Kernel& kernel : kKernels) {
    const bool transforms = kernel.accepts.has(Feature::kOddScale);  // as Config says
    if (!transforms && !kernel.accepts.within(kScaledScores)) return false;
  }
  return true;
}
static_assert(plain_kernels_take_plain_scores());

/// How scores become exponents of 2.
void prepare_scores(Arguments* args) {
  constexpr float kMostCap = 1e30f;  // leaves every score as it is, and no product overflows
  constexpr float kMostRate = std::numeric_limits<float>::max();
  const Scores& scores = args->params.scores;
  const Features features = args->params.features;
  constexpr Features kMasked = kScaledScores.with(Features::of(Feature::kMask));  // a boolean one
  args->lazy = is_lazy(find_kernel(args->params.problem.widest_dim(), {}).head_dim);
  args->capped = scores.softcap != 0.0f;
  args->biased = features.has(Feature::kAlibi) ||
                 (features.has(Feature::kMask) && scores.mask.kind != MaskKind::kBool);
  args->transform = args->biased || !features.within(kMasked);
  args->scale_log2 = args->transform ? kLog2e : scores.scale * kLog2e;
  args->score_rate = scores.scale;
  if (args->capped) {
    const float softcap = std::min(scores.softcap, kMostCap);
    const float rate = scores.scale / softcap / kTanhUnit;
    if (!args->biased) {
      args->scale_log2 = softcap * kLog2e;
      if (!features.has(Feature::kFloat8Keys)) {  // whose scale is known to the device alone
        args->small_cap = SmallCap::of(double{scores.scale} / softcap, double{softcap} * kLog2e);
      }
    }
    args->cap_unit = softcap;
    args->score_rate = std::max(-kMostRate, std::min(rate, kMostRate));
  }
}

/// How the mask is read; of padding the keys that it leaves, whose entries are written at
/// `padding`.
Status prepare_mask(int32_t* padding, Arguments* args) {
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
  args->copies_mask = consecutive && can_map(params) && !params.pattern.list.present();
  if (padding == nullptr) return {};
  args->mask_has_bounds = true;
  return find_padding(&args->params, padding);
}

Status run_call(const AttentionParams& params) {
  Arguments args;
  args.params = params;
  Arena arena(params.workspace);
  const CallPlan plan = plan_call(&arena, &args);
  prepare_scores(&args);
  if (Status status = prepare_mask(plan.padding, &args); !status.ok()) return status;
  args.raw = has_raw_values(args.params);
  if (even_tiles(args.params)) args.counter = nullptr;
  constexpr auto kIndices = std::make_index_sequence<kNumHeadDims>();
  return params.problem.dtype == Dtype::kFloat16
             ? launch<Dtype::kFloat16>(plan.kernel, args, kIndices)
             : launch<Dtype::kBFloat16>(plan.kernel, args, kIndices);
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
    status = lay_out_keys(part, call);
    if (status.ok()) status = run_typed(call);
  }
  return status;
}

}  // namespace

}  // namespace hopper

const Engine kHopper = {"hopper", hopper::workspace_bytes, hopper::run};

}  // namespace sparse_attn::cuda

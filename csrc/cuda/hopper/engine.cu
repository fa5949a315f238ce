// The Hopper engine: chooses the tile shape of a call and launches its kernel. What it does not
// serve (capability.h keeps such calls away) is float32, other head dims, attn_mask, scattered
// global tokens, lists of query blocks that no tile height divides.
#include <algorithm>

#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/plain_scores.h"
#include "../engines.h"
#include "config.h"
#include "launch.h"
#include "tensor_maps.h"
#include "tile_order.h"

namespace sparse_attn::cuda {
namespace hopper {
namespace {

constexpr int64_t kCounterBytes = 256;

/// Most keys for which tiles of 128 rows beat those of 192 under causal (hd 64 and 96).
constexpr int32_t kShortCausal = 1536;

/// By two consumers: lists on key tiles of their own, ranges by the plain kernel where it serves.
template <Dtype kDtype, int HEAD_DIM, int kRangeKeys, int kListKeys>
Status launch_pair(const Arguments& args) {
  using K = KernelKind;
  if (args.params.pattern.list.present()) {
    return launch<Config<kDtype, HEAD_DIM, kListKeys, 2, K::kListed>>(args);
  }
  return args.plain ? launch<Config<kDtype, HEAD_DIM, kRangeKeys, 2, K::kPlain>>(args)
                    : launch<Config<kDtype, HEAD_DIM, kRangeKeys, 2, K::kGeneral>>(args);
}

template <Dtype kDtype>
Status launch_for_head_dim(const Arguments& args) {
  using K = KernelKind;
  const AttentionParams& params = args.params;
  const BlockList& list = params.pattern.list;
  const bool half_tiles = list.present() && list.block_q % 128 != 0;  // 64 rows are one layout row
  const bool three =
      args.plain && !(params.pattern.causal && params.problem.seq_kv <= kShortCausal);
  switch (params.problem.head_dim) {
    case 64:
      if (half_tiles) return launch<Config<kDtype, 64, 128, 1, K::kListed>>(args);
      if (three) return launch<Config<kDtype, 64, 128, 3, K::kPlain>>(args);
      return launch_pair<kDtype, 64, 128, 128>(args);
    case 96:
      if (half_tiles) return launch<Config<kDtype, 96, 128, 1, K::kListed>>(args);
      if (three) return launch<Config<kDtype, 96, 96, 3, K::kPlain>>(args);
      return launch_pair<kDtype, 96, 128, 128>(args);
    case 128:
      if (half_tiles) return launch<Config<kDtype, 128, 128, 1, K::kListed>>(args);
      return launch_pair<kDtype, 128, 128, 128>(args);
    case 192:
      return launch_pair<kDtype, 192, 112, 64>(args);
    case 256:
      return launch_pair<kDtype, 256, 80, 64>(args);
  }
  return {cudaErrorNotSupported, "the hopper engine has no kernel for this head dim"};
}

/// Whether all query tiles take the same time, so that they may be dealt out in turn.
bool even_tiles(const AttentionParams& params) {
  const Pattern& pattern = params.pattern;
  return !pattern.causal && !pattern.list.present() && params.scores.bounds.data == nullptr &&
         pattern.left >= params.problem.seq_kv && pattern.right >= params.problem.seq_kv;
}

/// Whether which keys exist is known on the device alone, or for classes of keys of their own.
bool has_raw_values(const AttentionParams& params) {
  if (params.scores.bounds.data != nullptr) return true;
  const bool cut = params.sequences.offsets_on_device() ||
                   params.num_keys(params.sequences.of(0)) < params.problem.seq_kv;
  return params.pattern.causal && cut && !has_short_maps(params);
}

/// Whether a plain kernel serves the call.
bool is_plain(const Arguments& args) {
  constexpr Features kPlain = Features::of(Feature::kQueryOffsets, Feature::kSinkLogits,
                                           Feature::kWindow, Feature::kDilation, Feature::kTopK);
  return args.params.features.within(kPlain) && (!args.raw || args.params.pattern.topk > 0);
}

/// Token top-k: plain calls of two head dims.
template <Dtype kDtype>
Status launch_topk_for_head_dim(const Arguments& args) {
  auto* thresholds =
      reinterpret_cast<Threshold*>(static_cast<char*>(args.params.workspace) + kCounterBytes);
  return args.params.problem.head_dim == 64 ? launch_topk<kDtype, 64>(args, thresholds)
                                            : launch_topk<kDtype, 128>(args, thresholds);
}

/// Partial results of a call, (row, chunk) pairs, whatever tile is chosen: chunks are no fewer
/// where key tiles are smaller.
int64_t most_partials(const AttentionParams& params) {
  constexpr int32_t kLeastKeys = 80;  // of the tiles of ranges
  const TileShape tile = {2 * kConsumerRows, kLeastKeys};
  const KeySplit split = plan_key_split(params, tile);
  return int64_t{params.problem.batch} * params.problem.heads_q * split.rows(tile) * split.chunks;
}

int64_t workspace_bytes(const AttentionParams& params) {
  if (params.pattern.topk > 0) {
    const int64_t rows =
        int64_t{params.problem.batch} * params.problem.heads_q * params.problem.seq_q;
    return kCounterBytes + rows * static_cast<int64_t>(sizeof(Threshold));
  }
  const int64_t partial_bytes = sizeof(float2) + params.problem.head_dim * sizeof(float);
  const int64_t most_tiles = int64_t{params.problem.batch} * params.problem.heads_q *
                             ceil_div(params.problem.seq_q, kConsumerRows);
  const int64_t order_bytes = orders_lists(params) ? most_tiles * sizeof(int32_t) : 0;
  return kCounterBytes + most_partials(params) * partial_bytes + order_bytes;
}

Status run(const AttentionParams& params) {
  if (params.problem.batch == 0 || params.problem.heads_q == 0 || params.problem.seq_q == 0)
    return {};
  Arguments args;
  args.params = params;
  args.transform = !has_plain_scores(params);
  args.scale_log2 = args.transform ? kLog2e : params.scores.scale * kLog2e;
  args.raw = has_raw_values(params);
  args.plain = is_plain(args);
  if (!even_tiles(params)) args.counter = static_cast<int32_t*>(params.workspace);
  const bool half = params.problem.dtype == Dtype::kFloat16;
  if (params.pattern.topk > 0) {
    if (!args.plain) return {cudaErrorNotSupported, "hopper's top-k takes scaled scores alone"};
    return half ? launch_topk_for_head_dim<Dtype::kFloat16>(args)
                : launch_topk_for_head_dim<Dtype::kBFloat16>(args);
  }
  return half ? launch_for_head_dim<Dtype::kFloat16>(args)
              : launch_for_head_dim<Dtype::kBFloat16>(args);
}

}  // namespace

void arrange_tiles(TileShape tile, Arguments* args) {
  const AttentionParams& params = args->params;
  const Pattern& pattern = params.pattern;
  args->group = params.problem.group();
  args->classes = pattern.classes(params.problem.seq_q);
  args->row_blocks = ceil_div(ceil_div(params.problem.seq_q, args->classes), tile.block_q);
  const int32_t problems = params.problem.batch * params.problem.heads_q * args->classes;
  args->split = plan_key_split(params, tile);
  args->num_tiles = problems * (args->split.items() + args->row_blocks);
  char* memory = static_cast<char*>(params.workspace) + kCounterBytes;
  if (orders_lists(params)) args->order = reinterpret_cast<int32_t*>(memory);
  if (args->split.chunks > 0) {
    Partials& partials = args->partials;
    partials.rows = args->split.rows(tile);
    partials.max_chunks = args->split.chunks;
    partials.head_dim = params.problem.head_dim;
    partials.tile_rows = tile.block_q;
    const int64_t states = int64_t{problems} * partials.rows * partials.max_chunks;
    partials.state = reinterpret_cast<float2*>(memory);
    partials.out = reinterpret_cast<float*>(partials.state + states);
  }

  args->box_rows = tile.block_kv;
  if (pattern.list.present()) {
    while (pattern.list.block_kv % args->box_rows != 0) args->box_rows /= 2;
  }
  args->boxes = tile.block_kv / args->box_rows;

  // A query head's tiles follow each other, but where their lengths differ the longest of several
  // heads come first: under causal of as many as fit L2, with global rows of all. Under causal as
  // many of the shortest as have their keys in L2 are left to the end, where blocks of all heads
  // then finish together.
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  if (pattern.global_count > 0 && !pattern.causal && args->split.chunks == 0) {
    args->section = problems;
    args->last_first = false;
  } else if (pattern.causal && pattern.left >= params.problem.seq_kv) {
    int64_t head_bytes = int64_t{params.problem.seq_kv} * params.problem.head_dim * 2 *
                         size_of(params.problem.dtype);
    int64_t heads = head_bytes < kCacheBytes ? kCacheBytes / head_bytes : 1;
    int64_t section = heads * params.problem.group() * args->classes;
    args->section = static_cast<int32_t>(section < problems ? section : problems);
    const int64_t tile_bytes = int64_t{params.problem.batch} * params.problem.heads_kv *
                               tile.block_q * params.problem.head_dim * 2 *
                               size_of(params.problem.dtype);
    args->tail =
        static_cast<int32_t>(std::min<int64_t>(kCacheBytes / tile_bytes, args->row_blocks / 2));
  }
}

}  // namespace hopper

const Engine kHopper = {"hopper", hopper::workspace_bytes, hopper::run};

}  // namespace sparse_attn::cuda

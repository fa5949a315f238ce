// How a call with few queries is cut: query heads of a group packed as rows of one tile, keys into
// chunks, chunks shared out to thread blocks. Plain C++, from sizes alone: a chunk depends on the
// pattern and the length of the keys or of the list, never on batch, heads or device, so neither do
// a row's bits.
#pragma once

#include <cstdint>

#include "../../params.h"
#include "../common/chunk_groups.h"
#include "../common/plain_scores.h"

namespace sparse_attn::cuda::decode {

constexpr int32_t kFragmentRows = 16;  // of mma
constexpr int32_t kTallRows = 32;      // packed query rows of a tile where there are more than that
constexpr int32_t kStepKeys = 16;      // keys that a warp loads and multiplies at once
constexpr int32_t kMostMerged = 16;    // thread blocks of a cluster
constexpr int32_t kMostKept = 2048;    // keys that token top-k keeps of a row (topk.h)
constexpr int32_t kMostRanking = 64;   // queries of token top-k

/// How the chunks of a row become its output.
enum class Merging {
  kByKernel,   // merged by the kernel after this one
  kByCluster,  // by the thread blocks that stored them, which are a cluster
  kNone,       // a thread block has all of the row, whose sum is divided and stored
};

/// The grid of a call.
struct SplitGrid {
  int32_t classes = 1;       // residue classes that have rows
  int32_t heads_packed = 1;  // query heads whose rows share tiles
  int32_t tile_rows = 16;    // packed query rows of a tile
  int32_t row_tiles = 1;     // of the packed rows of a class
  int32_t tiles = 1;         // row tiles that read one key head
  int32_t chunk_steps = 1;   // steps of a chunk
  int32_t max_chunks = 1;    // chunks that a row tile may visit, at most
  int32_t places = 1;        // of a row's partial results
  int32_t splits = 1;        // thread blocks that share the chunks of a row tile, side by side
  int32_t shares = 0;        // or those of a row tile of all sequences together (shares.cuh)
  Merging merging = Merging::kByKernel;
  int32_t group = kInARow;    // of chunks (chunk_groups.h), the smallest that a text may have
  bool whole_groups = false;  // small ones are shared out, not chunks: each leaves one result
  bool gaps = false;          // some chunks are stored as part of another's result, or not visited
  bool early = false;         // the host knows what tiles are, before the kernel in front has ended
  int32_t first_block = 0;    // of a call that is served in several parts
};

/// Keys of the blocks of a list, as far as a sequence may have that many.
SPARSE_ATTN_HD int32_t keys_of_blocks(const BlockList& list, int32_t blocks) {
  const int64_t keys = int64_t{blocks} * list.block_kv;
  return static_cast<int32_t>(keys < kMaxLength ? keys : kMaxLength);
}

/// Keys that a row of a sequence of `keys` may visit, at most: of the main view, or of the list as
/// it is expected.
SPARSE_ATTN_HD int32_t main_reach(const Pattern& pattern, int32_t keys) {
  const int32_t length = ceil_div(keys, pattern.dilation);
  if (pattern.list.present()) {
    const BlockList& list = pattern.list;
    return imin(length, keys_of_blocks(list, list.expected > 0 ? list.expected : list.max_count));
  }
  return pattern.most_seen(length);
}

/// The same with its leading keys.
SPARSE_ATTN_HD int32_t visited_keys(const Pattern& pattern, int32_t keys) {
  const int32_t lead = pattern.most_lead(keys);
  return imin(main_reach(pattern, keys), keys - lead) + lead;
}

/// The group of the chunks of a text of `keys` keys. Where few of them are visited, all of a row
/// tile's are often one thread block's, which sums them in a row.
SPARSE_ATTN_HD int32_t group_of(Features features, int32_t keys, int32_t chunk) {
  return features.within(kAllKeys) ? group_size(ceil_div(keys, chunk)) : kInARow;
}

/// Partial results of a row, at most: of its chunks or, of a long text, of its small groups; and
/// how many more an interval off their edges touches.
constexpr int32_t kMostResults = 32, kOffEdges = 3;

/// Keys above which a text has chunks enough for few key heads to fill a device, and how many.
constexpr int32_t kLongText = 32768, kMostOfLong = kMostResults * kSmallGroup;

/// Whether long texts have so many.
SPARSE_ATTN_HD bool divides_long(Features features) {
  return features.within(kAllKeys.without(Features::of(Feature::kFloat8Keys)));
}

/// Keys of a list's blocks up to which its chunks are as short as those of a window; larger blocks
/// lose more by short chunks than they win.
constexpr int32_t kSmallBlock = 32;

/// Steps of a chunk of at least `keys` keys: a multiple of every number of warps.
SPARSE_ATTN_HD int32_t steps_of_chunk(int32_t keys) {
  constexpr int32_t kUnit = 4;
  return ceil_div(keys, kUnit * kStepKeys) * kUnit;
}

/// Steps of a chunk for rows that visit up to `keys` keys, of `list` where it is present: long
/// enough that its partial results count little beside its keys, of `codes` in 8 bits twice as
/// many, short enough that few rows on few keys still fill a device: up to `most_chunks` of them. A
/// multiple of every number of warps.
SPARSE_ATTN_HD int32_t chunk_steps(int32_t keys, int32_t seq_q, const BlockList& list,
                                   int32_t head_dim, bool codes,
                                   int32_t most_chunks = kMostMerged) {
  constexpr int32_t kFewKeys = 4096, kLeast = 128;
  constexpr int32_t kNarrow = 64, kMost = 1024, kMostOfNarrow = 512;
  const bool narrow = head_dim <= kNarrow;
  const bool divided = !list.present() || list.block_kv <= kSmallBlock;
  const bool few = divided && keys <= kFewKeys;
  const bool many = divided && (!codes || keys <= kFewKeys);
  const int32_t chunk = ceil_div(keys, many ? most_chunks : most_chunks / 2);
  const int32_t most = narrow ? kMostOfNarrow : kMost;
  const int32_t least = imax(ceil_div(keys, kMostResults), (few ? 32 : 64) * seq_q);
  return steps_of_chunk(imax(imin(imax(chunk, kLeast), most), least));
}

/// Keys of a sequence that are one chunk, since a merge would take longer than they do.
constexpr int32_t kShortSequence = 256;

/// The same for a sequence of `keys` keys under a pattern.
SPARSE_ATTN_HD int32_t chunk_steps(const Pattern& pattern, Features features, int32_t keys,
                                   int32_t seq_q, int32_t head_dim) {
  if (keys <= kShortSequence) return kShortSequence / kStepKeys;
  if (divides_long(features) && keys > kLongText) {
    const int32_t chunks = keys > 2 * kLongText ? kMostOfLong : kMostOfLong / 2;
    return steps_of_chunk(imax(ceil_div(keys, chunks), 64 * seq_q));
  }
  // A window begins inside a chunk, and so touches one more of them than its length asks for; the
  // thread block that has two of them is late where there are several queries.
  const bool windowed =
      !pattern.list.present() && main_reach(pattern, keys) < ceil_div(keys, pattern.dilation);
  const int32_t most = windowed && seq_q > 1 ? kMostMerged - 1 : kMostMerged;
  const bool codes = features.has(Feature::kFloat8Keys);
  return chunk_steps(visited_keys(pattern, keys), seq_q, pattern.list, head_dim, codes, most);
}

/// Chunks of up to `keys` keys that a row visits, at most, whatever the length of its sequence.
constexpr int32_t most_chunks(int32_t keys, bool long_divided) {
  constexpr int32_t kSmallest = 128, kLarge = 512;
  const int32_t most = long_divided ? kMostOfLong : kMostResults;
  const int32_t large = imax(kMostMerged, imin(ceil_div(keys, kLarge), most));
  return imin(ceil_div(keys, kSmallest), large);
}

/// What a kernel leaves out: what its calls do not have is constant to it, which makes it short. A
/// cold call fetches its code from memory.
enum class Kind {
  kPlain,      // a window on keys that all exist, scores that need no more than their scale
  kSequences,  // the same of sequences that differ in length or lie in pages
  kListed,     // lists of whole blocks, scores as plain
  kGeneral,    // all but strided views
  kStrided,
};
SPARSE_ATTN_HD constexpr bool is_lean(Kind kind) {
  return kind == Kind::kPlain || kind == Kind::kSequences || kind == Kind::kListed;
}

/// Whether some view of the keys is strided.
inline bool is_strided(const Pattern& pattern) {
  return pattern.dilation > 1 || pattern.lead.step > 1;
}

/// The kind of kernel that serves a call.
inline Kind kind_of(const AttentionParams& params) {
  const Pattern& pattern = params.pattern;
  if (is_strided(pattern)) return Kind::kStrided;
  constexpr Features kPlain = Features::of(Feature::kWindow, Feature::kQueryOffsets,
                                           Feature::kSinkLogits, Feature::kValueDim);
  constexpr Features kSequences = kPlain.with(
      Features::of(Feature::kPacked, Feature::kUsedKeys, Feature::kPaged, Feature::kFloat8Keys));
  constexpr Features kListed = kSequences.with(Features::of(Feature::kList));
  static_assert(kListed.within(kScaledScores), "lean kernels transform no scores");
  if (params.features.has(Feature::kList)) {
    return params.features.within(kListed) ? Kind::kListed : Kind::kGeneral;
  }
  if (params.features.within(kPlain)) return Kind::kPlain;
  return params.features.within(kSequences) ? Kind::kSequences : Kind::kGeneral;
}

/// With these alone a kernel reads nothing from tensors to know its tile and what scores are
/// multiplied by.
constexpr Features kTilesOnHost = Features::of(
    Feature::kUnaligned, Feature::kMask, Feature::kSoftcap, Feature::kOddScale,
    Feature::kSinkLogits, Feature::kAlibi, Feature::kWindow, Feature::kDilation, Feature::kLead,
    Feature::kColumns, Feature::kGlobalRows, Feature::kTopK, Feature::kValueDim);

/// Thread blocks that share the `chunks` of each of `blocks` row tiles: as many as take the time of
/// two waves of them, or of another number whose waves take a tenth less, as a last wave that is
/// mostly empty does not; the fewest of those, since each has to start. Measured best, see
/// docs/kernels/decode.md.
inline int32_t count_splits(int64_t blocks, int32_t chunks, int32_t resident) {
  constexpr int64_t kWaves = 2, kMostWaves = 4;
  auto time = [&](int64_t splits) {  // of chunks one after the other
    return ceil_div64(blocks * splits, resident) * ceil_div64(chunks, splits);
  };
  int64_t usual = 1;
  while (usual * 2 * blocks <= kWaves * resident && usual < chunks) usual *= 2;
  int64_t wanted = time(usual < chunks ? usual : chunks), least = wanted;
  for (int64_t splits = 1; splits <= chunks && splits * blocks <= kMostWaves * resident; ++splits) {
    const int64_t own = time(splits);
    least = own < least ? own : least;
  }
  if (10 * least <= 9 * wanted) wanted = least;
  int32_t splits = 1;
  while (time(splits) > wanted) ++splits;
  return splits;
}

/// What a device has for tiles of one height.
struct TileRoom {
  int32_t at_once = 0;    // thread blocks that a multiprocessor holds; none: it has no kernels
  int32_t kept_rows = 0;  // whose sums a thread block keeps from chunk to chunk
};

/// What a device has for the kernels of a head dim.
struct DeviceShape {
  int32_t multiprocessors = 1;
  TileRoom flat = {2, 0};  // tiles of kFragmentRows
  TileRoom tall;           // of kTallRows
  bool clusters = false;

  constexpr const TileRoom& room(int32_t tile_rows) const {
    return tile_rows == kTallRows ? tall : flat;
  }
  /// Thread blocks that run side by side.
  constexpr int32_t resident(int32_t tile_rows) const {
    return multiprocessors * room(tile_rows).at_once;
  }
};

/// Shares row tiles, of `rows` rows and `chunks` chunks each, out to thread blocks, and says who
/// makes the output.
inline void share_out(const AttentionParams& params, const DeviceShape& device, int32_t rows,
                      int32_t chunks, SplitGrid& plan) {
  const int32_t chunk = plan.chunk_steps * kStepKeys;
  const int64_t row_tiles = int64_t{params.problem.heads_kv} * plan.tiles;  // of a sequence
  const int64_t blocks = params.problem.batch * row_tiles;
  const int32_t resident = device.resident(plan.tile_rows);
  plan.splits = count_splits(blocks, chunks, resident);
  // Thread blocks of a cluster wait for each other, so it merges short texts alone: one of them on
  // a multiprocessor, or pairs. Larger clusters would not all run at once. One alone is a cluster
  // too while all of them run at once: then nothing hides a second kernel. Where a cluster has a
  // thread block for each chunk, and half of the device is left, it merges longer texts.
  constexpr int32_t kShort = 320, kShortAlone = 512, kShortOfFew = 1024;  // keys of a thread block
  int32_t together = 1;
  while (together < imin(chunks, kMostMerged) &&
         blocks * together * 2 <= (together == 1 ? resident : device.multiprocessors)) {
    together *= 2;
  }
  const bool at_once = blocks * together <= resident;
  const bool few = chunks <= together && blocks * together * 2 <= device.multiprocessors;
  const int32_t most_keys = few ? kShortOfFew : together > 1 ? kShort : kShortAlone;
  if (device.clusters && at_once && ceil_div(chunks, together) * chunk <= most_keys) {
    plan.splits = together;
    plan.merging = Merging::kByCluster;
  }
  // What a thread block keeps from chunk to chunk it need not store and read again.
  const bool same_lengths = params.sequences.same_lengths();
  const bool kept = rows <= device.room(plan.tile_rows).kept_rows;
  const bool grouped = plan.group != kInARow;
  if (plan.splits == 1 && kept && same_lengths && !grouped) {
    plan.merging = Merging::kNone;
    return;
  }
  constexpr int64_t kWavesOfShares = 4;
  if (plan.merging == Merging::kByKernel && !same_lengths && !params.pattern.list.present()) {
    plan.shares = static_cast<int32_t>(ceil_div64(kWavesOfShares * resident, row_tiles));
  }
  // A long text's groups, of which each leaves one sum, are shared out while they fill half of the
  // device: those of all texts or, where lengths differ, of one that is alone.
  const bool small_groups = kept && plan.group <= kSmallGroup;
  if (small_groups) {
    const int64_t tiles = plan.shares > 0 ? row_tiles : blocks;
    const int32_t groups = imin(ceil_div(chunks, plan.group), kMostResults);
    const int32_t splits = count_splits(tiles, groups, resident);
    plan.whole_groups = tiles * splits * 20 >= int64_t{9} * resident;
    if (plan.whole_groups) {
      plan.splits = splits;
      plan.places = imin(plan.places, kMostResults + kOffEdges);
    }
  }
  const bool some_groups = plan.splits == 1 || plan.shares > 0 || small_groups ||
                           (grouped && ceil_div(chunks, plan.splits) >= plan.group);
  const bool begins_anywhere =
      params.features.any(Features::of(Feature::kKeyBounds, Feature::kKeyOrigins));
  plan.gaps = (kept && some_groups) || (grouped && begins_anywhere);
}

/// The grid of a call on a device.
inline SplitGrid plan_grid(const AttentionParams& params, const DeviceShape& device) {
  const Pattern& pattern = params.pattern;
  const BlockList& list = pattern.list;
  SplitGrid plan;
  // Rows of one list share tiles, as those of a class do.
  plan.classes = list.present() ? ceil_div(params.problem.seq_q, list.block_q)
                                : pattern.classes(params.problem.seq_q);
  plan.heads_packed = list.is_shared_by(params.problem.group()) ? params.problem.group() : 1;
  int32_t class_rows = list.present() ? imin(params.problem.seq_q, list.block_q)
                                      : ceil_div(params.problem.seq_q, pattern.dilation);
  int32_t rows = plan.heads_packed * class_rows;
  const bool float8 = params.keys.dtype == Dtype::kFloat8;
  // Kinds that have kernels of tall tiles.
  const Kind kind = kind_of(params);
  const bool has_tall = float8 ? kind == Kind::kSequences : kind != Kind::kStrided;
  const bool tall = has_tall && device.tall.at_once > 0 && rows > kFragmentRows;
  plan.tile_rows = tall ? kTallRows : kFragmentRows;
  plan.row_tiles = ceil_div(rows, plan.tile_rows);
  plan.tiles = params.problem.group() / plan.heads_packed * plan.classes * plan.row_tiles;

  const int32_t seq_kv = params.problem.seq_kv;
  const int32_t reach = main_reach(pattern, seq_kv);
  const int32_t lead = pattern.most_lead(seq_kv);
  plan.chunk_steps = chunk_steps(pattern, params.features, seq_kv, params.problem.seq_q,
                                 params.problem.widest_dim());
  int32_t chunk = plan.chunk_steps * kStepKeys;
  const bool long_divided = divides_long(params.features);
  if (list.present()) {
    plan.max_chunks = most_chunks(keys_of_blocks(list, list.max_count), false);  // of the longest
  } else if (!params.sequences.same_lengths()) {
    // Each sequence's chunks follow from its own lengths; an interval touches up to two more.
    plan.max_chunks = (seq_kv <= kShortSequence ? 1 : most_chunks(reach, long_divided) + 2) +
                      most_chunks(lead, false);
  } else {
    // An interval off the chunks' edges touches one more of them than its length asks for.
    plan.max_chunks = imin(ceil_div(reach + class_rows, chunk) + 1,
                           ceil_div(ceil_div(seq_kv, pattern.dilation), chunk)) +
                      ceil_div(lead, chunk);
  }
  plan.max_chunks += params.sequences.key_origins != nullptr;
  plan.max_chunks = imax(plan.max_chunks, 1);
  plan.places = plan.max_chunks;
  plan.early = params.features.within(kTilesOnHost);
  plan.group = group_of(params.features, seq_kv, chunk);
  if (!params.sequences.same_lengths() && params.features.within(kAllKeys)) {
    // A sequence of fewer queries may have more chunks than the longest.
    plan.group = long_divided && seq_kv > kLongText ? kSmallestGroup : kGroup;
  }
  if (plan.max_chunks == 1) {
    plan.merging = Merging::kNone;
    return plan;
  }
  // Thread blocks without a chunk would only wait for their turn.
  const int32_t chunks =
      list.expected > 0 ? imin(ceil_div(reach, chunk), plan.max_chunks) : plan.max_chunks;
  share_out(params, device, imin(rows, plan.tile_rows), chunks, plan);
  return plan;
}

}  // namespace sparse_attn::cuda::decode

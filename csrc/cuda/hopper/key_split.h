// The key split: query tiles whose keys are cut into chunks, whose partial results are merged after
// the kernel. Two kinds of tiles are: all of a call with few of them, which would leave most of a
// device idle, and those with global rows, which visit hundreds of key tiles where their neighbours
// visit ten. From sizes alone: which tiles are split depends on the pattern and the
// lengths of the sequence, where a chunk ends on what its tile visits; neither on batch, heads or
// device, so neither do a row's bits. Results join from the last chunk to the first, first those of
// a group, then groups: a thread block may sum a group, or all, before others have theirs.
//
//    chunks    0 1 2 3   4 5 6 7   8 9
//    a row     (0 <- 1 <- 2 <- 3)  <-  (4 <- 5 <- 6 <- 7)  <-  (8 <- 9)
#pragma once

#include "../../params.h"
#include "table.h"

namespace sparse_attn::cuda::hopper {

/// A kernel's tile, and what the kernel makes of chunks.
struct KernelTile {
  int32_t block_q, block_kv;
  int32_t head_dim = 0;
  bool splits = false;  // it takes chunks,
  bool packs = false;   // tiles of several query heads,
  bool folds = false;   // and may sum the chunks of a tile itself
};
constexpr KernelTile tile_of(Entry entry) {
  const Kernel& kernel = kKernels[entry.kernel];
  return {kernel.rows(),  entry.keys(),
          entry.head_dim, entry.exists() && kernel.splits > Split::kSequences,
          kernel.packs(), kernel.folds(entry.head_dim)};
}

struct KeySplit {
  int32_t tiles = 0;   // query tiles of a head (and class) that are split
  int32_t chunks = 0;  // of each one's keys, at most
  int32_t least = 0;   // key tiles of a chunk, at least
  int32_t group = 0;   // chunks of a group of a tile that visits the most
  bool all = false;    // every tile is split; else those from the first global row on

  /// Key tiles of a chunk of a query tile that visits so many.
  SPARSE_ATTN_HD constexpr int32_t chunk_tiles(int32_t visited) const {
    return imax(least, ceil_div(visited, chunks));
  }
  /// Rows of a head that have partial results.
  constexpr int32_t rows(const Problem& problem, KernelTile tile) const {
    return all ? problem.seq_q : tiles * tile.block_q;
  }
};

constexpr int32_t kMostChunks = 16;
constexpr int32_t kLeastGroup = 4;  // a power of 2, as kMostChunks
constexpr int32_t kManyKeyTiles = 64;

/// Chunks of a group, of a query tile that visits so many key tiles: of few all are one, since a
/// thread block that takes several groups keeps their sum in the workspace; of wide ones too, since
/// there the workspace has the sum of a group.
SPARSE_ATTN_HD constexpr int32_t group_of(int32_t visited, int32_t columns) {
  return is_wide(columns) || visited < kManyKeyTiles ? kMostChunks : kLeastGroup;
}

/// What a thread block takes of a query tile that is split: a chunk, a group of chunks in turn, or
/// all of them, so that no merge runs.
enum class Fold : int32_t { kNone, kGroup, kWhole };

/// Key tiles that a query tile of a sequence visits, at most.
SPARSE_ATTN_HD int32_t most_visited(const Pattern& pattern, int32_t num_keys, KernelTile tile) {
  const int32_t keys = ceil_div(num_keys, pattern.dilation);
  const int32_t seen = pattern.most_seen(keys, tile.block_q);
  const int32_t all = ceil_div(keys, tile.block_kv);
  const int32_t lead = ceil_div(pattern.most_lead(num_keys), tile.block_kv);
  // Off the tiles' edges it touches one more.
  const int32_t main = seen < keys ? ceil_div(seen, tile.block_kv) + 1 : all;
  return pattern.shared_axis() ? imin(main + lead, all) : imin(main, all) + lead;
}

/// The first row of the query tile in which the first global token stands, where the text begins at
/// position `origin`.
SPARSE_ATTN_HD constexpr int32_t first_split_row(int32_t origin, int32_t query_offset,
                                                 int32_t tile_rows) {
  return imax(0, imax(0, origin) - query_offset) / tile_rows * tile_rows;
}

/// How many chunks the keys of few rows have; figures in docs/kernels/hopper.md. More of them fill
/// a device with fewer heads, and cost those more that fill it anyway.
struct ChunkRule {
  int32_t rows;                       // up to so many
  int32_t least;                      // key tiles of a chunk, at least
  int32_t two, four, eight, sixteen;  // key tiles from which on there are so many chunks

  SPARSE_ATTN_HD constexpr int32_t chunks(int32_t visited) const {
    return visited >= sixteen ? 16
           : visited >= eight ? 8
           : visited >= four  ? 4
           : visited >= two   ? 2
                              : 1;
  }
};

/// Rows whose keys are cut whatever the call; those of more only where thread blocks may sum
/// chunks.
constexpr int32_t kFewRows = 512;

/// The split of a sequence with few query tiles a head.
SPARSE_ATTN_HD KeySplit split_few_tiles(const Pattern& pattern, Features features, int32_t num_rows,
                                        int32_t num_keys, KernelTile tile) {
  constexpr int32_t kNever = kUnlimited;
  static constexpr ChunkRule kChunkRules[] = {
      {32, 2, 8, 8, 16, 128},
      {64, 2, 8, 8, 32, 128},
      {128, 4, 16, 16, 48, 192},
      {256, 6, 16, 24, 64, kNever},
      {kFewRows, 6, 16, 24, kNever, kNever},
      {1024, 32, 128, 128, 256, kNever},
      {2048, 64, 256, 256, kNever, kNever},
  };
  const int32_t classes = pattern.classes(num_rows);
  if (classes == 0) return {};
  const int32_t class_tiles = ceil_div(ceil_div(num_rows, classes), tile.block_q);
  // Of many classes, whose last tiles are full of nothing, far more than there are.
  const int64_t rows = classes == 1 ? num_rows : int64_t{classes} * class_tiles * tile.block_q;
  const int32_t visited = most_visited(pattern, num_keys, tile);
  const bool many = is_cut_call(features) && classes == 1 && splits_many_rows(tile.head_dim);
  for (const ChunkRule& rule : kChunkRules) {
    if (rows > rule.rows) continue;
    if (rule.rows > kFewRows && !many) return {};
    const int32_t chunks = rule.chunks(visited);
    if (chunks == 1) return {};
    return {class_tiles, chunks, rule.least, group_of(visited, tile.head_dim), true};
  }
  return {};
}

/// The split of a sequence's tiles with global rows: of as many as there may be, or, where they are
/// `placed`, as there are; its text then begins with key 0.
SPARSE_ATTN_HD KeySplit split_global_rows(const Pattern& pattern, const Sequence& sequence,
                                          bool placed, KernelTile tile) {
  constexpr int32_t kMostGlobals = 256;  // more fill a device, and their workspace would be large
  constexpr int32_t kLeastTiles = 32;    // where the device is full, shorter chunks cost
  const int32_t globals = pattern.global_count;
  // Under causal a global row sees no more keys than its position.
  if (globals == 0 || globals > kMostGlobals || pattern.causal) return {};
  if (pattern.left >= sequence.keys && pattern.right >= sequence.keys) return {};  // all see all
  KeySplit split;
  split.least = kLeastTiles;
  split.chunks =
      imin(kMostChunks, ceil_div(most_visited(pattern, sequence.keys, tile), kLeastTiles));
  if (split.chunks <= 1) return {};
  split.tiles = ceil_div(globals - 1, tile.block_q) + 1;  // wherever the first global row lies
  if (placed) {
    const Interval rows = {imax(0, -sequence.offset),
                           imin(globals - sequence.offset, sequence.rows)};
    if (rows.empty()) return {};
    split.tiles = ceil_div(rows.end, tile.block_q) - rows.begin / tile.block_q;
  }
  split.tiles = imin(split.tiles, ceil_div(sequence.rows, tile.block_q));
  return split;
}

/// Whether the host knows where the first global row of every sequence lies.
SPARSE_ATTN_HD constexpr bool has_placed_globals(const Sequences& sequences) {
  return sequences.query_offsets == nullptr && sequences.key_origins == nullptr;
}

/// The split of a query tile of one of several sequences that differ in length, by its number in
/// the sequence, as the sequence's own call has it.
SPARSE_ATTN_HD KeySplit split_of_sequence(const Pattern& pattern, Features features,
                                          const Sequence& sequence, bool placed, int32_t row_block,
                                          KernelTile tile) {
  const KeySplit few = split_few_tiles(pattern, features, sequence.rows, sequence.keys, tile);
  if (few.chunks > 0) return few;
  const KeySplit split = split_global_rows(pattern, sequence, placed, tile);
  const int32_t first = first_split_row(sequence.origin, sequence.offset, tile.block_q);
  const int32_t number = row_block - first / tile.block_q;
  return number >= 0 && number < split.tiles ? split : KeySplit{};
}

/// The split of a call of gathered rows: all, into one chunk at least, since the merge stores them.
inline KeySplit split_gathered_rows(const AttentionParams& params, KernelTile tile) {
  constexpr int32_t kLeastTiles = 8, kFewTiles = 4;  // as few tiles are split
  KeySplit split;
  split.all = true;
  split.tiles = ceil_div(params.problem.seq_q, tile.block_q);
  split.least = kLeastTiles * imin(split.tiles, kFewTiles);
  split.chunks =
      imax(1, imin(kMostChunks / imin(split.tiles, kMostChunks),
                   most_visited(params.pattern, params.problem.seq_kv, tile) / split.least));
  return split;
}

/// How query heads that share a key head lie in one query tile.
struct HeadPacking {
  int32_t heads = 1;   // of a tile, at most
  int32_t rows = 0;    // that each has of it
  int32_t shift = 31;  // 1 << shift rows, where there are several heads

  /// Which of the heads a row of the tile is of, and its number among the head's.
  SPARSE_ATTN_HD constexpr int32_t head(int32_t row) const { return row >> shift; }
  SPARSE_ATTN_HD constexpr int32_t row(int32_t row) const { return row & (rows - 1); }
};

/// The packing of a call with few query tiles a head, whose keys are then read once for several
/// heads. A tile has all rows of a head, and warps are of one head each, so that a row's bits are
/// those of a tile of that head alone.
inline HeadPacking pack_heads(const AttentionParams& params, KernelTile tile,
                              const KeySplit& split) {
  const HeadPacking alone = {1, tile.block_q};
  const bool packs =
      tile.packs && split.all && params.pattern.dilation == 1 && params.heads_see_alike();
  if (!packs || params.problem.group() == 1) return alone;
  int32_t shift = 4;  // whole warps
  while (1 << shift < params.problem.seq_q) ++shift;
  const int32_t rows = 1 << shift;
  return rows < tile.block_q ? HeadPacking{tile.block_q / rows, rows, shift} : alone;
}

/// The tile that chunks are made of, whichever kernel takes them.
inline KernelTile split_tile(const AttentionParams& params) {
  KernelTile tile = tile_of(find_chunked(params.problem.widest_dim(), params.features));
  tile.splits &= !params.pattern.list.present() && params.pattern.topk == 0;
  return tile;
}

/// Whether a sequence, of those whose lengths the device alone knows, may be one whose own call is
/// split: of few query tiles that visit many keys, or with global rows. The keys that there are say
/// so, not a bound, which changes no bit.
inline bool may_split(const AttentionParams& params) {
  const Sequences& sequences = params.sequences;
  const KernelTile tile = split_tile(params);
  if (sequences.same_lengths() || !tile.splits) return false;
  const Problem& problem = params.problem;
  Sequence longest;
  longest.keys = sequences.first_keys != nullptr ? sequences.packed_keys : problem.seq_kv;
  longest.rows = sequences.packed() ? sequences.packed_rows : problem.seq_q;
  if (split_global_rows(params.pattern, longest, false, tile).chunks > 0) return true;
  // The same lengths: few queries have few keys.
  if (sequences.packed() && sequences.first_rows == sequences.first_keys) return false;
  const int32_t rows = sequences.packed() ? 1 : problem.seq_q;
  return split_few_tiles(params.pattern, params.features, rows, longest.keys, tile).chunks > 0;
}

/// Whether tiles of a head each would be more than multiprocessors.
inline bool are_many(const AttentionParams& params, int32_t multiprocessors) {
  return int64_t{params.problem.batch} * params.problem.heads_q > multiprocessors;
}

/// One chunk for each tile of up to 64 queries, so that heads that share keys share tiles: where
/// those of a head each are many, and no merge is needed. Changes no bit.
inline KeySplit pack_whole(const AttentionParams& params, KernelTile tile,
                           int32_t multiprocessors) {
  const KeySplit whole = {1, 1, 1, kMostChunks, true};
  const bool packs = are_many(params, multiprocessors) && tile.folds &&
                     is_cut_call(params.features) && pack_heads(params, tile, whole).heads > 1;
  return packs ? whole : KeySplit{};
}

/// The split of a call on a device; none where a kernel serves it that takes no chunks.
inline KeySplit plan_key_split(const AttentionParams& params, KernelTile tile,
                               int32_t multiprocessors) {
  if (!tile.splits || !params.sequences.same_lengths()) return {};
  if (params.outputs.rows != nullptr) return split_gathered_rows(params, tile);
  const Problem& problem = params.problem;
  const KeySplit few =
      split_few_tiles(params.pattern, params.features, problem.seq_q, problem.seq_kv, tile);
  if (few.chunks > 0) return few;
  const KeySplit whole = pack_whole(params, tile, multiprocessors);
  if (whole.chunks > 0) return whole;
  const bool placed = has_placed_globals(params.sequences);
  return split_global_rows(params.pattern, params.sequences.common(), placed, tile);
}

}  // namespace sparse_attn::cuda::hopper

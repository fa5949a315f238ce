// The deal: where sequences differ in length, and so few query tiles that they would leave most of
// a device idle, thread blocks share the chunks of the long ones; of many short ones, whose heads
// share tiles, all tiles stay whole. key_split.h says which chunks a tile has, from its own
// sequence alone; this file says which thread block takes them, which changes no bit: one that
// takes several sums them as the merge would, from the last one on.
//
//    chunks of a tile     0   1   2   3   |   4   5   6     in the order of the keys
//    pieces               0   1   2   3   |       4         the last piece takes what fills a share
//
// Plain C++; lengths are known to the device alone, where the kernel that lists them
// (tile_order.cu) calls this.
#pragma once

#include "../../divisor.h"
#include "../../params.h"
#include "../../visited_tiles.h"
#include "key_split.h"

// Before loops of a few turns: every call fetches the code of its kernels again.
#ifdef __CUDA_ARCH__
#define SPARSE_ATTN_ROLLED _Pragma("unroll 1")
#else
#define SPARSE_ATTN_ROLLED
#endif

namespace sparse_attn::cuda::hopper {

/// Chunks of a query tile that a thread block takes; the same of the tiles of all heads of a
/// section, which see the same keys.
struct alignas(16) Piece {
  int32_t problem, row_block;  // the first of the tiles
  int32_t length, visited;     // key tiles of a chunk, and of the query tile
  int32_t first, count;        // chunks
  int32_t slot;                // of the first tile's first piece; -1: the piece is a whole tile
  int32_t pieces;              // of the query tile

  /// Of all chunks of a tile.
  SPARSE_ATTN_HD constexpr int32_t chunks() const { return imax(1, ceil_div(visited, length)); }
};

/// What the device decides; all in the workspace.
struct Deal {
  Piece* tiles = nullptr;     // [section rows] whole, in the order in which they are dealt out
  Piece* pieces = nullptr;    // [most_pieces]; null: nothing is dealt
  Piece* merged = nullptr;    // [most_merged], those of pieces to which the merge joins others
  int32_t* counts = nullptr;  // [2], of pieces and of merged
  int32_t most_pieces = 0, most_merged = 0;
  int32_t slots = 0;   // partial results of a query tile that have room
  Divisor by_width;    // divides by the query tiles of a piece
  int32_t strips = 0;  // of a query tile
};

/// Partial results of a multiprocessor, which deals of tiles of one length have room in, see
/// tests/cpp/deal_test.cpp.
constexpr int32_t kSlotsOfBlock = 6;

/// How tiles are cut, of a call with so many thread blocks.
class DealRule {
  static constexpr int32_t kFilled = 85;    // hundredths of a device's time that are worth no cut
  static constexpr int32_t kLeastGain = 4;  // key tiles in whose time a merge is paid
  static constexpr int32_t kFew = 4;        // tiles that share a block; more of them end evenly

 public:
  static constexpr int32_t kBin = 12;  // what a thread block holds; kFew and less divide it

  /// For `visited` key tiles of all query tiles, of so many columns.
  SPARSE_ATTN_HD static constexpr DealRule of(int64_t visited, int32_t columns, int32_t blocks) {
    DealRule rule;
    rule.columns_ = columns;
    const int64_t filled = int64_t{kFilled} * blocks;
    const int64_t share = (visited * 100 + filled - 1) / filled;
    rule.share_ = static_cast<int32_t>(share < 1 ? 1 : share > kUnlimited ? kUnlimited : share);
    rule.room_ = int64_t{kBin} * blocks;
    return rule;
  }

  /// Whether a tile is so long that when it starts matters.
  SPARSE_ATTN_HD constexpr bool is_long(int32_t visited) const {
    return visited > share_ / (kFew + 1);
  }
  /// What a whole tile takes of a thread block's share, in parts of kBin.
  SPARSE_ATTN_HD constexpr int32_t bins(int32_t visited) const {
    if (!is_long(visited)) return 0;
    return visited > share_ ? kBin : kBin / imin(share_ / visited, kFew);
  }
  /// How many chunks of a tile one thread block takes, the last ones, where tiles up to this one
  /// take `bins` in all: as many as fill its share, or, where all thread blocks have a tile, as
  /// many as fit beside one.
  SPARSE_ATTN_HD constexpr int32_t last_chunks(const Piece& tile, int64_t bins) const {
    const int32_t chunks = tile.chunks(), visited = tile.visited;
    if (chunks == 1 || !is_long(visited)) return chunks;
    if (visited <= share_ && bins <= room_) return chunks;
    const int32_t fits = visited > share_ ? share_ : imin(share_ % visited, visited / 3 * 2);
    if (visited - fits < kLeastGain) return chunks;
    const int32_t first = imin(chunks - 1, chunks - fits / tile.length);
    return chunks - whole_groups_from(first, chunks, group_of(visited, columns_));
  }

 private:
  /// The first chunk, from one on, with which a piece may begin that ends with the last: inside the
  /// last group any, else the first of a group, since a piece has one sum.
  SPARSE_ATTN_HD static constexpr int32_t whole_groups_from(int32_t first, int32_t chunks,
                                                            int32_t group) {
    const int32_t last = (chunks - 1) / group * group;
    return first >= last ? first : ceil_div(first, group) * group;
  }

  int32_t share_ = 1;  // key tiles of a thread block, about
  int64_t room_ = 0;
  int32_t columns_ = 0;
};

/// The key tiles that a query tile visits, under a window and causal alone.
SPARSE_ATTN_HD Piece whole_tile(const AttentionParams& params, const Sequence& sequence,
                                int32_t problem, int32_t row_block, KernelTile tile) {
  Pattern pattern;
  pattern.left = params.pattern.left;
  pattern.right = params.pattern.right;
  pattern.causal = params.pattern.causal;
  const Slice slice = make_slice(pattern, 0, sequence);
  const int32_t first = row_block * tile.block_q;
  Bounds bounds = unbounded(params.problem.seq_kv);
  bounds.cut(readable_keys(pattern.causal, sequence));
  const Interval rows = {first, imin(first + tile.block_q, sequence.rows)};
  const int32_t visited = visited_tiles(pattern, slice, rows, bounds, tile.block_kv).count();
  KeySplit split = split_few_tiles(pattern, params.features, sequence.rows, sequence.keys, tile);
  if (split.chunks == 0) split.chunks = split.least = 1;
  const int32_t length = imax(1, split.chunk_tiles(visited));
  Piece piece = {problem, row_block, length, visited, 0, 0, -1, 1};
  piece.count = piece.chunks();
  return piece;
}

/// How many of the lists of a deal there are.
struct Dealt {
  int32_t pieces, merged;
};

/// Cuts the first `all` of deal.tiles and writes pieces and merged. Several threads call it, each
/// for the tiles of `own`, one stretch after the other; `sums` adds a number over the threads
/// before this one, and over all. Long pieces come first, then chunks of cut tiles, which fill the
/// gaps, then short tiles.
template <typename SumsOf>
SPARSE_ATTN_HD Dealt deal_pieces(const Deal& deal, const DealRule& rule, int32_t all, Interval own,
                                 const SumsOf& sums) {
  const int32_t width = deal.by_width.divisor;
  int32_t bins = 0;
  SPARSE_ATTN_ROLLED
  for (int32_t i = own.begin; i < own.end; ++i) bins += rule.bins(deal.tiles[i].visited) * width;
  bins = sums(bins).before;
  int32_t slots = 0;
  SPARSE_ATTN_ROLLED
  for (int32_t i = own.begin; i < own.end; ++i) {
    Piece& tile = deal.tiles[i];
    bins += rule.bins(tile.visited) * width;
    tile.count = rule.last_chunks(tile, bins);
    tile.first = tile.chunks() - tile.count;
    if (tile.first > 0) slots += (tile.first + 1) * width;
  }
  slots = sums(slots).before;
  int32_t longs = 0, chunks = 0, merged = 0;
  SPARSE_ATTN_ROLLED
  for (int32_t i = own.begin; i < own.end; ++i) {
    Piece& tile = deal.tiles[i];
    if (tile.first > 0) {
      tile.slot = slots;
      tile.pieces = tile.first + 1;
      slots += tile.pieces * width;
      if (slots > deal.slots) {  // no room: it stays whole
        tile.slot = -1;
        tile.pieces = 1;
        tile.first = 0;
        tile.count = tile.chunks();
      }
    }
    longs += rule.is_long(tile.visited);
    chunks += tile.first;
    merged += tile.first > 0;
  }
  const auto long_sums = sums(longs), chunk_sums = sums(chunks), merged_sums = sums(merged);
  int32_t long_at = long_sums.before, chunk_at = long_sums.all + chunk_sums.before;
  int32_t short_at = long_sums.all + chunk_sums.all + own.begin - long_sums.before;
  int32_t merged_at = merged_sums.before;
  SPARSE_ATTN_ROLLED
  for (int32_t i = own.begin; i < own.end; ++i) {
    Piece piece = deal.tiles[i];
    const int32_t at = rule.is_long(piece.visited) ? long_at++ : short_at++;
    deal.pieces[at] = piece;
    if (piece.first == 0) continue;
    deal.merged[merged_at++] = piece;
    piece.count = 1;
    SPARSE_ATTN_ROLLED
    while (piece.first > 0) {
      --piece.first;
      deal.pieces[chunk_at++] = piece;
    }
  }
  return {all + chunk_sums.all, merged_sums.all};
}

}  // namespace sparse_attn::cuda::hopper

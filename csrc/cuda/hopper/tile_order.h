// In which order query tiles are dealt out to thread blocks. It changes no bit of a result.
#pragma once

#include "arguments.h"

namespace sparse_attn::cuda::hopper {

/// A query tile's (batch entry, head, class), and which of its tiles it is.
struct TilePlace {
  int32_t problem, row_block;
};

/// The tile of a number. Heads of a section take turns, so that their keys and values are in L2
/// together; after the sections the tail, where all heads do.
SPARSE_ATTN_HD TilePlace place_of(const TileGrid& grid, bool last_first, int32_t tile) {
  const int32_t before_tail = grid.problems * (grid.row_blocks - grid.tail);
  const bool in_tail = tile >= before_tail;
  if (in_tail) tile -= before_tail;
  const int32_t row_blocks = in_tail ? grid.tail : grid.row_blocks - grid.tail;
  const int32_t heads = in_tail ? grid.problems : grid.section;
  const int32_t section = tile / (heads * row_blocks);
  const int32_t in_section = tile - section * heads * row_blocks;
  const int32_t width = imin(heads, grid.problems - section * heads);
  const int32_t row_block = in_section / width;
  const int32_t last = (in_tail ? grid.tail : grid.row_blocks) - 1;
  return {section * heads + in_section - row_block * width,
          last_first ? last - row_block : row_block};
}

/// Bytes of a key with its value.
SPARSE_ATTN_HD int32_t key_bytes(const AttentionParams& params) {
  return (params.problem.head_dim + params.problem.value_dim) * size_of(params.problem.dtype);
}

/// L2 that keys and values may take.
constexpr int32_t kCacheBytes = 32 << 20;

/// Of `problems` those whose tiles alternate where later rows see more of `keys` keys: as many as
/// have their keys and values in L2 together, or more, so that no few are left to the end; else one
/// after the other.
SPARSE_ATTN_HD int32_t section_of(const AttentionParams& params, int32_t classes, int32_t keys,
                                  int32_t problems) {
  if (!params.pattern.causal || params.pattern.left < keys) return 1;
  const int32_t group = params.problem.group() * classes;
  const int32_t heads = ceil_div(problems, group);
  const int64_t head_bytes = int64_t{imax(keys, 1)} * key_bytes(params);
  const int32_t fit = imax(static_cast<int32_t>(kCacheBytes / head_bytes), 1);
  const int32_t sections = imax(heads / fit, 1);
  return ceil_div(heads, sections) * group;
}

/// The order of tiles where sequences differ in length.
struct RaggedOrder {
  int32_t section = 1;    // problems of a section row: query heads of one key head or of several
  int32_t sections = 1;   // of a sequence
  int64_t most_rows = 0;  // section rows, at most
};

inline RaggedOrder ragged_order(const AttentionParams& params, int32_t block_q) {
  RaggedOrder order;
  const Problem& p = params.problem;
  const Sequences& sequences = params.sequences;
  if (sequences.same_lengths()) return order;
  const int32_t classes = params.pattern.classes(p.seq_q);
  const int32_t group = p.group() * classes;
  int32_t heads = section_of(params, classes, p.seq_kv, p.heads_q * classes) / group;
  heads = imax(heads, 1);
  while (p.heads_kv % heads != 0) --heads;
  order.section = heads * group;
  order.sections = p.heads_kv / heads;
  const int64_t height = int64_t{classes} * block_q;
  int64_t row_blocks = p.batch * ((p.seq_q + height - 1) / height);
  // Each sequence ends in a tile of its own, at most.
  const int64_t packed = sequences.packed_rows / height + p.batch;
  if (sequences.packed() && packed < row_blocks) row_blocks = packed;
  order.most_rows = row_blocks * order.sections;
  return order;
}

/// Whether the tiles of a call's lists are worth an order: some may be long.
inline bool orders_lists(const AttentionParams& params) {
  constexpr int64_t kLongKeys = 4096;
  const BlockList& list = params.pattern.list;
  return list.present() && params.sequences.same_lengths() &&
         int64_t{list.max_count} * list.block_kv >= kLongKeys;
}

/// Zeroes the counter and, where there is an order, writes it: of the tiles after the first
/// `dealt`, those of lists of similar length together, the longest first; dealt late, a list of all
/// keys among short ones would run on alone. The attention kernel is its dependent and runs beside
/// it with the tiles that are dealt. Where sequences differ in length all tiles wait for the order,
/// which has those of the most keys first, and says which chunks their own calls would have.
Status order_tiles(const Arguments& args, KernelTile tile, int32_t dealt);

}  // namespace sparse_attn::cuda::hopper

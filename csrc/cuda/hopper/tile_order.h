// In which order query tiles are dealt out to thread blocks. It changes no bit of a result.
#pragma once

#include "arguments.h"

namespace sparse_attn::cuda::hopper {

/// A query tile's (batch entry, head, class), and which of its tiles it is.
struct TilePlace {
  int32_t problem, row_block;
};

/// The tile of a number. Heads of a section take turns, so that their keys and values are in L2
/// together; behind the sections the tail, where all heads do.
SPARSE_ATTN_HD TilePlace place_of(const Arguments& args, int32_t tile) {
  const int32_t problems = args.params.problem.batch * args.params.problem.heads_q * args.classes;
  const int32_t before_tail = problems * (args.row_blocks - args.tail);
  const bool in_tail = tile >= before_tail;
  if (in_tail) tile -= before_tail;
  const int32_t row_blocks = in_tail ? args.tail : args.row_blocks - args.tail;
  const int32_t heads = in_tail ? problems : args.section;
  const int32_t section = tile / (heads * row_blocks);
  const int32_t in_section = tile - section * heads * row_blocks;
  const int32_t width = imin(heads, problems - section * heads);
  const int32_t row_block = in_section / width;
  const int32_t last = (in_tail ? args.tail : args.row_blocks) - 1;
  return {section * heads + in_section - row_block * width,
          args.last_first ? last - row_block : row_block};
}

/// Whether the tiles of a call's lists are worth an order: some may be long.
inline bool orders_lists(const AttentionParams& params) {
  constexpr int64_t kLongKeys = 4096;
  const BlockList& list = params.pattern.list;
  return list.present() && int64_t{list.max_count} * list.block_kv >= kLongKeys;
}

/// Zeroes the counter and, where there is an order, writes it: of the tiles behind the first
/// `dealt`, those of lists of similar length together, the longest first; dealt late, a list of all
/// keys among short ones would run on alone. The attention kernel is its dependent and runs beside
/// it with the tiles that are dealt.
Status order_tiles(const Arguments& args, int32_t block_q, int32_t dealt);

}  // namespace sparse_attn::cuda::hopper

// How the tiles of a call are arranged, see arrange.h.
#include <algorithm>
#include <limits>
#include <numeric>

#include "arrange.h"
#include "tensor_maps.h"
#include "tile_order.h"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int64_t kMostBytes = int64_t{64} << 20;  // of results, or what one head, or group, has

/// What a thread block takes of each of `tiles` that visit so many key tiles: whatever ends first,
/// by what a turn of all multiprocessors takes. A chunk of all has `bytes` of results. Changes no
/// bit.
Fold choose_fold(const KeySplit& split, int64_t tiles, int64_t bytes, int32_t visited, bool wide,
                 int32_t multiprocessors) {
  constexpr int64_t kCachedBytes = int64_t{28} << 20;  // that L2 keeps until they are merged
  if (split.chunks == 1) return Fold::kWhole;
  const int32_t length = split.chunk_tiles(visited), chunks = ceil_div(visited, length);
  auto time = [&](int32_t parts) {  // in key tiles
    // To add a chunk to the sum, which of wide tiles the workspace has; to write and merge results.
    const float join = wide ? 2.0f : 0.8f;
    const float results = wide ? 6.0f : bytes * parts <= kCachedBytes ? 3.0f : 5.0f;
    const int32_t of_part = ceil_div(chunks, parts);
    const float part = of_part * length + (of_part > 1 ? of_part * join : 0.0f);
    const int64_t sections = parts > 1 ? ceil_div64(bytes * parts, kMostBytes) : 1;
    const int64_t turns =
        sections * ceil_div64(ceil_div64(tiles * parts, sections), multiprocessors);
    return turns * (parts > 1 ? part + results : part);
  };
  const int32_t groups = ceil_div(chunks, split.group);
  const float whole = time(1), group = time(groups), none = time(chunks);
  if (whole <= group && whole <= none) return Fold::kWhole;
  return groups > 1 && group <= none ? Fold::kGroup : Fold::kNone;
}

/// Room for what thread blocks have summed of the tiles whose chunks they take in turn.
void arrange_sums(KernelTile tile, Arena* arena, Arguments* args) {
  Partials& sums = args->sums;
  sums.columns = tile.head_dim;
  sums.max_chunks = 1;
  const int64_t states = int64_t{args->multiprocessors} * tile.block_q;
  sums.out = arena->take<float4>(states * sums.columns / 4);
  sums.state = arena->take<float2>(states);
}

/// Which query tiles have their keys cut into chunks, and where partial results lie: of as many
/// heads as have room at once, whole groups where heads share tiles.
void arrange_chunks(KernelTile tile, Arena* arena, Arguments* args) {
  const AttentionParams& params = args->params;
  const Problem& problem = params.problem;
  args->split = plan_key_split(params, tile, args->multiprocessors);
  args->packing = {1, tile.block_q};
  if (args->split.chunks == 0) {
    if (!tile.folds || !may_split(params)) return;
    args->folds = Fold::kWhole;  // sequences' tiles
    arrange_sums(tile, arena, args);
    return;
  }
  args->packing = pack_heads(params, tile, args->split);
  const int32_t heads = problem.batch * problem.heads_q;
  const int64_t tiles = int64_t{args->problems_of(heads)} * args->split.tiles;
  Partials& partials = args->partials;
  partials.columns = tile.head_dim;
  partials.tile_rows = args->split.all ? 0 : tile.block_q;
  partials.strips = ceil_div(ceil_div(args->split.rows(problem, tile), args->classes), kStripRows);
  partials.heads = heads;
  const int64_t head_strips = int64_t{args->classes} * partials.strips;
  if (tile.folds && args->split.group > 0) {
    const int64_t bytes = heads * head_strips * Partials::strip_bytes(1, tile.head_dim);
    const int32_t visited = most_visited(params.pattern, problem.seq_kv, tile);
    const bool wide = is_wide(tile.head_dim), has_groups = args->split.chunks > args->split.group;
    args->folds = choose_fold(args->split, tiles, bytes, visited, wide, args->multiprocessors);
    if (args->folds == Fold::kWhole && (has_groups || wide)) arrange_sums(tile, arena, args);
  }
  partials.max_chunks = args->parts();
  if (args->folds != Fold::kWhole) {
    const int64_t strip_bytes = Partials::strip_bytes(partials.max_chunks, tile.head_dim);
    const int64_t least = args->packing.heads > 1 ? problem.group() : 1;
    const int64_t room = std::max<int64_t>(kMostBytes / (head_strips * strip_bytes) / least, 1);
    const int64_t groups = heads / least, turns = ceil_div64(groups, room);
    partials.heads = static_cast<int32_t>(ceil_div64(groups, turns) * least);
    const int64_t strips = partials.heads * head_strips;
    const int64_t states = strips * partials.max_chunks * kStripRows;
    partials.out = arena->take<float4>(states * partials.columns / 4);
    partials.state = arena->take<float2>(states);
    partials.counts = arena->take<int32_t>(strips);
  }
  args->by_items = Divisor(args->split.tiles * args->parts());
  args->by_parts = Divisor(args->parts());
  args->by_packs = Divisor(args->packs());
  args->by_chunks = Divisor(args->split.chunks);
  args->split_items = args->items_of(partials.heads);
  args->num_tiles = args->split_items + (args->split.all ? 0 : args->num_tiles);
}

/// What the device deals out of sequences that differ in length, and where partial results lie: as
/// many as any deal has room for, or fewer where no call has so many.
void arrange_deal(KernelTile tile, Arena* arena, Arguments* args) {
  const AttentionParams& params = args->params;
  KeySplit split;
  split.all = true;
  args->packing = pack_heads(params, tile, split);
  args->by_packs = Divisor(args->packs());
  args->folds = Fold::kWhole;
  arrange_sums(tile, arena, args);
  const int32_t rows = args->most_section_rows;
  const int32_t width = args->grid.section / args->group * args->packs();
  Deal& deal = args->deal;
  deal.by_width = Divisor(width);
  deal.strips = tile.block_q / kStripRows;
  const int64_t slots = std::min<int64_t>(int64_t{kSlotsOfBlock} * args->multiprocessors,
                                          int64_t{rows} * width * kMostChunks);
  deal.slots = may_split(params) ? static_cast<int32_t>(slots) : 0;
  deal.most_pieces = rows + deal.slots / width;
  deal.most_merged = std::min(rows, deal.slots / (2 * width));
  deal.tiles = arena->take<Piece>(rows);
  deal.pieces = arena->take<Piece>(deal.most_pieces);
  deal.merged = arena->take<Piece>(deal.most_merged);
  deal.counts = arena->take<int32_t>(2);
  Partials& partials = args->partials;
  partials.columns = tile.head_dim;
  const int64_t states = int64_t{deal.slots} * tile.block_q;
  partials.out = arena->take<float4>(states * partials.columns / 4);
  partials.state = arena->take<float2>(states);
  args->num_tiles =
      static_cast<int32_t>(std::min<int64_t>(int64_t{deal.most_pieces} * width, kUnlimited));
}

/// Whether the bits that a tile needs of a partial block lie in one piece, of rows that have
/// numbers.
bool reads_bits(const BlockList& list, KernelTile tile, int32_t box_rows) {
  return list.has_bits() && list.block_kv == box_rows && box_rows >= 32 &&
         list.block_q % tile.block_q == 0 && reinterpret_cast<uintptr_t>(list.bits) % 16 == 0 &&
         int64_t{list.num_bits} * list.block_q <= std::numeric_limits<int32_t>::max();
}

/// How the keys of a tile are brought.
void arrange_copies(KernelTile tile, Arguments* args) {
  const AttentionParams& params = args->params;
  const Pattern& pattern = params.pattern;
  args->box_rows = tile.block_kv;
  if (pattern.list.present()) {
    while (pattern.list.block_kv % args->box_rows != 0) args->box_rows /= 2;
  }
  args->boxes = tile.block_kv / args->box_rows;
  args->reads_bits = reads_bits(pattern.list, tile, args->box_rows);
  args->copy_rows = args->box_rows;
  if (params.keys.paged()) {
    const int32_t page_size = params.keys.page_size;
    args->copy_rows = std::gcd(args->box_rows, page_size);
    while (page_size >> (args->page_shift + 1) > 0) ++args->page_shift;
    if (page_size != 1 << args->page_shift) args->page_shift = -1;
  }
  args->copies = tile.block_kv / args->copy_rows;
  args->long_leads = mapped_keys(params) % pattern.lead.step;
}

/// The order of tiles. A query head's follow each other, but where their lengths differ the longest
/// of several heads come first: under causal of as many as fit L2, with global rows of all. Under
/// causal as many of the shortest as have their keys in L2 are left to the end, where blocks of all
/// heads then finish together.
void arrange_order(KernelTile tile, Arguments* args) {
  const AttentionParams& params = args->params;
  const Pattern& pattern = params.pattern;
  TileGrid& grid = args->grid;
  const int32_t problems = grid.problems;
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

}  // namespace

bool may_deal(const AttentionParams& params, int32_t multiprocessors) {
  constexpr int64_t kManyTiles = 8, kMany = 4;         // of a multiprocessor, which end evenly
  constexpr int32_t kHighRows = 64, kManyKeys = 4096;  // more rows on fewer keys: a merge is more
  if (params.sequences.same_lengths()) return false;
  const int32_t head_dim = params.problem.widest_dim();
  const Entry entry = find_kernel(head_dim, {params.features, Split::kAll});
  // Kernels of other head dims have other tiles.
  if (entry.head_dim != find_kernel(head_dim, {params.features}).head_dim) return false;
  const KernelTile tile = tile_of(entry);
  KeySplit split;
  split.all = true;
  const bool packs = pack_heads(params, tile, split).heads > 1;
  if (!may_split(params)) return packs && are_many(params, multiprocessors);
  if (packs) return true;
  if (params.problem.seq_q > kHighRows && params.problem.seq_kv < kManyKeys) return false;
  const RaggedOrder order = ragged_order(params, tile.block_q);
  const int64_t many = params.problem.seq_q <= kFewRows ? kManyTiles : kMany;
  return order.most_rows * order.section <= many * multiprocessors;
}

void arrange_tiles(KernelTile tile, Arena* arena, Arguments* args) {
  const AttentionParams& params = args->params;
  const Pattern& pattern = params.pattern;
  args->group = params.problem.group();
  args->classes = pattern.classes(params.problem.seq_q);
  args->by_heads = Divisor(params.problem.heads_q);
  args->by_group = Divisor(args->group);
  TileGrid& grid = args->grid;
  grid.row_blocks = ceil_div(ceil_div(params.problem.seq_q, args->classes), tile.block_q);
  const int32_t problems = params.problem.batch * params.problem.heads_q * args->classes;
  grid.problems = problems;
  args->num_tiles = problems * grid.row_blocks;
  if (orders_lists(params)) args->order = arena->take<int32_t>(args->num_tiles);
  const bool ragged = !params.sequences.same_lengths();
  if (ragged) {
    const RaggedOrder order = ragged_order(params, tile.block_q);
    grid.section = order.section;
    args->num_tiles =
        static_cast<int32_t>(std::min<int64_t>(order.most_rows * order.section, kUnlimited));
    args->most_section_rows = args->num_tiles / grid.section;
    args->by_section = Divisor(grid.section);
    if (!tile.splits) args->section_rows = arena->take<SectionRow>(order.most_rows);
    args->sequences = arena->take<int32_t>(params.problem.batch);
    args->sequence_ends = arena->take<int32_t>(params.problem.batch + 2);
  }
  if (ragged && tile.splits) {
    arrange_deal(tile, arena, args);
  } else {
    arrange_chunks(tile, arena, args);
  }
  arrange_copies(tile, args);
  if (!ragged) arrange_order(tile, args);
}

bool next_section(Arguments* args) {
  Partials& partials = args->partials;
  const Problem& problem = args->params.problem;
  partials.first_head += partials.heads;
  partials.heads = imin(partials.heads, problem.batch * problem.heads_q - partials.first_head);
  args->split_items = args->num_tiles = args->items_of(partials.heads);
  return partials.heads > 0;
}

}  // namespace sparse_attn::cuda::hopper

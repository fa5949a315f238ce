// What a launch hands to the kernel: the parameters of the call, tensor maps, and the order of
// tiles.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../divisor.h"
#include "../common/radix_select.cuh"
#include "deal.h"
#include "key_split.h"
#include "partials.cuh"
#include "small_cap.cuh"

namespace sparse_attn::cuda::hopper {

/// Maps by RowsOf. Their dimensions: columns of a slab, rows of the view, slab, head, batch entry.
struct TensorMaps {
  CUtensorMap query[2];
  CUtensorMap out[2];
  CUtensorMap key[4];
  CUtensorMap value[4];
  CUtensorMap mask;  // of attn_mask, where its tiles are copied
};

/// How tiles are named in the maps. Where rows are whole slabs and each residue class begins a
/// whole number of slabs after the one before, the third dimension is the slab, and a class is so
/// many slabs on; else the third dimension is the class, and the slab is an offset in the columns,
/// whose end clips it. One copy brings a whole tile unless slabs must be copied apart: in the
/// second form, and for tiles made of several boxes.
struct TileCoordinates {
  int32_t query_copies = 1, key_copies = 1;  // of a tile of Q or O, of a box of K or V ...
  int32_t lead_copies = 1;                   // ... of the main view, and of the lead view
  int32_t slab_columns = 0, slab_step = 1;   // from a slab to the next, in columns and slabs
  int32_t query_step = 0, out_step = 0, key_step = 0, value_step = 0;  // from a class to the next
};

/// Query tiles of (batch entry, head, class) problems of one length, as they are dealt out.
struct TileGrid {
  int32_t problems = 0;
  int32_t row_blocks = 0;  // query tiles of the longest class
  int32_t section = 1;     // problems whose tiles alternate, so that they share L2
  int32_t tail = 0;        // shortest query tiles of each problem, which all come last
};

/// Query tiles of one height, of a section's problems.
struct alignas(16) SectionRow {
  int32_t problem, row_block;     // the first of them
  int32_t chunks = 1, least = 1;  // of their keys, as KeySplit has them
};

struct Arguments {
  AttentionParams params;
  TileCoordinates at;

  // Softmax in base 2: exp(x) = exp2(x log2(e)). When `transform` is set, q.k is first multiplied
  // by score_rate: under an odd scale by that, so that scale_log2 is log2(e); under softcap by that
  // over softcap and kTanhUnit, and replaced by its tanh, so that scale_log2 is softcap log2(e).
  float scale_log2 = 0;
  float score_rate = 0;
  bool transform = false;
  bool capped = false;
  bool lazy = false;  // maxima are followed lazily, where a kernel leaves it to the call
  SmallCap small_cap = {};
  // Where a bias joins the scores, a mask that adds or ALiBi, they are brought to natural units
  // first, and scale_log2 is log2(e).
  bool biased = false;
  float cap_unit = 1;
  bool mask_in_pairs = false;    // two keys of a row of the mask lie in one aligned word
  bool copies_mask = false;      // its tiles come to shared memory
  bool mask_has_bounds = false;  // the bounds are those of the mask, see padding.h
  bool raw = false;  // the maps hold rows of keys that do not exist, whatever those hold

  int32_t box_rows = 0;     // consecutive keys of a tile: BLOCK_KV, less for lists of small blocks
  int32_t boxes = 1;        // that make a tile
  bool reads_bits = false;  // consumers read the bits of partial blocks as they are
  int32_t lead_rows = 0;    // keys of a box of the lead view, which may hold few in all
  int32_t copy_rows = 0;    // keys that one copy brings: those of a box, less for small pages
  int32_t copies = 1;       // that make a tile
  int32_t page_shift = -1;  // pages have 2^page_shift keys; -1: no power of 2
  int32_t group = 1;        // query heads that share a key head
  int32_t classes = 1;      // residue classes that own a query
  HeadPacking packing;      // of query heads
  TileGrid grid;
  int32_t num_tiles = 0;
  int32_t multiprocessors = 0;  // of the device
  bool last_first = true;  // tiles of the last rows come first: under causal they are the longest
  int32_t* counter = nullptr;  // [1], zeroed; null deals tiles out in turn
  int32_t* order = nullptr;    // [num_tiles], those after the first wave; null: by number

  // Where sequences differ in length: rows of tiles, of as many problems as a section has.
  int32_t most_section_rows = 0;
  SectionRow* section_rows = nullptr;  // in the order in which they are dealt out; null: by number
  int32_t* sequences = nullptr;        // [B], those with the most keys first
  int32_t* sequence_ends = nullptr;    // [B + 2], 0, the section rows up to the end of each, and
                                       // whether some have chunks
  Deal deal;  // where tiles are dealt, whose pieces take the place of section rows

  Divisor by_heads, by_group, by_section;  // divide by problem.heads_q, group and grid.section

  KeySplit split;           // a section of heads a launch, whose items come first
  int32_t split_items = 0;  // of the section
  // Divide by the items of a problem, parts(), packs() and split.chunks.
  Divisor by_items, by_parts, by_packs, by_chunks;
  Fold folds = Fold::kNone;
  Partials partials;
  Partials sums;  // [thread blocks, strips of a tile]: of what each has taken of a tile, in groups,
                  // or of wide tiles in chunks

  int32_t long_leads = 0;  // classes of strided leading keys, the first ones, that have a key more

  Threshold* thresholds = nullptr;  // [B, Hq, Sq], of token top-k

  /// Items of a split tile.
  SPARSE_ATTN_HD int32_t parts() const {
    if (folds == Fold::kWhole) return 1;
    return folds == Fold::kGroup ? ceil_div(split.chunks, split.group) : split.chunks;
  }
  /// Tiles that the heads of a group share.
  SPARSE_ATTN_HD int32_t packs() const { return ceil_div(group, packing.heads); }
  /// Problems whose tiles hold so many heads: whole groups where heads share tiles.
  int32_t problems_of(int32_t heads) const {
    return packing.heads > 1 ? heads / group * packs() : heads * classes;
  }
  /// Items of the split tiles of so many heads.
  int32_t items_of(int32_t heads) const { return problems_of(heads) * split.tiles * parts(); }
  /// Batch entry of a sequence's queries in the maps.
  SPARSE_ATTN_HD int32_t query_batch(int32_t batch) const {
    return params.sequences.packed() ? 0 : batch;
  }
};

}  // namespace sparse_attn::cuda::hopper

// The Hopper engine's key split: of few query tiles all, of many those with global rows, wherever
// they lie; chunks cover all keys, and where they end follows from what a tile visits alone.
#include "cuda/hopper/key_split.h"

#include "check.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::hopper;

namespace {

constexpr int32_t kMultiprocessors = 132;

AttentionParams case_of(int32_t seq_q, int32_t seq_kv, int32_t globals, int32_t offset) {
  AttentionParams params;
  params.problem.batch = params.problem.heads_q = params.problem.heads_kv = 1;
  params.problem.seq_q = seq_q;
  params.problem.seq_kv = seq_kv;
  params.sequences.rows = seq_q;
  params.sequences.keys = seq_kv;
  params.sequences.query_offset = offset;
  params.pattern.left = params.pattern.right = 64;
  params.pattern.global_count = globals;
  if (globals > 0) params.features = Features::of(Feature::kGlobalRows);
  params.pattern.lead = {0, 1, globals};
  return params;
}

/// Tiles from that of position 0 on hold all global rows; with offsets on the device likewise.
void test_tiles_hold_the_global_rows(KernelTile tile, int32_t seq_q, int32_t globals,
                                     int32_t offset) {
  std::string text = "tile " + std::to_string(tile.block_q) + ", Sq " + std::to_string(seq_q) +
                     ", globals " + std::to_string(globals) + ", offset " + std::to_string(offset);
  AttentionParams params = case_of(seq_q, 8192, globals, offset);
  const Sequence sequence = params.sequences.common();
  KeySplit known = split_global_rows(params.pattern, sequence, true, tile);
  KeySplit unknown = split_global_rows(params.pattern, sequence, false, tile);
  int32_t first = imax(0, -offset) / tile.block_q;
  bool some = false;
  for (int32_t i = 0; i < seq_q; ++i) {
    if (i + offset < 0 || i + offset >= globals) continue;
    some = true;
    CHECK(i / tile.block_q >= first && i / tile.block_q < first + known.tiles, text);
    CHECK(i / tile.block_q < first + unknown.tiles, text);
  }
  CHECK(some == (known.tiles > 0), text);
  CHECK(known.tiles <= unknown.tiles && known.least <= unknown.least, text);
}

/// Whatever a tile visits, its chunks cover it, no more of them than have room; and other batches,
/// heads and placed rows have the same.
void test_chunks_cover_the_keys(int32_t block_kv) {
  const KernelTile tile = {128, block_kv, 128, true};
  for (int32_t keys = 1; keys < 200000; keys += 61) {
    std::string text = std::to_string(keys) + " keys, tiles of " + std::to_string(block_kv);
    KeySplit split = plan_key_split(case_of(1500, keys, 128, 0), tile, kMultiprocessors);
    int32_t tiles = ceil_div(keys, block_kv);
    if (split.chunks == 0) continue;
    CHECK(tiles > kMostChunks && !split.all, text);
    for (int32_t visited : {0, 1, split.least, split.least + 1, tiles / 2, tiles}) {
      const int32_t length = split.chunk_tiles(visited);
      CHECK(length >= split.least && length * split.chunks >= visited, text);
    }
    AttentionParams other = case_of(1100, keys, 3, -20);
    other.problem.batch = 7;
    other.problem.heads_q = 64;
    CHECK(plan_key_split(other, tile, kMultiprocessors).chunk_tiles(tiles) ==
              split.chunk_tiles(tiles),
          text);
  }
}

/// All tiles of few queries on many keys, whatever the batch and the heads.
void test_few_queries() {
  constexpr KernelTile kTile = {128, 128, 128, true};
  for (int32_t seq_q : {1, 17, 64, 128, 129, 300, 512}) {
    for (int32_t keys : {4096, 65536, 131072}) {
      const std::string text = std::to_string(seq_q) + " on " + std::to_string(keys);
      AttentionParams params = case_of(seq_q, keys, 0, keys - seq_q);
      params.pattern.left = params.pattern.right = kUnlimited;
      const KeySplit split = plan_key_split(params, kTile, kMultiprocessors);
      const int32_t tiles = ceil_div(seq_q, 128);
      CHECK(split.all && split.tiles == tiles && split.chunks > 1, text);
      CHECK(split.tiles * split.chunks <= kMostChunks && split.rows(params.problem, kTile) == seq_q,
            text);
      CHECK(split.chunk_tiles(keys / 128) * split.chunks >= keys / 128, text);
      params.problem.batch = 64;
      params.problem.heads_q = params.problem.heads_kv = 32;
      CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == split.chunks, text);
      params.pattern.left = 500;
      params.pattern.right = 0;
      CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0,
            "a window of few keys, " + text);
      params.pattern.left = params.pattern.right = kUnlimited;
      params.pattern.dilation = 7;
      const KeySplit classes = plan_key_split(params, kTile, kMultiprocessors);
      CHECK(classes.chunks == 0 || seq_q < 7, "more classes than tiles fill a device, " + text);
    }
  }
}

/// More rows, on still more keys: at head dims without higher tiles, in one class, and where no
/// global token asks for a split of its own.
void test_many_rows() {
  constexpr KernelTile kTile = {128, 128, 128, true};
  for (int32_t seq_q : {513, 1024, 1025, 2048}) {
    for (int32_t keys : {4096, 16384, 32768, 131072}) {
      const std::string text = std::to_string(seq_q) + " on " + std::to_string(keys);
      const int32_t from = seq_q <= 1024 ? 16384 : 32768;
      AttentionParams params = case_of(seq_q, keys, 0, keys - seq_q);
      params.pattern.left = params.pattern.right = kUnlimited;
      const KeySplit split = plan_key_split(params, kTile, kMultiprocessors);
      CHECK((split.chunks > 1) == (keys >= from), text);
      CHECK(split.chunks == 0 || split.all, text);
      for (int32_t columns : {64, 96, 192, 256}) {
        CHECK(plan_key_split(params, {128, 128, columns, true}, kMultiprocessors).chunks == 0,
              text);
      }
      params.pattern.dilation = 2;
      CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "dilated, " + text);
      params.pattern.dilation = 1;
      for (Feature other : {Feature::kSoftcap, Feature::kGlobalRows, Feature::kMask}) {
        params.features = Features::of(other);
        CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0,
              "no sums of chunks, " + text);
      }
    }
  }
  AttentionParams params = case_of(2049, 131072, 0, 0);
  params.pattern.left = params.pattern.right = kUnlimited;
  CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "rows that fill a device");
}

/// Up to 64 rows on few keys are one chunk, so that heads of a group share a tile.
void test_heads_share_tiles_on_few_keys() {
  constexpr KernelTile kTile = {128, 128, 128, true, true, true};
  for (int32_t seq_q : {9, 17, 64, 65}) {
    AttentionParams params = case_of(seq_q, 500, 0, 500 - seq_q);
    CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "a group of one");
    params.problem.heads_q = 4;
    params.problem.batch = kMultiprocessors / 4;
    CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "a tile each");
    params.problem.batch += 1;
    const KeySplit split = plan_key_split(params, kTile, kMultiprocessors);
    CHECK((split.chunks == 1) == (seq_q <= 64), std::to_string(seq_q));
    CHECK((pack_heads(params, kTile, split).heads > 1) == (seq_q <= 64), std::to_string(seq_q));
    constexpr KernelTile kMerged = {128, 128, 128, true, true, false};
    CHECK(plan_key_split(params, kMerged, kMultiprocessors).chunks == 0, "a merge of one chunk");
    params.features = Features::of(Feature::kSoftcap);
    CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0,
          "a kernel that sums no chunks");
  }
}

/// A query tile of one of several sequences has the chunks that the sequence's own call gives it.
void test_sequences_are_split_as_alone() {
  constexpr KernelTile kTile = {128, 128, 128, true};
  int32_t splits = 0;
  for (int32_t globals : {0, 1, 128, 129, 250}) {
    for (int32_t rows : {1, 100, 500, 700, 1500, 9000}) {
      for (int32_t keys : {50, 3000, 4097, 9000, 20000, 70000}) {
        const AttentionParams params = case_of(rows, keys, globals, keys - rows);
        const Sequence own = params.sequences.common();
        const KeySplit plan = plan_key_split(params, kTile, kMultiprocessors);
        const int32_t first = plan.all ? 0 : first_split_row(own.origin, own.offset, 128) / 128;
        for (int32_t block = 0; block < ceil_div(rows, 128); ++block) {
          const KeySplit split =
              split_of_sequence(params.pattern, params.features, own, true, block, kTile);
          const bool is_split = plan.chunks > 0 && block >= first && block < first + plan.tiles;
          const std::string text = std::to_string(block) + " of " + std::to_string(rows) + " on " +
                                   std::to_string(keys) + ", " + std::to_string(globals);
          CHECK((split.chunks > 0) == is_split, text);
          if (!is_split) continue;
          CHECK(split.chunks == plan.chunks && split.least == plan.least, text);
          ++splits;
        }
      }
    }
  }
  CHECK(splits > 0, "none was split");
}

/// Whole warps of a tile have the rows of a head, whatever the group; nobody else shares a tile.
void test_packing() {
  constexpr KernelTile kTile = {128, 128, 128, true, true};
  for (int32_t seq_q : {1, 16, 17, 32, 50, 64, 65, 128, 200}) {
    const std::string text = std::to_string(seq_q) + " queries";
    AttentionParams params = case_of(seq_q, 65536, 0, 0);
    params.pattern.left = params.pattern.right = kUnlimited;
    const KeySplit split = plan_key_split(params, kTile, kMultiprocessors);
    CHECK(pack_heads(params, kTile, split).heads == 1, "a group of one, " + text);
    int32_t rows = 0;
    for (int32_t group : {2, 3, 4, 32}) {
      params.problem.heads_q = group;
      const HeadPacking packing = pack_heads(params, kTile, split);
      CHECK(packing.heads * packing.rows == 128 && (packing.heads > 1) == (seq_q <= 64), text);
      CHECK(rows == 0 || rows == packing.rows, "the group changes the rows of a head, " + text);
      rows = packing.rows;
      if (packing.heads == 1) continue;
      CHECK(rows >= seq_q && rows % 16 == 0 && (rows == 16 || rows < 2 * seq_q), text);
      for (int32_t row = 0; row < 128; ++row) {
        CHECK(packing.head(row) * rows + packing.row(row) == row, text);
      }
    }
    AttentionParams other = params;
    int32_t bounds = 0;
    other.scores.bounds.data = &bounds;  // only its presence is looked at
    CHECK(pack_heads(other, kTile, split).heads == pack_heads(params, kTile, split).heads, text);
    other.scores.bounds.stride_h = 2;
    CHECK(pack_heads(other, kTile, split).heads == 1, "heads that see other keys, " + text);
    other = params;
    other.features.add(static_cast<Feature>(60));
    CHECK(pack_heads(other, kTile, split).heads == 1, "a feature that nobody has listed, " + text);
    other = params;
    other.pattern.dilation = 2;
    CHECK(pack_heads(other, kTile, split).heads == 1, "residue classes, " + text);
    CHECK(pack_heads(params, kTile, {}).heads == 1, "keys that are not split, " + text);
    CHECK(pack_heads(params, {128, 128, 128, true}, split).heads == 1, "another kernel, " + text);
  }
}

void test_who_is_not_split() {
  constexpr KernelTile kTile = {128, 128, 128, true};
  AttentionParams params = case_of(8192, 8192, 128, 0);
  CHECK(plan_key_split(params, kTile, kMultiprocessors).tiles == 1, "a split case");
  CHECK(plan_key_split(params, {128, 128, 128}, kMultiprocessors).chunks == 0,
        "a kernel without chunks");
  params.pattern.causal = true;
  CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "causal");
  params = case_of(8192, 8192, 0, 0);
  CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "no global rows");
  params = case_of(8192, 8192, 257, 0);
  CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "many global rows");
  params = case_of(8192, 8192, 128, 0);
  params.pattern.left = params.pattern.right = kUnlimited;
  CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "every row sees every key");
  params = case_of(513, 8192, 0, 0);
  params.pattern.left = params.pattern.right = kUnlimited;
  CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "many queries");
  params = case_of(128, 2047, 0, 0);
  params.pattern.left = params.pattern.right = kUnlimited;
  CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks > 0, "few queries");
  params.problem.seq_kv = 1920;
  CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "few keys");
  for (int32_t rows = 1 << 20; rows <= 1 << 28; rows *= 2) {  // whose tiles have 128 times as many
    params = case_of(rows, rows, 0, 0);
    params.pattern.lead = {0, 1, 1024};
    params.pattern.dilation = rows;
    CHECK(plan_key_split(params, kTile, kMultiprocessors).chunks == 0, "a class a row");
  }
}

/// Gathered rows are all split, however few keys there are: their merge stores them.
void test_gathered_rows() {
  const KernelTile tile = {128, 128, 64, true};
  const int32_t rows = 0;
  for (int32_t seq_q : {1, 128, 129, 700, 5000}) {
    for (int32_t keys : {1, 900, 4096, 100000}) {
      AttentionParams params = case_of(seq_q, keys, 0, 0);
      params.outputs.rows = &rows;  // only its presence is looked at
      const KeySplit split = plan_key_split(params, tile, kMultiprocessors);
      std::string text = std::to_string(seq_q) + " rows, " + std::to_string(keys) + " keys";
      CHECK(split.all && split.tiles == ceil_div(seq_q, tile.block_q), text);
      CHECK(split.chunks >= 1 && split.chunks <= kMostChunks, text);
      const int32_t visited = most_visited(params.pattern, keys, tile);
      CHECK(split.chunk_tiles(visited) * split.chunks >= visited, text);
    }
  }
}

}  // namespace

int main() {
  for (int32_t block_q : {128, 192}) {
    for (int32_t seq_q : {1, 100, 1000}) {
      for (int32_t globals : {1, 2, 128, 129, 130, 193, 256}) {
        for (int32_t offset : {-2000, -1000, -999, -300, -129, -128, -1, 0, 1, 127, 300}) {
          test_tiles_hold_the_global_rows({block_q, 128}, seq_q, globals, offset);
        }
      }
    }
  }
  for (int32_t block_kv : {64, 80, 96, 112, 128}) test_chunks_cover_the_keys(block_kv);
  test_few_queries();
  test_many_rows();
  test_heads_share_tiles_on_few_keys();
  test_sequences_are_split_as_alone();
  test_gathered_rows();
  test_packing();
  test_who_is_not_split();
  return check::summary();
}

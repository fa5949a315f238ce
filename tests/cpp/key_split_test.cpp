// The Hopper engine's split of query tiles with global rows: every such tile is split wherever the
// rows lie, chunks cover all keys, and where they end follows from the length of the keys alone.
#include "cuda/hopper/key_split.h"

#include "check.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::hopper;

namespace {

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
  params.pattern.lead = {0, 1, globals};
  return params;
}

/// Tiles from that of position 0 on hold all global rows; with offsets on the device likewise.
void test_tiles_hold_the_global_rows(TileShape tile, int32_t seq_q, int32_t globals,
                                     int32_t offset) {
  std::string text = "tile " + std::to_string(tile.block_q) + ", Sq " + std::to_string(seq_q) +
                     ", globals " + std::to_string(globals) + ", offset " + std::to_string(offset);
  AttentionParams params = case_of(seq_q, 8192, globals, offset);
  KeySplit known = plan_key_split(params, tile);
  params.sequences.query_offsets = &offset;  // only its presence is looked at
  KeySplit unknown = plan_key_split(params, tile);
  int32_t first = imax(0, -offset) / tile.block_q;
  bool some = false;
  for (int32_t i = 0; i < seq_q; ++i) {
    if (i + offset < 0 || i + offset >= globals) continue;
    some = true;
    CHECK(i / tile.block_q >= first && i / tile.block_q < first + known.tiles, text);
    CHECK(i / tile.block_q < first + unknown.tiles, text);
  }
  CHECK(some == (known.tiles > 0), text);
  CHECK(known.tiles <= unknown.tiles && known.chunk_tiles <= unknown.chunk_tiles, text);
}

void test_chunks_cover_the_keys(int32_t block_kv) {
  int32_t before = 0;
  for (int32_t keys = 1; keys < 200000; keys += 61) {
    std::string text = std::to_string(keys) + " keys, tiles of " + std::to_string(block_kv);
    KeySplit split = plan_key_split(case_of(500, keys, 128, 0), {128, block_kv});
    int32_t tiles = ceil_div(keys, block_kv);
    CHECK((split.chunks == 0) == (tiles <= kLeastChunkTiles), text);
    if (split.chunks == 0) continue;
    CHECK(split.chunks * split.chunk_tiles >= tiles, text);
    CHECK((split.chunks - 1) * split.chunk_tiles < tiles, text);
    CHECK(split.chunks <= kMostChunks && split.chunks >= before, text);
    before = split.chunks;
    AttentionParams other = case_of(100, keys, 3, -20);
    other.problem.batch = 7;
    other.problem.heads_q = 64;
    CHECK(plan_key_split(other, {128, block_kv}).chunk_tiles == split.chunk_tiles, text);
  }
}

void test_who_is_not_split() {
  AttentionParams params = case_of(8192, 8192, 128, 0);
  CHECK(plan_key_split(params, {128, 128}).tiles == 1, "a split case");
  params.pattern.causal = true;
  CHECK(plan_key_split(params, {128, 128}).items() == 0, "causal");
  params = case_of(8192, 8192, 0, 0);
  CHECK(plan_key_split(params, {128, 128}).items() == 0, "no global rows");
  params = case_of(8192, 8192, kMostSplitGlobals + 1, 0);
  CHECK(plan_key_split(params, {128, 128}).items() == 0, "many global rows");
  params = case_of(8192, 8192, 128, 0);
  params.pattern.left = params.pattern.right = kUnlimited;
  CHECK(plan_key_split(params, {128, 128}).items() == 0, "every row sees every key");
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
  test_who_is_not_split();
  return check::summary();
}

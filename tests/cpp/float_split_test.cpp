// The key split of float32: chunks cover the steps of a tile, where they end follows from the tile
// alone, and the host's bound holds for every tile that a pattern makes.
#include "check.h"
#include "cuda/portable/key_split.h"
#include "visited_tiles.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::portable;

namespace {

constexpr int32_t kBlocks[] = {32, 16, 8};  // keys of a step

AttentionParams case_of(int32_t seq_q, int32_t seq_kv) {
  AttentionParams params;
  params.problem = {1, 1, 1, seq_q, seq_kv, 64, 64, Dtype::kFloat32};
  params.sequences.rows = seq_q;
  params.sequences.keys = seq_kv;
  params.sequences.query_offset = seq_kv - seq_q;
  return params;
}

void test_chunks_cover_the_steps() {
  for (int32_t block : kBlocks) {
    for (int32_t rows : {1, 16, 17, 64, 65, 256, 257, 5000}) {
      const ChunkRule rule = rule_of(rows);
      int32_t most = 0;
      for (int32_t steps = 0; steps < 70000; steps += steps < 600 ? 1 : 97) {
        const KeyChunks chunks = cut_steps(rows, steps, steps, block);
        const std::string text = std::to_string(rows) + " rows, " + std::to_string(steps) +
                                 " steps of " + std::to_string(block);
        CHECK(chunks.count >= 1 && chunks.count <= rule.most, text);
        CHECK(chunks.count == 1 || chunks.length * block >= rule.least, text);
        int32_t end = 0;
        for (int32_t i = 0; i < chunks.count; ++i) {
          const Interval own = chunks.steps(i, steps);
          CHECK(own.begin == end && (own.end > end || steps == 0), text);
          CHECK(steps == 0 || (chunks.of_step(own.begin) == i && chunks.of_step(own.end - 1) == i),
                text);
          end = own.end;
        }
        CHECK(end == steps, text);
        most = imax(most, chunks.count);
      }
      CHECK(most == rule.most, "no tile has as many chunks as there may be");
    }
  }
}

/// Tiles with the call's global tokens come last, and a sequence has those that it has by itself.
void test_ends_follow_from_the_own_steps() {
  for (int32_t range : {1, 8, 100, 256, 257, 3000}) {
    const KeyChunks own = cut_steps(3, range, range, 32);
    for (int32_t more : {1, 5, 1000}) {
      const KeyChunks chunks = cut_steps(3, range, range + more, 32);
      const std::string text = std::to_string(range) + " steps and " + std::to_string(more);
      CHECK(own.count == 1 || chunks.length == own.length, text);
      CHECK(chunks.count >= own.count &&
                chunks.steps(chunks.count - 1, range + more).end == range + more,
            text);
    }
  }
}

/// No tile of the pattern, of any sequence as long as the call's at most, has more chunks than the
/// host makes room for.
void test_bound(const AttentionParams& params, const TileShape& tile, const std::string& text) {
  const int32_t bound = most_chunks(params, tile);
  const int32_t seq_q = params.problem.seq_q, seq_kv = params.problem.seq_kv;
  const int32_t shorter = params.sequences.packed() ? 1 : seq_q;
  for (int32_t rows : {seq_q, shorter}) {
    for (int32_t keys : {seq_kv, seq_kv / 2 + 1}) {
      for (int32_t offset : {keys - rows, keys / 2, -3, 0}) {
        for (int32_t origin : {0, keys / 3, -7}) {
          const Sequence sequence = {rows, keys, offset, origin, 0, 0};
          Bounds bounds = unbounded(seq_kv);
          bounds.cut(params.num_keys(sequence));
          for (int32_t c = 0; c < params.pattern.classes(rows); ++c) {
            const Slice slice = make_slice(params.pattern, c, sequence);
            for (int32_t begin = 0; begin < slice.rows.length; begin += tile.block_q) {
              const Interval own = {begin, imin(begin + tile.block_q, slice.rows.length)};
              const Tiles tiles = visited_tiles(params.pattern, slice, own, bounds, tile.block_kv);
              const int32_t count = tiles.count();
              CHECK(count <= most_steps(params, tile), text);
              CHECK(cut_steps(rows, count, count, tile.block_kv).count <= bound, text);
            }
          }
        }
      }
    }
  }
}

void test_bounds() {
  const int32_t first_rows = 0;  // only its presence is looked at
  for (int32_t head_dim : {64, 128, 256}) {
    for (KernelKind kind : {KernelKind::kFloatChunks, KernelKind::kFloatLow}) {
      const TileShape tile = tile_shape(kind, head_dim);
      for (int32_t seq_q : {1, 16, 17, 64, 65, 256, 300}) {
        if (kind == KernelKind::kFloatLow && seq_q > tile.block_q) continue;
        for (int32_t seq_kv : {1, 255, 257, 4096, 9001}) {
          for (int32_t left : {0, 100, 3000, kUnlimited}) {
            for (bool packed : {false, true}) {
              const std::string text = std::to_string(seq_q) + " on " + std::to_string(seq_kv) +
                                       ", left " + std::to_string(left) + ", packed " +
                                       std::to_string(packed);
              AttentionParams params = case_of(seq_q, seq_kv);
              if (packed) params.sequences.first_rows = &first_rows;
              params.pattern.left = left;
              params.pattern.right = left / 2;
              test_bound(params, tile, text);
              params.pattern.causal = true;
              params.pattern.lead = {0, 1, 70};
              test_bound(params, tile, "sinks, " + text);
              params.pattern.lead = {2, 3, kUnlimited};
              test_bound(params, tile, "strided columns, " + text);
              params.pattern.lead = {};
              params.pattern.dilation = 5;
              test_bound(params, tile, "dilated, " + text);
              params = case_of(seq_q, seq_kv);
              if (packed) params.sequences.first_rows = &first_rows;
              params.pattern.left = params.pattern.right = left;
              params.pattern.global_count = 40;
              params.pattern.lead = {0, 1, 40};
              test_bound(params, tile, "globals, " + text);
            }
          }
        }
      }
    }
  }
}

/// Which calls have chunks at all: the others take the kernel without.
void test_many_rows_have_none() {
  const TileShape tile = tile_shape(KernelKind::kFloatChunks, 64);
  CHECK(most_chunks(case_of(256, 100000), tile) == 8, "256 rows");
  CHECK(most_chunks(case_of(257, 100000), tile) == 1, "257 rows");
  CHECK(most_chunks(case_of(256, 1024), tile) == 1, "one chunk's keys");
  AttentionParams packed = case_of(257, 100000);
  const int32_t first_rows = 0;  // only its presence is looked at
  packed.sequences.first_rows = &first_rows;
  CHECK(most_chunks(packed, tile) == 32, "packed sequences may be short");
}

/// Windows of few keys have no room for chunks that they never have.
void test_windows_have_few_chunks() {
  const TileShape tile = tile_shape(KernelKind::kFloatLow, 64);
  AttentionParams params = case_of(1, 100000);
  CHECK(most_chunks(params, tile) == 32, "all keys");
  params.pattern.left = 500;
  params.pattern.right = 0;
  CHECK(most_chunks(params, tile) == 3, "a window of 501");
  params.pattern.left = 100;
  CHECK(most_chunks(params, tile) == 1, "a window of 101");
}

void test_who_shares_out() {
  const TileShape tile = tile_shape(KernelKind::kFloatChunks, 128);
  constexpr int32_t kResident = 264;
  const AttentionParams few = case_of(20, 8192);
  CHECK(plan_split(few, tile, 32, kResident) == 16, "few tiles");
  CHECK(plan_split(case_of(16, 8192), tile, 32, kResident) == 32, "fewer rows");
  CHECK(plan_split(few, tile, 2 * kResident, kResident) == 1, "tiles that fill the device");
  CHECK(plan_split(case_of(256, 8192), tile, 4, kResident) == 8, "256 rows");
  CHECK(plan_split(case_of(257, 8192), tile, 5, kResident) == 1, "many rows");
  CHECK(plan_split(case_of(20, 256), tile, 1, kResident) == 1, "few keys");
  AttentionParams other = few;
  other.problem.dtype = Dtype::kFloat16;
  CHECK(plan_split(other, tile, 32, kResident) == 1, "half precision");
  other = few;
  other.pattern.topk = 5;
  CHECK(plan_split(other, tile, 32, kResident) == 1, "top-k");
  other = case_of(64, 8192);
  other.problem.heads_q = 500;
  other.problem.value_dim = 128;
  CHECK(plan_split(other, tile, 500, kResident) == 16, "much memory");
  other.problem.heads_q = 510;
  CHECK(plan_split(other, tile, 510, kResident) == 1, "more memory");
  CHECK(partial_columns(5) == 8 && partial_columns(64) == 64, "columns");
}

/// Where a step ends and how many rows a warp has is the same in low tiles, and so are a row's
/// bits.
void test_low_tiles() {
  for (int32_t head_dim : {1, 64, 65, 128, 129, 256}) {
    const TileShape tile = tile_shape(KernelKind::kFloat, head_dim);
    const TileShape chunks = tile_shape(KernelKind::kFloatChunks, head_dim);
    const TileShape low = tile_shape(KernelKind::kFloatLow, head_dim);
    const std::string text = "head dim " + std::to_string(head_dim);
    CHECK(low.block_kv == tile.block_kv && low.granule == tile.granule, text);
    CHECK(low.rows_per_warp() == tile.rows_per_warp() && low.head_dim == tile.head_dim, text);
    CHECK(low.smem_bytes() <= tile.smem_bytes() && low.warps == 1, text);
    CHECK(chunks.block_kv == tile.block_kv && chunks.rows_per_warp() == tile.rows_per_warp(), text);
  }
}

}  // namespace

int main() {
  test_low_tiles();
  test_chunks_cover_the_steps();
  test_ends_follow_from_the_own_steps();
  test_bounds();
  test_many_rows_have_none();
  test_windows_have_few_chunks();
  test_who_shares_out();
  return check::summary();
}

// Device half of the pattern tests: a kernel that calls everything a CUDA engine calls, so that
// compiling it shows csrc/pattern.h and csrc/params.h usable from device code. It is never
// launched.
#include "params.h"
#include "visited_tiles.h"

namespace sparse_attn {

/// Counts the pairs of one query tile. counts: [tiles of rows]
__global__ void count_pairs(AttentionParams params, int32_t residue, int32_t* counts) {
  constexpr int32_t BLOCK_Q = 16, BLOCK_KV = 64;
  const Pattern& pattern = params.pattern;
  Slice slice = make_slice(pattern, residue, params.sequences.of(0));
  int32_t begin = static_cast<int32_t>(blockIdx.x) * BLOCK_Q;
  Interval rows = {begin, imin(begin + BLOCK_Q, slice.rows.length)};
  if (rows.empty()) return;
  Tiles tiles = visited_tiles(pattern, slice, rows, unbounded(params.problem.seq_kv), BLOCK_KV);
  int32_t count = 0;
  for (int32_t r = rows.begin; r < rows.end; ++r) {
    Interval keys = params.scores.bounds.row(0, 0, slice.rows.at(r), params.problem.seq_kv);
    Row row = make_row(pattern, slice, r, keys);
    Seen main = seen_main(pattern, row), lead = seen_lead(pattern, slice, row);
    for (int32_t v = tiles.main.begin * BLOCK_KV; v < tiles.main.end * BLOCK_KV; ++v) {
      count += sees(pattern, slice, main, v);
    }
    for (int32_t u = tiles.lead_left.begin * BLOCK_KV; u < tiles.lead_left.end * BLOCK_KV; ++u) {
      count += sees(pattern, slice, lead, u);
    }
  }
  if (pattern.list.present()) {
    ListedRuns runs = pattern.list.runs(0, 0, 0, pattern.list.block_kv);
    for (int32_t r = 0; r < runs.count; ++r) count += tiles.needs_mask(runs.keys(r));
  }
  counts[blockIdx.x] = count;
}

}  // namespace sparse_attn

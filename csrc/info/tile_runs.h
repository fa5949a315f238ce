// The tiles that engines visit for a pattern, as pattern.h has them, for pictures and costs. Walks
// a call of one sequence on the host; lists are not walked here, they name their blocks themselves.
#pragma once

#include <cstdint>
#include <vector>

#include "pattern.h"

namespace sparse_attn {

/// Neighbouring tiles of keys that the rows of one query tile visit alike.
struct TileRun {
  int32_t row = 0, row_step = 1, rows = 0;  // queries row, row + row_step, ..., `rows` of them
  int32_t key = 0, key_step = 1, keys = 0;  // the same of the keys
  int32_t tiles = 0;                        // tiles of keys; the last one may be partial
  bool masked = false;
};

/// Rows and keys of a tile, in elements of a residue class.
struct TileSize {
  int32_t rows = 0, keys = 0;
};

/// All runs of a call of `seq_q` queries on `seq_kv` keys (lower-right alignment). `pattern` has
/// neither lists nor global bits: `global_tokens` holds the positions of scattered global tokens.
std::vector<TileRun> tile_runs(Pattern pattern, int32_t seq_q, int32_t seq_kv, TileSize tile,
                               const std::vector<int32_t>& global_tokens);

}  // namespace sparse_attn

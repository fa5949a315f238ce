// The kernels of the key sketch: groups of tokens as ranges and codes (encode.cu), the masses of
// tiles of keys from them (score.cu), and those masses as shares of blocks (shares.cu).
#pragma once

#include "../../select_params.h"

namespace sparse_attn::cuda {

constexpr int32_t kSketchTile = 16;  // keys whose mass is told apart

inline int32_t num_sketch_tiles(const SelectParams& params) {
  return ceil_div(params.problem.seq_kv, kSketchTile);
}
/// Whether a row's tiles are the blocks of its list, so that their masses are scores as they are.
inline bool tiles_are_blocks(const SelectParams& params) {
  return params.problem.seq_q == 1 && params.block_kv == kSketchTile;
}

Status append_to_sketch(const SketchAppendParams& params);
Status sketch_pages(const SketchPagesParams& params);
/// Sketches the keys that some row may see.
Status launch_call_sketch(const SelectParams& params, const SketchView& sketch);

/// masses[b, head, row, tile]: the logarithm of the sum of exp(score) over the keys of a tile that
/// the row may see; NaN where the sketch does not hold one of them.
Status launch_sketch_masses(const SelectParams& params, const SketchView& sketch, float* masses);
/// shares[b, head, block]: the rows' shares of a block's tiles, added up.
Status launch_sketch_shares(const SelectParams& params, const float* masses, float* shares);

}  // namespace sparse_attn::cuda

// Estimates by a key sketch: each row against every key in few bits. Without a sketch of the caller
// one is made in the workspace.

#include "cpu/select/select_estimate.h"

namespace sparse_attn::cpu {

/// Each row against every key of the sketch; blocks with keys that it does not hold are kept.
void BlockEstimator::add_sketched_rows(const QueryBlock& block, double* share) const {
  const Interval rows = params_.rows_of_block(block.batch, block.index);
  const int32_t held = sketch_masses_.held(block.batch);
  for (int32_t i = rows.begin; i < rows.end; ++i) {
    sketch_masses_.add_shares(block.batch, block.head_q, i, share);
    const Interval keys = params_.keys_of_row(block.batch, block.head_q, i);
    const Interval beyond = {imax(keys.begin, held), keys.end};
    const Interval kept = SelectParams::blocks_of(beyond, params_.block_kv);
    for (int32_t j = kept.begin; j < kept.end; ++j) share[j] = std::nan("");
  }
}

}  // namespace sparse_attn::cpu

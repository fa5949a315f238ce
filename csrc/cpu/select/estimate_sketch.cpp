// Estimates by a key sketch: each row against every key in few bits. Without a sketch of the caller
// one is made in the workspace.
#include <algorithm>
#include <cmath>

#include "cpu/select/select_estimate.h"

namespace sparse_attn::cpu {

/// NaN as the values of blocks with keys that a row sees and a given sketch does not hold.
void BlockEstimator::keep_not_held(const QueryBlock& block, double* values) const {
  if (params_.sketch.lengths == nullptr) return;
  const Interval rows = params_.rows_of_block(block.batch, block.index);
  int32_t i = imax(rows.begin, params_.rows_grow() ? rows.end - 1 : 0);
  for (; i < rows.end; ++i) {
    Interval keys = params_.keys_of_row(block.batch, block.head_q, i);
    if (!params_.sketch.paged) keys.begin = imax(keys.begin, params_.held_keys(block.batch));
    for_each_group(params_.sketch, keys, [&](Interval group) {
      const int32_t held = params_.held_end(block.batch, group.begin);
      const Interval lacking = {imax(held, group.begin), group.end};
      const Interval blocks = SelectParams::blocks_of(lacking, params_.block_kv);
      std::fill(values + blocks.begin, values + blocks.end, std::nan(""));
    });
  }
}

/// Each row against every key of the sketch.
void BlockEstimator::add_sketched_rows(const QueryBlock& block, double* share) const {
  const Interval rows = params_.rows_of_block(block.batch, block.index);
  for (int32_t i = rows.begin; i < rows.end; ++i) {
    sketch_masses_.add_shares(block.batch, block.head_q, i, share);
  }
}

}  // namespace sparse_attn::cpu

// Estimates by a key sketch: each row against every key in few bits. Without a sketch of the caller
// one is made in the workspace.
#include <cmath>

#include "cpu/select/select_estimate.h"
#include "cpu/select/sketch.h"
#include "cpu/tiled/keys.h"

namespace sparse_attn::cpu {

void BlockEstimator::make_sketch(int64_t batch, int64_t head_kv) const {
  if (params_.selector != Selector::kSketch || params_.sketch.present()) return;
  const Interval keys = params_.keys_of_entry(batch);
  for (int32_t j = keys.begin; j < keys.end;) {
    const int32_t end = imin((j / sketch_.group + 1) * sketch_.group, keys.end);
    sketch_group(sketch_, params_.problem.dtype, batch, head_kv, j, end, [&](int32_t row) {
      const char* data = static_cast<const char*>(params_.keys.key.data);
      return data + params_.key_at(batch, head_kv, row) * size_of(params_.problem.dtype);
    });
    j = end;
  }
}

/// Each row against every key of the sketch; blocks with keys that it does not hold are kept.
void BlockEstimator::add_sketched_rows(const QueryBlock& block, double* share) const {
  Interval rows = params_.rows_of_block(block.batch, block.index);
  float* scores = scratch(block.worker).scores;
  const int32_t held = sketch_.held(block.batch, params_.entry_keys(block.batch));
  Interval beyond = {params_.problem.seq_kv, 0};
  for (int32_t i = rows.begin; i < rows.end; ++i) {
    Interval keys = params_.keys_of_row(block.batch, block.head_q, i);
    if (keys.end > held) beyond = {imin(beyond.begin, imax(keys.begin, held)), keys.end};
    keys.end = imin(keys.end, held);
    if (keys.empty()) continue;
    float query[kMaxHeadDim];
    mean_query(block, {i, i + 1}, query);
    for (int32_t j = keys.begin; j < keys.end;) {
      const int32_t end = imin((j / sketch_.group + 1) * sketch_.group, keys.end);
      const int32_t row = SelectParams::sketch_row(sketch_, j);
      sketch_scores(sketch_, params_.problem.dtype, params_.sketch_entry(sketch_, block.batch, j),
                    block.head_q / params_.problem.group(), row, row + end - j, query, scores + j);
      j = end;
    }
    math_.transform(scores + keys.begin, keys.size(), params_.scores.scale, params_.scores.softcap,
                    nullptr);
    add_softmax(scores, keys, nullptr, params_.block_kv, share);
  }
  const Interval kept = SelectParams::blocks_of(beyond, params_.block_kv);
  for (int32_t j = kept.begin; j < kept.end; ++j) share[j] = std::nan("");
}

}  // namespace sparse_attn::cpu

// Estimates by columns and diagonals of the last rows (selector vertical_slash).
#include <algorithm>

#include "cpu/select/select_estimate.h"

namespace sparse_attn::cpu {

void BlockEstimator::find_lines(int32_t worker, int64_t batch, int64_t head_q) const {
  int64_t head = batch * params_.problem.heads_q + head_q;
  double* columns = columns_ + head * params_.num_kv;
  double* slashes = slashes_ + head * num_slashes_;
  Scratch own = scratch(worker);
  std::fill(columns, columns + params_.num_kv, 0.0);
  std::fill(own.slashes, own.slashes + params_.problem.seq_kv + kLastRows, 0.0);
  const int32_t first = imax(0, params_.problem.seq_q - kLastRows);
  for (int32_t i = first; i < params_.problem.seq_q; ++i) {
    Interval keys = score_keys({worker, batch, head_q, 0}, i, own.scores);
    if (keys.empty()) continue;
    add_softmax(own.scores, keys, nullptr, params_.block_kv, columns);  // scores become weights
    double total = 0;
    for (int32_t j = keys.begin; j < keys.end; ++j) total += own.scores[j];
    double* at_key =
        own.slashes + (i - first) + params_.problem.seq_kv - 1;  // of row - key, from below
    for (int32_t j = keys.begin; j < keys.end; ++j) at_key[-j] += own.scores[j] / total;
  }
  // Pairs of a block of rows and a block of keys whose first ones differ by d, by their diagonals.
  for (int64_t at = 0; at < num_slashes_; ++at) {
    int64_t d = at * slash_step_ - int64_t{params_.num_kv} * params_.block_kv;
    const int64_t none = first - d - (params_.problem.seq_kv - 1);  // t of entry 0
    const int64_t begin = std::max<int64_t>(1 - params_.block_kv, none);
    const int64_t end =
        std::min<int64_t>(params_.block_q, none + params_.problem.seq_kv + kLastRows);
    double sum = 0;
    for (int64_t t = begin; t < end; ++t) {
      int64_t pairs =
          std::min<int64_t>(params_.block_q, params_.block_kv + t) - std::max<int64_t>(t, 0);
      sum += static_cast<double>(pairs) * own.slashes[t - none];
    }
    slashes[at] = sum;
  }
}

/// Half the share by columns, half by diagonals.
void BlockEstimator::add_lines(const QueryBlock& block, Interval visible, double* share) const {
  int64_t head = block.batch * params_.problem.heads_q + block.head_q;
  double* half = scratch(block.worker).half;
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    share[j] = columns_[head * params_.num_kv + j];
    half[j] = slashes_[head * num_slashes_ + difference(block.index, j)];
  }
  join_halves(visible, share, half);
}

}  // namespace sparse_attn::cpu

// Token top-k of few queries. Two kernels: the scores of all keys go to the workspace, which reads
// keys once for all heads that share them; then a thread block for each row finds the k highest and
// sums up their values, the only ones that are read.
//
//    keys ----- scores of a few heads at a time ----- k highest ----- softmax ----- their values
//              topk_scores.cuh, [rows, pitch]              topk_keep.cu, a row each
#pragma once

#include "../common/types.cuh"
#include "plan.h"

namespace sparse_attn::cuda::decode {

/// The scores of some rows, in the workspace: scale * q.k of key j in column j, by which keys are
/// ranked; -inf where attn_mask leaves the key out. Rows are those of (batch entry, query head,
/// query) from number `first` on.
struct ScoreRows {
  float* scores = nullptr;  // [count, pitch]
  int64_t pitch = 0;
  int64_t first = 0;
  int32_t count = 0;

  SPARSE_ATTN_HD float* row(int64_t number) const { return scores + (number - first) * pitch; }
};

/// Key heads of all batch entries whose scores are held at once: as many as 64 MB hold, so that
/// the workspace of a call does not grow with it.
struct TopkParts {
  int32_t at_once = 1, all = 1;  // key heads
  int32_t rows = 1;              // of each
  int64_t pitch = 0;

  TopkParts(const Problem& problem, const Sequences& sequences) {
    constexpr int64_t kMostBytes = int64_t{64} << 20;
    all = problem.batch * problem.heads_kv;
    rows = problem.group() * problem.seq_q;
    const bool packed = sequences.first_keys != nullptr;
    const int32_t keys = packed ? imin(problem.seq_kv, sequences.packed_keys) : problem.seq_kv;
    pitch = int64_t{ceil_div(imax(keys, 1), kStepKeys)} * kStepKeys;
    const int64_t fit = kMostBytes / (rows * pitch * static_cast<int64_t>(sizeof(float)));
    at_once = static_cast<int32_t>(fit < 1 ? 1 : fit < all ? fit : all);
  }
  constexpr int64_t scores() const { return int64_t{at_once} * rows * pitch; }
};

/// Writes the scores of `rows`, which are those of the grid's thread blocks.
template <typename T, int HEAD_DIM>
Status launch_scores(const AttentionParams& params, const SplitGrid& grid, int32_t blocks,
                     const ScoreRows& rows);

extern template Status launch_scores<__half, 64>(const AttentionParams&, const SplitGrid&, int32_t,
                                                 const ScoreRows&);
extern template Status launch_scores<__half, 128>(const AttentionParams&, const SplitGrid&, int32_t,
                                                  const ScoreRows&);
extern template Status launch_scores<__half, 256>(const AttentionParams&, const SplitGrid&, int32_t,
                                                  const ScoreRows&);
extern template Status launch_scores<__nv_bfloat16, 64>(const AttentionParams&, const SplitGrid&,
                                                        int32_t, const ScoreRows&);
extern template Status launch_scores<__nv_bfloat16, 128>(const AttentionParams&, const SplitGrid&,
                                                         int32_t, const ScoreRows&);
extern template Status launch_scores<__nv_bfloat16, 256>(const AttentionParams&, const SplitGrid&,
                                                         int32_t, const ScoreRows&);

/// Attends to the k highest scores of each of `rows`.
Status attend_highest(const AttentionParams& params, const ScoreRows& rows);

}  // namespace sparse_attn::cuda::decode

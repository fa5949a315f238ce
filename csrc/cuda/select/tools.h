// The tools of the CUDA library, one file each: list.cu, merge.cu, and for block selection pool.cu
// (means and extremes of blocks), score.cu (products of means, scores of the caller) and choose.cu
// (the best blocks as a list).
#pragma once

#include "../../select_params.h"

namespace sparse_attn::cuda {

/// Where block selection keeps what its launches hand on.
struct SelectWorkspace {
  float* pooled_query = nullptr;  // [B, Hq, num_q, D]
  float* pooled_key = nullptr;    // [B, Hkv, num_kv, D]
  float* scores = nullptr;        // [B, Hq, num_q, num_kv]
  int32_t* key_marks = nullptr;   // [B, Skv + 1], with bounds: rows that may see the key
};

/// Whether some row of the batch entry may see key j.
__device__ __forceinline__ bool key_exists(const SelectParams& params, const int32_t* marks,
                                           int64_t batch, int32_t j) {
  if (marks == nullptr) return j < params.num_keys(batch);
  return j < params.seq_kv && marks[batch * (params.seq_kv + 1) + j] > 0;
}

Status list_from_mask(const ListParams& params);
Status merge_states(const MergeParams& params);
Status select_blocks(const SelectParams& params);
int64_t select_workspace_bytes(const SelectParams& params);

/// Marks the keys that some row may see; with bounds only.
Status launch_marks(const SelectParams& params, int32_t* marks);
/// Means of query blocks and key blocks, over the keys that some row may see.
Status launch_pool(const SelectParams& params, const SelectWorkspace& workspace);
/// scale * mean(Q_i) . mean(K_j) for every pair of blocks.
Status launch_block_scores(const SelectParams& params, const SelectWorkspace& workspace);
/// The caller's scores as the kernels' own.
Status launch_given_scores(const SelectParams& params, const SelectWorkspace& workspace);
/// The kept blocks of every row of scores, ascending.
Status launch_choose(const SelectParams& params, const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda

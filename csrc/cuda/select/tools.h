// The tools of the CUDA library, one file each: list.cu, merge.cu, and for block selection pool.cu
// (means of blocks), score.cu (their products) and select.cu (the best blocks as a list).
#pragma once

#include "../../select_params.h"

namespace sparse_attn::cuda {

/// Where block selection keeps its means and scores, float32.
struct SelectWorkspace {
  float* pooled_query = nullptr;  // [B, Hq, num_q, D]
  float* pooled_key = nullptr;    // [B, Hkv, num_kv, D]
  float* scores = nullptr;        // [B, Hq, num_q, num_kv]
  int32_t* key_marks = nullptr;   // [B, Skv + 1], with bounds: rows that have the key
};

Status list_from_mask(const ListParams& params);
Status merge_states(const MergeParams& params);
Status select_blocks(const SelectParams& params);
int64_t select_workspace_bytes(const SelectParams& params);

/// Means of query blocks and key blocks; with bounds, over the keys that some row has.
Status launch_pool(const SelectParams& params, const SelectWorkspace& workspace);
/// scale * mean(Q_i) . mean(K_j) for every pair of blocks.
Status launch_block_scores(const SelectParams& params, const SelectWorkspace& workspace);
/// The kept blocks of every row of scores, ascending.
Status launch_choose(const SelectParams& params, const SelectWorkspace& workspace);

}  // namespace sparse_attn::cuda

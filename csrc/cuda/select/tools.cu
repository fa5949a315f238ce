// The tools' table, and block selection as its launches: estimate, by selector, then choose.
#include "../cache/append.h"
#include "../common/launch.cuh"
#include "../engines.h"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

/// Lays the workspace out from `base` and returns its size in bytes.
int64_t plan(const SelectParams& params, char* base, SelectWorkspace* workspace) {
  int64_t used = 0;
  auto take = [&](int64_t elements) {
    char* at = base + used;
    used += aligned_bytes(elements * static_cast<int64_t>(sizeof(float)));
    return at;
  };
  int64_t query_rows = int64_t{params.batch} * params.heads_q * params.num_q;
  int64_t key_rows = int64_t{params.batch} * params.heads_kv * params.num_kv;
  workspace->pooled_query = reinterpret_cast<float*>(take(query_rows * params.head_dim));
  workspace->pooled_key = reinterpret_cast<float*>(take(key_rows * params.head_dim));
  workspace->scores = reinterpret_cast<float*>(take(query_rows * params.num_kv));
  if (params.bounds.data != nullptr) {
    int64_t marks = int64_t{params.batch} * (params.seq_kv + 1);
    workspace->key_marks = reinterpret_cast<int32_t*>(take(marks));
  }
  return used;
}

Status launch_estimates(const SelectParams& params, const SelectWorkspace& workspace) {
  if (params.selector == Selector::kScores) return launch_given_scores(params, workspace);
  Status status = launch_pool(params, workspace);
  return status.ok() ? launch_block_scores(params, workspace) : status;
}

}  // namespace

int64_t select_workspace_bytes(const SelectParams& params) {
  SelectWorkspace workspace;
  return plan(params, nullptr, &workspace);
}

Status select_blocks(const SelectParams& params) {
  SelectWorkspace workspace;
  plan(params, static_cast<char*>(params.workspace), &workspace);
  Status status;
  if (workspace.key_marks != nullptr) status = launch_marks(params, workspace.key_marks);
  if (status.ok()) status = launch_estimates(params, workspace);
  if (status.ok()) status = launch_choose(params, workspace);
  return status;
}

const Tools kTools = {select_workspace_bytes, select_blocks, list_from_mask, merge_states,
                      append_to_cache};

}  // namespace sparse_attn::cuda

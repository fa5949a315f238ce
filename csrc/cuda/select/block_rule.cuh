// What the rule of block top-k says about the key blocks of one query block: which it may see and
// which are forced. Read by the kernels that choose.
#pragma once

#include "hull.cuh"

namespace sparse_attn::cuda {

constexpr uint32_t kForced = ~0u;  // what orders forced blocks, above the key of every score

/// Key blocks between the first and the last key that a row of the heads may see; all threads of a
/// thread block call it.
__device__ inline Interval find_visible(const SelectParams& params, int64_t batch, int64_t head,
                                        int32_t heads, int32_t query_block, HullStorage& storage) {
  const Interval rows = params.rows_of_block(batch, query_block);
  return SelectParams::blocks_of(hull_of_rows(params, batch, head, heads, rows, storage),
                                 params.block_kv);
}

/// Of one list.
struct BlockRule {
  int32_t batch = 0, head = 0;  // the first one of the list
  int32_t query_block = 0;
  Interval visible, sinks, diagonal;

  __device__ bool forced(int32_t block) const {
    return sinks.contains(block) || diagonal.contains(block);
  }
  /// The first head's row of [B, Hq, num_q, num_kv].
  __device__ int64_t first_value(const SelectParams& params) const {
    return ((int64_t{batch} * params.problem.heads_q + head) * params.num_q + query_block) *
           params.num_kv;
  }
};

/// The rule of list `row` of [B, lists, num_q], but for what it sees.
__device__ inline BlockRule rule_without_keys(const SelectParams& params, uint32_t row) {
  BlockRule rule;
  const uint32_t list = row / params.num_q;
  rule.batch = static_cast<int32_t>(list / params.lists());
  rule.head = static_cast<int32_t>(list % params.lists()) * params.heads_per_list();
  rule.query_block = static_cast<int32_t>(row % params.num_q);
  rule.sinks = params.sinks(rule.batch);
  rule.diagonal = params.diagonal(rule.batch, rule.query_block);
  return rule;
}
/// All of it; all threads of a thread block call it.
__device__ inline BlockRule rule_of_list(const SelectParams& params, uint32_t row,
                                         HullStorage& storage) {
  BlockRule rule = rule_without_keys(params, row);
  rule.visible = find_visible(params, rule.batch, rule.head, params.heads_per_list(),
                              rule.query_block, storage);
  return rule;
}

}  // namespace sparse_attn::cuda

// Which rows of which (batch, head) a thread block computes. Heavy query tiles come first, within
// groups of heads whose keys and values together stay in the L2 cache.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda::portable {

/// How a grid is laid out; made on the host from sizes alone, never from device data.
struct GridPlan {
  int32_t tiles = 0;            // query tiles of a head, over all classes
  int32_t classes = 1;          // residue classes that have rows
  int32_t tiles_per_block = 1;  // query tiles of a row of a block list
  int32_t heads = 0;            // batch * heads_q
  int32_t heads_at_once = 1;    // heads of a group; blockIdx is {tile and head of it, group}
  int32_t head_group = 1;       // query heads of a key head
  bool last_first = false;      // the last query tiles are the heavy ones
};

inline GridPlan plan_grid(const AttentionParams& params, int32_t block_q) {
  constexpr int64_t kGroupBytes = 32 << 20;  // measured best where the L2 cache has 50 MB
  constexpr int32_t kMostGroups = 65535;     // of blockIdx.y
  const Pattern& pattern = params.pattern;
  GridPlan plan;
  plan.classes = pattern.classes(params.problem.seq_q);
  plan.tiles = plan.classes * ceil_div(ceil_div(params.problem.seq_q, pattern.dilation), block_q);
  if (pattern.list.present()) {
    plan.tiles_per_block = ceil_div(imin(pattern.list.block_q, params.problem.seq_q), block_q);
    plan.tiles = ceil_div(params.problem.seq_q, pattern.list.block_q) * plan.tiles_per_block;
  }
  plan.heads = params.problem.batch * params.problem.heads_q;
  plan.head_group = params.problem.group();
  const int64_t key_bytes =
      int64_t{params.problem.head_dim + params.problem.value_dim} * size_of(params.problem.dtype);
  const int64_t head_bytes = params.problem.seq_kv * key_bytes / params.problem.group() + 1;
  int64_t heads = kGroupBytes / head_bytes;
  heads = heads < plan.heads ? heads : plan.heads;
  plan.heads_at_once = imax(static_cast<int32_t>(heads), ceil_div(plan.heads, kMostGroups));
  plan.last_first = pattern.causal;
  return plan;
}

/// One thread block's part.
struct Work {
  int32_t batch = 0, head = 0, kv_head = 0;
  Sequence sequence;
  Slice slice;
  Interval rows;         // of the slice; empty where the class or the list row has none left
  int32_t list_row = 0;  // row of the block list
};

/// a / b for numbers that are not negative; most divisors here are 1.
__device__ __forceinline__ int32_t quotient(int32_t a, int32_t b) {
  return b == 1 ? a : static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

/// The part of thread block `block` of the plan's grid.
template <int BLOCK_Q>
__device__ Work find_work(const AttentionParams& params, const GridPlan& plan, uint2 block) {
  int32_t rest = block.x;
  int32_t tile = quotient(rest, plan.heads_at_once);
  int32_t head_index = block.y * plan.heads_at_once + rest - tile * plan.heads_at_once;
  if (head_index >= plan.heads) return {};
  if (plan.last_first) tile = plan.tiles - 1 - tile;
  int32_t row_tile = quotient(tile, plan.classes);
  int32_t residue = tile - row_tile * plan.classes;

  Work work;
  work.batch = params.problem.batch == 1 ? 0 : quotient(head_index, params.problem.heads_q);
  work.head = head_index - work.batch * params.problem.heads_q;
  work.kv_head = quotient(work.head, plan.head_group);
  work.sequence = params.sequences.of(work.batch);
  work.slice = make_slice(params.pattern, residue, work.sequence);
  int32_t begin = row_tile * BLOCK_Q;
  int32_t end = work.slice.rows.length;
  if (params.pattern.list.present()) {
    int32_t block_q = params.pattern.list.block_q;
    work.list_row = quotient(tile, plan.tiles_per_block);
    begin = work.list_row * block_q + (tile - work.list_row * plan.tiles_per_block) * BLOCK_Q;
    end = imin(end, (work.list_row + 1) * block_q);
  }
  work.rows = {begin, imin(begin + BLOCK_Q, end)};
  return work;
}

}  // namespace sparse_attn::cuda::portable

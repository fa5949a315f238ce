// The kept key blocks of each query block, ascending: forced ones first, then the highest scores,
// exact with ties to the lower block. The rule stands in docs/design.md, "Block top-k". One thread
// block a row.
#include "../common/launch.cuh"
#include "../common/radix_select.cuh"
#include "tools.h"
#include "warp_list.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int kChooseThreads = 128;
constexpr uint32_t kForced = ~0u;  // above the key of every score
constexpr uint32_t kLowest = 1;    // of a block without keys

/// What the rule says about the key blocks of one query block.
struct BlockRule {
  Interval visible, sinks, diagonal;

  __device__ bool forced(int32_t block) const {
    return visible.contains(block) && (sinks.contains(block) || diagonal.contains(block));
  }
};

/// The threads of the block share the rows of the query block; every thread gets the rule.
__device__ BlockRule make_rule(const SelectParams& params, int64_t batch, int64_t head,
                               int32_t query_block) {
  __shared__ int32_t first_key, end_key;  // of any row
  int32_t first = query_block * params.block;
  int32_t end = imin(first + params.block, params.seq_q);
  if (threadIdx.x == 0) {
    first_key = params.seq_kv;
    end_key = 0;
  }
  __syncthreads();
  for (int32_t i = first + threadIdx.x; i < end; i += kChooseThreads) {
    Interval keys = params.keys_of_row(batch, head, i);
    if (keys.empty()) continue;
    atomicMin(&first_key, keys.begin);
    atomicMax(&end_key, keys.end);
  }
  __syncthreads();
  BlockRule rule;
  rule.visible = params.blocks_of({first_key, end_key});
  rule.sinks = {0, params.sink_blocks};
  rule.diagonal = params.around_diagonal(floor_div(params.position(batch, first), params.block),
                                         floor_div(params.position(batch, end - 1), params.block));
  return rule;
}

__global__ void __launch_bounds__(kChooseThreads)
    choose_blocks(const SelectParams params, const float* scores) {
  __shared__ SelectStorage storage;
  __shared__ int32_t num_forced;
  int64_t row = blockIdx.x;
  int64_t head = row / params.num_q;
  BlockRule rule = make_rule(params, head / params.heads_q, head % params.heads_q,
                             static_cast<int32_t>(row % params.num_q));
  scores += row * params.num_kv;
  int32_t* indices = params.indices + row * params.num_kv;

  if (threadIdx.x == 0) num_forced = 0;
  __syncthreads();
  int32_t mine = 0;
  for (int32_t j = rule.visible.begin + threadIdx.x; j < rule.visible.end; j += kChooseThreads) {
    mine += rule.forced(j);
  }
  if (mine > 0) atomicAdd(&num_forced, mine);
  __syncthreads();

  auto key = [&](int32_t j) -> uint32_t {
    if (!rule.visible.contains(j)) return 0;
    if (rule.forced(j)) return kForced;
    return isnan(scores[j]) ? kLowest : ordered_key(scores[j]);
  };
  int32_t kept = params.kept(rule.visible.size(), num_forced);
  Threshold threshold = find_threshold(key, params.num_kv, kept, storage);

  if (threadIdx.x >= 32) return;
  auto kept_block = [&](int32_t j) { return threshold.keeps(key(j), j); };
  write_list_row(params.num_kv, kept_block, indices, params.counts + row);
}

}  // namespace

Status launch_choose(const SelectParams& params, const SelectWorkspace& workspace) {
  int64_t rows = int64_t{params.batch} * params.heads_q * params.num_q;
  choose_blocks<<<static_cast<uint32_t>(rows), kChooseThreads, 0, to_stream(params.stream)>>>(
      params, workspace.scores);
  return launched();
}

}  // namespace sparse_attn::cuda

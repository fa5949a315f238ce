// Arguments of block selection. Filled by ops/, which has checked everything; the tools trust it,
// allocate nothing and throw nothing.
#pragma once

#include "params.h"

namespace sparse_attn {

/// Arguments of block selection: scores of pooled blocks, then the best blocks as a list.
struct SelectParams {
  TensorView query;  // [B, Hq, Sq, D]
  TensorView key;    // [B, Hkv, Skv, D]
  int32_t batch = 0, heads_q = 0, heads_kv = 0, seq_q = 0, seq_kv = 0, head_dim = 0;
  Dtype dtype = Dtype::kFloat32;
  float scale = 1.0f;
  bool causal = false;
  BoundsView bounds;
  int32_t query_offset = 0;
  const int32_t* query_offsets = nullptr;  // [B]

  int32_t block = 0;         // rows of a query block and keys of a key block
  int32_t budget_count = 0;  // blocks kept for each query block; 0 takes the share
  double budget_share = 0;   // of the blocks that the query block may see, rounded up
  int32_t sink_blocks = 0, local_blocks = 0;  // forced, inside the budget

  /// Key position of query i.
  SPARSE_ATTN_HD int32_t position(int64_t b, int32_t i) const {
    return i + imax(-kMaxLength, imin(offset(b), kMaxLength));
  }
  /// The keys that query i may see.
  SPARSE_ATTN_HD Interval keys_of_row(int64_t b, int64_t head, int32_t i) const {
    Interval keys = bounds.row(b, head, i, seq_kv);
    if (causal) keys.end = imin(keys.end, position(b, i) + 1);
    return keys;
  }
  /// The key blocks that hold the keys.
  SPARSE_ATTN_HD Interval blocks_of(Interval keys) const {
    return keys.empty() ? Interval{} : Interval{keys.begin / block, ceil_div(keys.end, block)};
  }
  /// Key blocks forced around the blocks low .. high that hold the positions of a query block.
  SPARSE_ATTN_HD Interval around_diagonal(int32_t low, int32_t high) const {
    int32_t behind = causal ? 0 : local_blocks;
    return {imin(low, high + 1 - local_blocks), high + 1 + behind};
  }

  /// Blocks kept by a query block that sees `visible` of them, `forced` of which are forced.
  SPARSE_ATTN_HD int32_t kept(int32_t visible, int32_t forced) const {
    int32_t wanted = budget_count;
    if (wanted == 0) {
      double share = budget_share * visible;
      wanted = static_cast<int32_t>(share);
      wanted += wanted < share;
    }
    return imax(forced, imin(wanted, visible));
  }

  int32_t num_q = 0, num_kv = 0;  // blocks
  int32_t* counts = nullptr;      // [B, Hq, num_q]
  int32_t* indices = nullptr;     // [B, Hq, num_q, num_kv], ascending
  void* workspace = nullptr;
  void* stream = nullptr;
  int32_t device = 0;

  SPARSE_ATTN_HD int32_t offset(int64_t b) const {
    return query_offsets == nullptr ? query_offset : query_offsets[b];
  }
};

}  // namespace sparse_attn

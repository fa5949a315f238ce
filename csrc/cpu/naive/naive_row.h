// One row of the naive engine: which keys it sees, and the softmax over them. Scalar and in the
// order of the definition: scale, softcap, mask, top-k, softmax with the learned sink in the
// denominator.
#pragma once

#include <cstdint>

#include "arena.h"
#include "params.h"

namespace sparse_attn::cpu {

struct NaiveRow {
  uint8_t* seen = nullptr;   // [Skv]
  int32_t* ranks = nullptr;  // [Skv], for top-k

  NaiveRow(const AttentionParams& params, Arena* arena);

  /// Turns q.k of query i into probabilities, 0 for keys that it does not see; returns its lse.
  float softmax(const AttentionParams& params, const Pattern& pattern, int32_t batch, int32_t head,
                int32_t i, float* scores);

 private:
  void keep_topk(int32_t k, int32_t n, float* scores);
  void find_seen(const AttentionParams& params, const Pattern& pattern, int32_t batch, int32_t head,
                 int32_t i);
  void see_listed(const BlockList& list, Interval keys, int32_t batch, int32_t head, int32_t i);
};

}  // namespace sparse_attn::cpu

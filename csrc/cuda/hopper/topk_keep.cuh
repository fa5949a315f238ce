// What the kernel of token top-k (Config kTop) does to a thread's scores: those below their row's
// threshold become -inf. The ranking pass saw the same q.k bit by bit.
#pragma once

#include "arguments.h"
#include "config.h"

namespace sparse_attn::cuda::hopper {

template <class C>
class KeptScores {
 public:
  /// For rows `row` and `row` + 8 of a head's queries; those past the last repeat it.
  __device__ __forceinline__ void load(const Arguments& args, int64_t head, int32_t row) {
    const int32_t last = args.params.problem.seq_q - 1;
    bool some = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows_[r] = args.thresholds + head * args.params.problem.seq_q + imin(row + 8 * r, last);
      const Threshold threshold = *rows_[r];
      least_[r] = score_of(threshold.key);
      some |= threshold.last != kUnlimited;
    }
    tied_ = __any_sync(~0u, some);
  }

  /// `key` is the position of the thread's first column.
  __device__ __forceinline__ void drop_others(float (&s)[C::BLOCK_KV / 2], int32_t key) const {
#pragma unroll
    for (int i = 0; i < C::BLOCK_KV / 2; ++i) {
      s[i] = s[i] < least_[i / 2 % 2] ? -INFINITY : s[i];  // NaN stays
    }
    if (!tied_) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t last = rows_[r]->last - key;
#pragma unroll
      for (int i = 0; i < C::BLOCK_KV / 2; ++i) {
        const bool late = i / 2 % 2 == r && i / 4 * 8 + i % 2 > last;
        if (late && s[i] == least_[r]) s[i] = -INFINITY;
      }
    }
  }

 private:
  const Threshold* rows_[2];
  float least_[2];
  bool tied_;  // in some row of the warp not every key of the least score is kept
};

}  // namespace sparse_attn::cuda::hopper

// How a chunk of keys joins the sum of the chunks before it, or a group of chunks that of the
// groups before it: the online softmax, from one partial result to the next.
#pragma once

#include "state.cuh"

namespace sparse_attn::cuda {

/// A chunk without keys for the row adds nothing, so the bits do not depend on which chunks other
/// rows visited. Exponentials are those of exp2_of.
template <bool kExact>
struct Join {
  float m;          // of both
  float kept, own;  // what the sum before and the chunk are multiplied by

  /// Of a sum with maximum `before` and a chunk of `m` and `l`; m is -inf where there were no keys,
  /// and where all scores are NaN, which l shows and hands on. `unit` brings maxima to log2 units.
  __device__ __forceinline__ static Join of(float before, float m, float l, float unit = 1.0f) {
    const float both = fmaxf(before, m);
    const float kept = before == both ? 1.0f : exp2_of<kExact>((before - both) * unit);
    return {both, kept, l == 0.0f || l != l ? l : exp2_of<kExact>((m - both) * unit)};
  }
  __device__ __forceinline__ float sum(float before, float chunk) const {
    const float rest = before * kept;
    return own == 0.0f ? rest : fmaf(chunk, own, rest);
  }
};

}  // namespace sparse_attn::cuda

// How the chunks of a row are joined, in the kernel and in the merge: from the first to the last,
// by the same operations, so that both have the same bits.
#pragma once

#include <cfloat>

#include "../common/join.cuh"

namespace sparse_attn::cuda::portable {

/// What a row has of the chunks so far.
struct RowSum {
  float m = -INFINITY;  // in the unit of Exponent
  float l = 0.0f;

  /// Takes in a chunk of `other`; the outputs are joined by what it returns.
  __device__ __forceinline__ Join<true> add(RowSum other, Exponent exponent) {
    const auto join = Join<true>::of(m, other.m, other.l, exponent.huge ? exponent.scale : 1.0f);
    m = join.m;
    l = join.sum(l, other.l);
    return join;
  }
  /// m in log2 units, where it must not overflow.
  __device__ __forceinline__ float log2_maximum(Exponent exponent) const {
    if (!exponent.huge || m == -INFINITY) return m;
    return fminf(fmaxf(m * exponent.scale, -FLT_MAX), FLT_MAX);
  }
};

/// The state of a row whose chunks have all been joined.
__device__ __forceinline__ SoftmaxState<1, true> state_of(const RowSum& sum, Exponent exponent) {
  SoftmaxState<1, true> state;
  state.m[0][0] = sum.log2_maximum(exponent);
  state.l[0][0] = sum.l;
  return state;
}

}  // namespace sparse_attn::cuda::portable

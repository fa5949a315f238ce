// Sums by key block of what wgmma leaves in a warpgroup's registers: a lane holds two rows, and of
// every 8 columns two; four lanes, a quad, hold a row.
#pragma once

namespace sparse_attn::cuda {

constexpr int kFragments = 16;                    // of 8 columns
constexpr int kFragmentColumns = 8 * kFragments;  // that are summed at a time
using FragmentTerms = float[2][kFragments];       // of a lane's two rows, a pair of columns each

/// Adds what the lanes at distance kStep hold, each lane for its half of the kHeld terms.
template <int kStep, int kHeld>
__device__ __forceinline__ void halve_terms(FragmentTerms& terms) {
  constexpr int kKept = kHeld > 1 ? kHeld / 2 : 1;
  constexpr int kOther = kHeld > 1 ? kKept : 0;
  const bool upper = kHeld > 1 && (threadIdx.x & kStep);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float kept = upper ? terms[r][kOther + i] : terms[r][i];
      const float given = upper ? terms[r][i] : terms[r][kOther + i];
      terms[r][i] = kept + __shfl_xor_sync(~0u, given, kStep);
    }
  }
}

/// The sums of kBlocks key blocks, of which each lane of a quad gets some; lanes that get the same
/// one are copies.
template <int kBlocks>
struct BlockSums {
  static_assert(kBlocks <= 2 * kFragments, "a block has four columns at least");
  static constexpr bool kSplit = kBlocks > kFragments;  // a fragment holds two blocks
  static constexpr int kHeld = kSplit ? kFragments / 2 : kBlocks > 2 ? kBlocks / 4 : 1;
  static constexpr int kCopies = kBlocks >= 4 ? 1 : 4 / kBlocks;

  /// Leaves them in the first kHeld terms.
  __device__ __forceinline__ static void add(FragmentTerms& terms) {
    if constexpr (kSplit) {
      halve_terms<1, kFragments>(terms);
    } else {
      constexpr int kTogether = kFragments / kBlocks;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          float together = terms[r][i * kTogether];
#pragma unroll
          for (int j = 1; j < kTogether; ++j) together += terms[r][i * kTogether + j];
          terms[r][i] = together;
        }
      }
      join(terms);
    }
  }
  /// The same from a term of the lane for each block, of up to kFragments.
  __device__ __forceinline__ static void join(FragmentTerms& terms) {
    static_assert(!kSplit);
    halve_terms<2, kBlocks>(terms);
    halve_terms<1, (kBlocks > 1 ? kBlocks / 2 : 1)>(terms);
  }
  /// The block whose sum is the lane's term `i`.
  __device__ __forceinline__ static int block(int i) {
    const int quad = threadIdx.x % 4;
    if (kSplit) return 2 * (quad % 2 * kHeld + i) + quad / 2;
    return (kBlocks > 1 ? quad / 2 * (kBlocks / 2) : 0) + (kBlocks > 2 ? quad % 2 * kHeld : 0) + i;
  }
  __device__ __forceinline__ static bool is_copy() { return threadIdx.x % kCopies != 0; }
};

/// Calls `function(BlockSums<kBlocks>{})` for key blocks of `per_block` columns, 4 at least.
template <typename Function>
__device__ __forceinline__ void with_block_sums(int32_t per_block, const Function& function) {
  if (per_block == 4) return function(BlockSums<32>{});
  switch (per_block) {
    case 8:
      return function(BlockSums<16>{});
    case 16:
      return function(BlockSums<8>{});
    case 32:
      return function(BlockSums<4>{});
    case 64:
      return function(BlockSums<2>{});
    default:
      return function(BlockSums<1>{});
  }
}

}  // namespace sparse_attn::cuda

// The two products of a consumer's 64 rows with tiles of the rings: S = Q K^T and O += P V.
#pragma once

#include "../common/ptx/wgmma.cuh"
#include "config.h"

namespace sparse_attn::cuda::hopper {

template <class C>
class Products {
 public:
  __device__ __forceinline__ Products(SharedStorage<C>& smem, int consumer) {
    constexpr auto kSwizzle =
        C::kRowBytes == 128 ? ptx::Swizzle::k128Bytes : ptx::Swizzle::k64Bytes;
    constexpr uint32_t kEightRows = 8 * C::kRowBytes;
    sQ_ = ptx::wgmma_descriptor(ptx::shared_address(smem.query[0][consumer]), 16, kEightRows,
                                kSwizzle);
    sK_ = ptx::wgmma_descriptor(ptx::shared_address(smem.key[0]), 16, kEightRows, kSwizzle);
    sV_ = ptx::wgmma_descriptor(ptx::shared_address(smem.value[0]), C::BLOCK_KV * C::kRowBytes,
                                kEightRows, kSwizzle);
  }

  /// S of the first keys of a tile, as many as `s` holds, with the Q and K of these slots.
  template <int kCount>
  __device__ __forceinline__ void qk(float (&s)[kCount], int query, int key) const {
    using Product = ptx::Wgmma<C::kDtype, 2 * kCount>;
    constexpr int kSteps = C::kSlabColumns / 16;  // of 16 columns in a slab
    uint64_t q = ptx::wgmma_advance(sQ_, query * C::kConsumers * C::kQueryBytes);
    // Else the descriptors of all steps stay in registers, of which there are too few.
    if constexpr (C::kWide && !C::kPlain) ptx::pin(q);
    uint64_t k = ptx::wgmma_advance(sK_, key * C::kKeyBytes);
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      int slab = i / kSteps * C::kRowBytes, column = i % kSteps * 32;
      Product::ss(s, ptx::wgmma_advance(q, slab * kConsumerRows + column),
                  ptx::wgmma_advance(k, slab * C::BLOCK_KV + column), i > 0);
    }
    ptx::wgmma_commit();
  }

  /// O += P V of the first keys of the tile of this slot.
  template <int kKeys = C::BLOCK_KV>
  __device__ __forceinline__ void pv(float (&o)[C::HEAD_DIM / 2],
                                     const uint32_t (&p)[C::BLOCK_KV / 4], int value) const {
    using Product = ptx::Wgmma<C::kDtype, C::HEAD_DIM>;
    uint64_t v = ptx::wgmma_advance(sV_, value * C::kKeyBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      Product::template rs<true>(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                                 ptx::wgmma_advance(v, i * 16 * C::kRowBytes));
    }
    ptx::wgmma_commit();
  }

 private:
  uint64_t sQ_, sK_, sV_;  // descriptors
};

}  // namespace sparse_attn::cuda::hopper

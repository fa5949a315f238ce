// What a kernel is compiled for: element type, kind and head dim give shape, products and
// fragments.
#pragma once

#include <type_traits>

#include "../common/mma_product.cuh"
#include "../common/partial_rows.cuh"
#include "product_float.cuh"
#include "tile.h"
#include "walk.cuh"

namespace sparse_attn::cuda::portable {

/// The shape that this engine has for a kind and head dim; others bring theirs.
template <KernelKind kKind, int HEAD_DIM>
struct OwnShape {
  static constexpr TileShape kShape = tile_shape(kKind, HEAD_DIM);
};

/// The partial results of kernels that do not cut keys into chunks.
struct NoPartials {};

template <typename T_, KernelKind kKind, int HEAD_DIM_, bool kPartialBlocks = !is_dense(kKind),
          typename Shape = OwnShape<kKind, HEAD_DIM_>>
struct Config {
  using T = T_;
  static constexpr TileShape kShape = Shape::kShape;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_Q = kShape.block_q;
  static constexpr int BLOCK_KV = kShape.block_kv;
  static constexpr int kThreads = kShape.threads();
  static constexpr int kWarpRows = kShape.rows_per_warp();
  static constexpr int kPitch = kShape.pitch();
  static constexpr int MT = kWarpRows / 16;  // fragments: rows of 16, keys and head dim of 8
  static constexpr int NT = BLOCK_KV / 8;
  static constexpr int DT = HEAD_DIM / 8;

  static constexpr bool kFloat = std::is_same_v<T, float>;
  static constexpr bool kGeneral = !is_dense(kKind);
  static constexpr bool kBits = kPartialBlocks;  // lists may have partial blocks
  static constexpr bool kChunks = has_chunks(kKind);
  static constexpr bool kTop = kKind == KernelKind::kTop;
  /// Key tiles are those of a range and nothing else.
  static constexpr bool kRanges = kTop || kKind == KernelKind::kRank;
  /// Exponentials between the second product's steps: measured better at small head dims, where
  /// they weigh more, and worse at large ones.
  static constexpr bool kInterleaved = !kFloat && HEAD_DIM <= 64;
  /// Thread blocks that share a multiprocessor's registers.
  static constexpr int kBlocksPerSm = kThreads > 128 ? 1 : kChunks && HEAD_DIM == 128 ? 3 : 2;

  using Products = std::conditional_t<
      kFloat, FmaProducts<HEAD_DIM, BLOCK_KV, kPitch>,
      TensorCoreProducts<T, HEAD_DIM, BLOCK_KV, MT, kPitch, kShape.query_registers>>;
  using Partials = std::conditional_t<kChunks, PartialRows, NoPartials>;
  using Walk = TileWalk<BLOCK_KV, kShape.granule, kBits>;
  using Step = typename Walk::Step;
  using ScoreFragment = float[MT][NT][4];

  static_assert(kWarpRows % 16 == 0, "a warp holds whole 16-row fragments");
  static_assert(!kFloat || MT == 1, "the FMA products take one fragment of rows");
  static_assert(!kShape.query_registers ||
                    kShape.query_bytes() <=
                        (kShape.slots - (kKind != KernelKind::kRank)) * kShape.slot_bytes(),
                "queries pass through the ring's slots, after the first where keys are there");
};

}  // namespace sparse_attn::cuda::portable

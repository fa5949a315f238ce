// The products of a tile of 64 query vectors and 64 key vectors, as float32 in shared memory:
// tensor cores for half precision, FMA units for the rest.
#pragma once

#include "../common/launch.cuh"
#include "../common/mma_product.cuh"
#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/tile_product.cuh"
#include "../common/types.cuh"
#include "estimate.cuh"

namespace sparse_attn::cuda {

constexpr int kVectorTile = kEstimateRows;
/// Rows of products in shared memory lie this far apart, so that a column's are in all banks.
constexpr int kProductPitch = kVectorTile + 1;

/// Whether this code multiplies half precision on tensor cores. Kernels of products that it does
/// not take are left empty: with_vector_product launches none of them.
#if __CUDA_ARCH__ >= 800
constexpr bool kHasTensorCores = true;
#else
constexpr bool kHasTensorCores = false;
#endif
static __global__ void code_probe() {}

template <typename T_, int HEAD_DIM>
struct MmaVectorProduct {
  using T = T_;
  static constexpr bool kIsLaunched = kHasTensorCores;
  static constexpr int kThreads = 128;
  static constexpr int kPitch = HEAD_DIM * sizeof(T);
  static constexpr int kTileBytes = kVectorTile * kPitch;
  static constexpr int kSharedBytes = 2 * kTileBytes;
  static constexpr int kElements = kChunkBytes / sizeof(T);
  static constexpr int kChunks = kPitch / kChunkBytes;
  using Products = TensorCoreProducts<T, HEAD_DIM, kVectorTile, 1, kPitch, false>;

  uint32_t tiles;  // shared memory: queries, then keys
  bool aligned;    // rows begin at 16 bytes

  /// Copies the rows at `row_at` to shared memory, zeros where there is none.
  template <typename RowAt, typename Part>
  __device__ void load(uint32_t to, int32_t head_dim, const RowAt& row_at, bool copies,
                       const Part& part) const {
    for (int i = threadIdx.x; i < kVectorTile * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const T* from = row_at(row);
      const bool valid = from != nullptr && chunk * kElements < head_dim;
      const uint32_t place = to + swizzled<kPitch>(row, chunk);
      if (aligned && copies) {
        ptx::cp_async_16(place, valid ? from + chunk * kElements : nullptr, valid);
        continue;
      }
      uint4 bits = {0, 0, 0, 0};
      if (valid) bits = load_unaligned(from + chunk * kElements);
      T* elements = reinterpret_cast<T*>(&bits);
      for (int e = 0; e < kElements; ++e) elements[e] = from_float<T>(part(to_float(elements[e])));
      ptx::store_shared_16(place, bits);
    }
  }

  /// Loads the queries where they are the same for every tile of keys.
  __device__ void start(const VectorTile<T>& tile) const {
    if (tile.estimate.slices > 1) return;
    load_queries(tile, 0);
  }
  __device__ void load_queries(const VectorTile<T>& tile, int slice) const {
    load(
        tiles, tile.params.problem.head_dim, [&](int row) { return tile.query_at(row, slice); },
        tile.estimate.kind != Vectors::kExtremes, [&](float x) { return tile.part(x, slice); });
  }

  /// products[row * kProductPitch + column]; all threads call it, and wait before they read.
  __device__ void compute(const VectorTile<T>& tile, float* products) const {
    constexpr int NT = kVectorTile / 8;
    const int warp_row = threadIdx.x / 32 * 16;
    float sum[1][NT][4] = {};
    Products product;
    product.start(tiles + warp_row * kPitch);
    for (int slice = 0; slice < tile.estimate.slices; ++slice) {
      if (tile.estimate.slices > 1) load_queries(tile, slice);
      load(
          tiles + kTileBytes, tile.params.problem.head_dim,
          [&](int column) { return tile.key_at(column, slice); }, true, [](float x) { return x; });
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
      float part[1][NT][4];
      product.scores(part, tiles + kTileBytes);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[0][nt][e] += part[0][nt][e];
      }
      __syncthreads();  // the tiles may be written again
    }
    const int row = warp_row + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        products[(row + e / 2 * 8) * kProductPitch + nt * 8 + column + e % 2] = sum[0][nt][e];
      }
    }
  }
};

template <typename T_>
struct FmaVectorProduct {
  using T = T_;
  static constexpr bool kIsLaunched = !kHasTensorCores || std::is_same_v<T, float>;
  static constexpr int kThreads = kProductThreads;
  static constexpr int kSharedBytes = 0;

  uint32_t tiles;
  bool aligned;

  __device__ void start(const VectorTile<T>&) const {}

  __device__ void compute(const VectorTile<T>& tile, float* products) const {
    const int32_t depth = tile.params.problem.head_dim;
    float sum[kProductRows][kProductRows] = {};
    for (int slice = 0; slice < tile.estimate.slices; ++slice) {
      float part[kProductRows][kProductRows];
      tile_product(
          depth,
          [&](int row, int d) {
            const T* from = d < depth ? tile.query_at(row, slice) : nullptr;
            return from == nullptr ? 0.0f : tile.part(to_float(from[d]), slice);
          },
          [&](int d, int column) {
            const T* from = d < depth ? tile.key_at(column, slice) : nullptr;
            return from == nullptr ? 0.0f : to_float(from[d]);
          },
          part);
      for (int i = 0; i < kProductRows * kProductRows; ++i) {
        sum[i / kProductRows][i % kProductRows] += part[i / kProductRows][i % kProductRows];
      }
    }
    for (int r = 0; r < kProductRows; ++r) {
      for (int c = 0; c < kProductRows; ++c) {
        products[product_row(r) * kProductPitch + product_column(c)] = sum[r][c];
      }
    }
  }
};

template <typename T, typename Function>
Status with_tensor_cores(const SelectParams& params, const Function& function) {
  if (code_level(code_probe) < 80) return function(TypeTag<FmaVectorProduct<T>>{});
  if (params.problem.head_dim <= 64) return function(TypeTag<MmaVectorProduct<T, 64>>{});
  if (params.problem.head_dim <= 128) return function(TypeTag<MmaVectorProduct<T, 128>>{});
  return function(TypeTag<MmaVectorProduct<T, 256>>{});
}

/// Calls `function(TypeTag<Product>{})` with the products for the call's type and device.
template <typename Function>
Status with_vector_product(const SelectParams& params, const Function& function) {
  switch (params.problem.dtype) {
    case Dtype::kFloat16:
      return with_tensor_cores<__half>(params, function);
    case Dtype::kBFloat16:
      return with_tensor_cores<__nv_bfloat16>(params, function);
    default:
      return function(TypeTag<FmaVectorProduct<float>>{});
  }
}

}  // namespace sparse_attn::cuda

// The tile shapes of the portable engine and the choice among them by the shared memory that a
// thread block may have. Plain C++: the chooser is tested on the host for any limit.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace sparse_attn::cuda::portable {

/// Room for a TileState.
constexpr int32_t kStateBytes = 512;

/// A shape of tile: rows of queries and keys, warps, and key or value tiles held at once.
struct TileShape {
  int32_t head_dim = 0;  // at most; smaller ones are padded with zeros
  int32_t block_q = 0, block_kv = 0;
  int32_t warps = 0;
  int32_t slots = 0;             // of the ring of key and value tiles
  int32_t granule = 0;           // keys of a listed block are a multiple
  bool query_registers = false;  // queries move to registers, and the ring takes their room
  int32_t element_bytes = 2;

  SPARSE_ATTN_HD constexpr int32_t rows_per_warp() const { return block_q / warps; }
  SPARSE_ATTN_HD constexpr int32_t threads() const { return 32 * warps; }
  /// Bytes from one row of a tile to the next, in whole 128-byte lines.
  SPARSE_ATTN_HD constexpr int32_t pitch() const {
    return (head_dim * element_bytes + 127) / 128 * 128;
  }
  SPARSE_ATTN_HD constexpr int32_t query_bytes() const { return block_q * pitch(); }
  SPARSE_ATTN_HD constexpr int32_t slot_bytes() const { return block_kv * pitch(); }
  SPARSE_ATTN_HD constexpr int32_t tile_bytes() const {
    return (query_registers ? 0 : query_bytes()) + slots * slot_bytes();
  }
  /// The tiles, and behind them what else a thread block shares (TileState).
  SPARSE_ATTN_HD constexpr int32_t smem_bytes() const { return tile_bytes() + kStateBytes; }
  constexpr bool fits(int32_t smem_limit) const { return smem_bytes() <= smem_limit; }
};

/// The kinds of kernel: dense ones for ranges and lists of large blocks on tensor cores, with tiles
/// of 128 queries or, for lists of lower query blocks, of 64, 32 and 16; `kGeneral` for all of the
/// contract, `kFloat` for float32. The last two fit every device. `kRank` finds the thresholds of a
/// plain top-k and `kTop` is the dense kernel that keeps the scores above them.
enum class KernelKind : int32_t {
  kDense,
  kDense64,
  kDense32,
  kDense16,
  kGeneral,
  kFloat,
  kRank,
  kTop
};

constexpr bool is_dense(KernelKind kind) {
  return kind != KernelKind::kGeneral && kind != KernelKind::kFloat;
}

/// Dense kernels with tiles of fewer than 128 queries.
constexpr bool is_low(KernelKind kind) {
  return kind == KernelKind::kDense64 || kind == KernelKind::kDense32 ||
         kind == KernelKind::kDense16;
}

/// The head dim that a kernel is compiled for: the dense ones of 128 queries are tuned at five, the
/// general ones at three, the low ones at two.
constexpr int32_t head_dim_bucket(KernelKind kind, int32_t head_dim) {
  if (head_dim <= 64) return 64;
  if (kind == KernelKind::kDense && head_dim <= 96) return 96;
  if (head_dim <= 128) return 128;
  return kind == KernelKind::kDense && head_dim <= 192 ? 192 : 256;
}

/// The shape of the kernel that serves a head dim.
constexpr TileShape tile_shape(KernelKind kind, int32_t head_dim) {
  head_dim = head_dim_bucket(kind, head_dim);
  bool small = head_dim <= 128;
  switch (kind) {
    case KernelKind::kDense:  // 32 rows a warp halve the reads of keys, where registers allow
      if (head_dim == 64) return {64, 128, 128, 4, 3, 64, false, 2};
      return {head_dim, 128, 64, small ? 4 : 8, 3, 64, false, 2};
    case KernelKind::kDense64:
      return {head_dim, 64, 64, 2, 3, 64, false, 2};
    case KernelKind::kDense32:  // few keys a tile: more thread blocks share a multiprocessor
      return {head_dim, 32, 48, 2, 3, 16, false, 2};
    case KernelKind::kDense16:
      return {head_dim, 16, 32, 1, 3, 16, false, 2};
    case KernelKind::kTop:  // no lists: a tile is one granule
      if (head_dim == 64) return {64, 128, 128, 4, 3, 128, false, 2};
      return {head_dim, 128, 64, small ? 4 : 8, 3, 64, false, 2};
    case KernelKind::kRank:
      if (head_dim == 64) return {64, 128, 128, 4, 2, 128, true, 2};
      return {head_dim, 128, 64, small ? 4 : 8, 2, 64, true, 2};
    case KernelKind::kGeneral:
      return {head_dim, 64, small ? 64 : 16, 4, 3, 16, small, 2};
    default:
      if (head_dim == 64) return {64, 64, 32, 4, 3, 16, false, 4};
      if (head_dim == 128) return {128, 64, 16, 4, 3, 16, false, 4};
      return {256, 32, 8, 2, 3, 8, false, 4};
  }
}

/// Bytes that the ranking pass of top-k holds for each query row, behind the tiles.
constexpr int32_t kRankRowBytes = 564;

/// Whether both kernels of a plain top-k fit.
constexpr bool topk_fits(int32_t head_dim, int32_t smem_limit) {
  TileShape rank = tile_shape(KernelKind::kRank, head_dim);
  return rank.fits(smem_limit - kRankRowBytes * rank.block_q) &&
         tile_shape(KernelKind::kTop, head_dim).fits(smem_limit);
}

/// The dense kernel for query blocks of `block_q` rows and key blocks of `block_kv`, or the general
/// one where it takes them better.
constexpr KernelKind kernel_for_blocks(int32_t block_q, int32_t block_kv, int32_t head_dim) {
  auto padded = [block_q](int32_t tile) { return (block_q + tile - 1) / tile * tile; };
  bool large_keys = block_kv % 64 == 0;
  if (large_keys && padded(128) <= padded(64)) return KernelKind::kDense;
  if (head_dim > 128) return KernelKind::kGeneral;
  if (2 * padded(16) <= padded(32)) return KernelKind::kDense16;
  if (padded(32) < padded(64)) return KernelKind::kDense32;
  return large_keys ? KernelKind::kDense64 : KernelKind::kGeneral;
}

/// Which kernel serves a case within `smem_limit` bytes of shared memory a thread block; `kind` is
/// the one that the pattern asks for. Devices that have no room for the dense kernel of 128 queries
/// may be older than the instructions of them all.
constexpr KernelKind choose_kernel(Dtype dtype, KernelKind kind, int32_t head_dim,
                                   int32_t smem_limit) {
  if (dtype == Dtype::kFloat32) return KernelKind::kFloat;
  bool fits = tile_shape(KernelKind::kDense, head_dim).fits(smem_limit);
  return fits ? kind : KernelKind::kGeneral;
}

}  // namespace sparse_attn::cuda::portable

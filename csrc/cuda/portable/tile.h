// The tile shapes of the portable engine and the choice among them by the shared memory that a
// thread block may have. Plain C++: the chooser is tested on the host for any limit.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace sparse_attn::cuda::portable {

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
  /// Room for a TileState. No more than that: of 32 rows five thread blocks share a multiprocessor
  /// with a hundred bytes to spare.
  SPARSE_ATTN_HD constexpr int32_t state_bytes() const { return 416 + 16 * warps; }
  /// The tiles, and after them what else a thread block shares.
  SPARSE_ATTN_HD constexpr int32_t smem_bytes() const { return tile_bytes() + state_bytes(); }
  constexpr bool fits(int32_t smem_limit) const { return smem_bytes() <= smem_limit; }
};

/// The kinds of kernel: dense ones for ranges and lists of large blocks on tensor cores, with tiles
/// of 128 queries or, for lists of lower query blocks, of 64, 32 and 16; `kGeneral` for all of the
/// contract, `kFloat` for float32, `kFloatChunks` where a sequence of it may have few rows and
/// `kFloatLow` where all have very few. The last four fit every device. `kRank` finds the
/// thresholds of a plain top-k and `kTop` is the dense kernel that keeps the scores above them.
enum class KernelKind : int32_t {
  kDense,
  kDense64,
  kDense32,
  kDense16,
  kGeneral,
  kFloat,
  kFloatChunks,
  kFloatLow,
  kRank,
  kTop
};

/// Kernels that cut the keys of few rows into chunks.
constexpr bool has_chunks(KernelKind kind) {
  return kind == KernelKind::kFloatChunks || kind == KernelKind::kFloatLow;
}

/// Kernels of float32, with the same bits for a row of one chunk.
constexpr bool is_float(KernelKind kind) { return kind == KernelKind::kFloat || has_chunks(kind); }

/// Kernels of sm_80 on that take plain scores of aligned rows alone.
constexpr bool is_dense(KernelKind kind) { return kind != KernelKind::kGeneral && !is_float(kind); }

/// A kernel that is compiled, for half precision or, of is_float, for float32.
struct CompiledTile {
  KernelKind kind;
  TileShape shape;
};

/// All of them, each kind's by head dim. 32 rows a warp halve the reads of keys, where registers
/// allow; tiles of few keys let more thread blocks share a multiprocessor; top-k takes no lists, so
/// that its tile is one granule.
constexpr CompiledTile kTiles[] = {
    //   head dim, queries, keys, warps, slots, granule, queries in registers, bytes of an element
    {KernelKind::kDense, {64, 128, 128, 4, 3, 64, false, 2}},
    {KernelKind::kDense, {96, 128, 64, 4, 3, 64, false, 2}},
    {KernelKind::kDense, {128, 128, 64, 4, 3, 64, false, 2}},
    {KernelKind::kDense, {192, 128, 64, 8, 3, 64, false, 2}},
    {KernelKind::kDense, {256, 128, 64, 8, 3, 64, false, 2}},
    {KernelKind::kDense64, {64, 64, 64, 2, 3, 64, false, 2}},
    {KernelKind::kDense64, {128, 64, 64, 2, 3, 64, false, 2}},
    {KernelKind::kDense32, {64, 32, 48, 2, 3, 16, false, 2}},
    {KernelKind::kDense32, {128, 32, 48, 2, 3, 16, false, 2}},
    {KernelKind::kDense16, {64, 16, 32, 1, 3, 16, false, 2}},
    {KernelKind::kDense16, {128, 16, 32, 1, 3, 16, false, 2}},
    {KernelKind::kGeneral, {64, 64, 64, 4, 3, 16, true, 2}},
    {KernelKind::kGeneral, {128, 64, 64, 4, 3, 16, true, 2}},
    {KernelKind::kGeneral, {256, 64, 16, 4, 3, 16, false, 2}},
    {KernelKind::kFloat, {64, 64, 32, 4, 3, 16, false, 4}},
    {KernelKind::kFloat, {128, 64, 16, 4, 3, 16, false, 4}},
    {KernelKind::kFloat, {256, 32, 8, 2, 3, 8, false, 4}},
    {KernelKind::kFloatChunks, {64, 64, 32, 4, 3, 16, false, 4}},
    {KernelKind::kFloatChunks, {128, 64, 16, 4, 3, 16, false, 4}},
    {KernelKind::kFloatChunks, {256, 32, 8, 2, 3, 8, false, 4}},
    {KernelKind::kFloatLow, {64, 16, 32, 1, 3, 16, false, 4}},
    {KernelKind::kFloatLow, {128, 16, 16, 1, 3, 16, false, 4}},
    {KernelKind::kFloatLow, {256, 16, 8, 1, 3, 8, false, 4}},
    {KernelKind::kRank, {64, 128, 64, 4, 2, 64, true, 2}},
    {KernelKind::kRank, {128, 128, 64, 4, 2, 64, true, 2}},
    {KernelKind::kRank, {256, 128, 64, 8, 2, 64, true, 2}},
    {KernelKind::kTop, {64, 128, 128, 4, 3, 128, false, 2}},
    {KernelKind::kTop, {128, 128, 64, 4, 3, 64, false, 2}},
    {KernelKind::kTop, {256, 128, 64, 8, 3, 64, false, 2}},
};

/// Whether a kind has a kernel for a head dim.
constexpr bool is_compiled(KernelKind kind, int32_t head_dim) {
  for (const CompiledTile& tile : kTiles) {
    if (tile.kind == kind && head_dim <= tile.shape.head_dim) return true;
  }
  return false;
}

/// The kernel of kTiles that serves a head dim: the first one that is compiled for as many.
constexpr int32_t tile_index(KernelKind kind, int32_t head_dim) {
  int32_t index = 0;
  while (kTiles[index].kind != kind || kTiles[index].shape.head_dim < head_dim) ++index;
  return index;
}

constexpr TileShape tile_shape(KernelKind kind, int32_t head_dim) {
  return kTiles[tile_index(kind, head_dim)].shape;
}

/// Bytes that the passes of a plain top-k hold for each query row, after the tiles.
constexpr int32_t kRankRowBytes = 560;
constexpr int32_t kTopRowBytes = 4;

/// Whether both kernels of a plain top-k fit.
constexpr bool topk_fits(int32_t head_dim, int32_t smem_limit) {
  TileShape rank = tile_shape(KernelKind::kRank, head_dim);
  TileShape top = tile_shape(KernelKind::kTop, head_dim);
  return rank.fits(smem_limit - kRankRowBytes * rank.block_q) &&
         top.fits(smem_limit - kTopRowBytes * top.block_q);
}

/// The dense kernel for query blocks of `block_q` rows and key blocks of `block_kv`, or the general
/// one where it takes them better.
constexpr KernelKind kernel_for_blocks(int32_t block_q, int32_t block_kv, int32_t head_dim) {
  auto padded = [block_q](int32_t tile) { return (block_q + tile - 1) / tile * tile; };
  bool large_keys = block_kv % 64 == 0;
  if (large_keys && padded(128) <= padded(64)) return KernelKind::kDense;
  if (!is_compiled(KernelKind::kDense64, head_dim)) return KernelKind::kGeneral;
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

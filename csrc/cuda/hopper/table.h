// The kernels of the Hopper engine, one table: CMake reads it to write the files that compile them,
// engine.cu chooses from it, and capability.cpp tells from it what is served. Plain C++.
#pragma once

#include <cstdint>

/// Bit h / 16: the kernels of head dim h are built. CMake says which where SPARSE_ATTN_HEAD_DIMS
/// asks for some; else all are.
#ifndef SPARSE_ATTN_HEAD_DIM_BITS
#define SPARSE_ATTN_HEAD_DIM_BITS ~0u
#endif

namespace sparse_attn::cuda::hopper {

constexpr int32_t kConsumerRows = 64;  // of a wgmma

/// What a kernel is compiled for. A plain one serves ranges in which each row's window starts one
/// key later than that of the row above, of scores that are only scaled: full, causal, band,
/// dilated. kTop is a plain one that keeps the scores above thresholds: the second pass of token
/// top-k. A listed one serves lists, a biased one scores that attn_mask or ALiBi joins, a general
/// one every other call. Sequences that differ in length have kernels of their own, whose keys may
/// lie in pages: a ragged one, and one for lists. What few queries of a plain call take is kFew's,
/// a plain one of chunks: little code, since they run for microseconds. A range one is a general
/// one of scores that are only scaled, as under sinks, global rows and bounds, with two thirds of
/// its code: where query tiles are short, code that is fetched shows.
enum class KernelKind {
  kPlain,
  kGeneral,
  kListed,
  kTop,
  kBiased,
  kRagged,
  kRaggedListed,
  kFew,
  kRange
};

/// The kernels that a head dim may have.
enum class Tiling : int32_t {
  kWidePlain,
  kPlain,
  kGeneral,
  kListed,
  kHalfListed,
  kTop,
  kBiased,
  kRagged,
  kRaggedListed,
  kFew,
  kRange
};
constexpr int32_t kTilings = 11;

/// A kind, and how many consumers of 64 query rows work on a tile.
struct TilingShape {
  KernelKind kind;
  int32_t consumers;
};
constexpr TilingShape kTilingShapes[kTilings] = {
    {KernelKind::kPlain, 3},  {KernelKind::kPlain, 2},  {KernelKind::kGeneral, 2},
    {KernelKind::kListed, 2}, {KernelKind::kListed, 1}, {KernelKind::kTop, 2},
    {KernelKind::kBiased, 2}, {KernelKind::kRagged, 2}, {KernelKind::kRaggedListed, 2},
    {KernelKind::kFew, 2},    {KernelKind::kRange, 2},
};
constexpr TilingShape shape_of(Tiling tiling) {
  return kTilingShapes[static_cast<int32_t>(tiling)];
}

struct HeadDimKernels {
  int32_t head_dim = 0;         // columns that are multiplied; those that a call lacks are zeros
  int32_t keys[kTilings] = {};  // of a key tile; 0: there is no such kernel

  constexpr int32_t keys_of(Tiling tiling) const { return keys[static_cast<int32_t>(tiling)]; }
  constexpr bool is_built() const { return SPARSE_ATTN_HEAD_DIM_BITS >> head_dim / 16 & 1; }
  /// Whether this build has the kernel.
  constexpr bool has(Tiling tiling) const { return is_built() && keys_of(tiling) > 0; }
};

/// By head dim, ascending. Keys of a tile are what registers (scores, probabilities and output) and
/// shared memory (queries, two tiles of K, two of V) leave room for; those of lists are powers of
/// two, so that blocks divide them. What a row lacks, the next one that has it serves. Each row
/// ends with its slabs (config.h); CMake reads the rows, a line each.
constexpr HeadDimKernels kTable[] = {
    // head dim, keys of: three consumers, two, general, lists, lists of low query blocks, top-k,
    // biased, ragged, ragged lists, few queries, ranges
    {32, {128, 0, 128, 0, 0, 0, 0, 0, 0, 0, 0}},                    // 1 x 32
    {48, {128, 0, 128, 0, 0, 0, 0, 0, 0, 0, 0}},                    // 1 x 64
    {64, {128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128}},  // 1 x 64
    {80, {96, 128, 128, 0, 0, 0, 0, 0, 0, 0, 0}},                   // 3 x 32
    {96, {96, 128, 128, 128, 128, 0, 0, 0, 0, 0, 0}},               // 3 x 32
    {112, {0, 128, 128, 0, 0, 0, 0, 0, 0, 0, 0}},                   // 2 x 64
    {128, {0, 128, 128, 128, 128, 128, 96, 128, 128, 128, 128}},    // 2 x 64
    {160, {0, 128, 128, 0, 0, 0, 0, 128, 0, 0, 0}},                 // 5 x 32
    {192, {0, 112, 112, 64, 0, 0, 0, 112, 0, 0, 0}},                // 3 x 64
    {224, {0, 96, 80, 0, 0, 0, 0, 0, 0, 0, 0}},                     // 7 x 32
    {256, {0, 80, 80, 64, 0, 0, 0, 80, 0, 0, 0}},                   // 4 x 64
};

/// The kernels of a head dim; none where the table has no row of it.
constexpr HeadDimKernels kernels_of(int32_t head_dim) {
  for (const HeadDimKernels& row : kTable) {
    if (row.head_dim == head_dim) return row;
  }
  return {};
}

/// The head dim of the kernel that serves a call: the least that is built, from the call's on; 0
/// where none is.
constexpr int32_t built_head_dim(int32_t head_dim, Tiling tiling) {
  for (const HeadDimKernels& row : kTable) {
    if (row.head_dim >= head_dim && row.has(tiling)) return row.head_dim;
  }
  return 0;
}

/// The kernel of a plain call: of three consumers or of two, whichever has the lesser head dim.
/// Where both have one the engine chooses by lengths.
struct PlainKernels {
  int32_t wide = 0, narrow = 0;  // head dims; 0: not served
};
constexpr PlainKernels plain_kernels(int32_t head_dim) {
  const int32_t wide = built_head_dim(head_dim, Tiling::kWidePlain);
  const int32_t narrow = built_head_dim(head_dim, Tiling::kPlain);
  if (wide == narrow) return {wide, narrow};
  return narrow == 0 || (wide != 0 && wide < narrow) ? PlainKernels{wide, 0}
                                                     : PlainKernels{0, narrow};
}

/// Keys of a tile of the kernel that serves a call; 0 where there is none.
constexpr int32_t tile_keys(int32_t head_dim, Tiling tiling) {
  return kernels_of(built_head_dim(head_dim, tiling)).keys_of(tiling);
}

/// Whether the ragged kernel takes keys in the tiles of every plain one, and so gives its bits.
constexpr bool ragged_is_plain(int32_t head_dim) {
  const int32_t keys = tile_keys(head_dim, Tiling::kRagged);
  const PlainKernels plain = plain_kernels(head_dim);
  return (plain.wide == 0 || kernels_of(plain.wide).keys_of(Tiling::kWidePlain) == keys) &&
         (plain.narrow == 0 || kernels_of(plain.narrow).keys_of(Tiling::kPlain) == keys);
}

/// Whether the ragged kernel of a head dim sums the chunks that a sequence's own call would have.
constexpr bool ragged_folds(int32_t head_dim) { return head_dim <= 128; }

/// The largest head dim that is served; 0 where none is.
constexpr int32_t largest_head_dim(Tiling tiling) {
  int32_t largest = 0;
  for (const HeadDimKernels& row : kTable) {
    if (row.has(tiling)) largest = row.head_dim;
  }
  return largest;
}

}  // namespace sparse_attn::cuda::hopper

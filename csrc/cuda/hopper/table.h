// The kernels of the Hopper engine, one list: CMake reads it to write the files that compile them,
// engine.cu takes the first that serves a call, and capability.cpp tells from it what is served.
// Plain C++.
#pragma once

#include <cstdint>

#include "../../feature_set.h"

/// Bit h / 16: the kernels of head dim h are built. CMake says which where SPARSE_ATTN_HEAD_DIMS
/// asks for some; else all are.
#ifndef SPARSE_ATTN_HEAD_DIM_BITS
#define SPARSE_ATTN_HEAD_DIM_BITS ~0u
#endif

namespace sparse_attn::cuda::hopper {

constexpr int32_t kConsumerRows = 64;  // of a wgmma

// ---- Features: what a kernel has code for -------------------------------------------------------

/// Ranges in which each row's window starts one key later than that of the row above, of scores
/// that are only scaled: full, causal, band, dilated.
constexpr Features kPlainCalls =
    Features::of(Feature::kQueryOffsets, Feature::kSinkLogits, Feature::kWindow, Feature::kDilation,
                 Feature::kValueDim);
/// The same of rows that see a range of the keys, whose tiles may hold rows past the valid ones.
constexpr Features kCutCalls = kPlainCalls.with(Features::of(Feature::kKeyBounds));
/// Plain calls beside leading keys that all rows see, sinks: where query tiles are short, code that
/// is fetched shows.
constexpr Features kSinkCalls = kPlainCalls.with(Features::of(Feature::kLead));
/// Ranges without strided columns, of scores that are only scaled; of a general kernel's code two
/// thirds.
constexpr Features kRangeCalls = kPlainCalls.with(
    Features::of(Feature::kKeyBounds, Feature::kKeyOrigins, Feature::kLead, Feature::kGlobalRows));
/// Any ranges.
constexpr Features kStridedCalls = kRangeCalls.with(Features::of(Feature::kColumns));
constexpr Features kScoreCalls = Features::of(Feature::kSoftcap, Feature::kOddScale);
constexpr Features kScoredCalls = kStridedCalls.with(kScoreCalls);
constexpr Features kGeneralCalls =
    kScoredCalls.with(Features::of(Feature::kGlobalIndices, Feature::kFloat8Keys));
/// Scores that attn_mask or ALiBi joins.
constexpr Features kBiases = Features::of(Feature::kMask, Feature::kAlibi);
constexpr Features kBiasedCalls = kScoredCalls.with(kBiases);
/// Lists of blocks that are seen whole, of scores that are only scaled. Lists are short as a rule,
/// so the code that other calls need costs these 3 to 33 % even where it is jumped over.
constexpr Features kPlainListedCalls =
    Features::of(Feature::kList, Feature::kQueryOffsets, Feature::kSinkLogits, Feature::kValueDim);
/// Any lists, of scores that are only scaled; ...
constexpr Features kListedCalls =
    kPlainListedCalls.with(Features::of(Feature::kPartialBlocks, Feature::kKeyBounds));
/// ... of any scores, in half tiles and in whole ones.
constexpr Features kScoredHalfListedCalls = kListedCalls.with(kScoreCalls);
constexpr Features kScoredListedCalls =
    kScoredHalfListedCalls.with(Features::of(Feature::kFloat8Keys));
constexpr Features kBiasedListedCalls = kScoredHalfListedCalls.with(kBiases);
/// Scores above thresholds: the second pass of token top-k.
constexpr Features kTopCalls =
    Features::of(Feature::kTopK, Feature::kQueryOffsets, Feature::kSinkLogits);
/// Sequences that differ in length, whose keys may lie in pages.
constexpr Features kLengths = Features::of(Feature::kPacked, Feature::kUsedKeys, Feature::kPaged);
constexpr Features kPlainRaggedCalls = kPlainCalls.with(kLengths);
constexpr Features kFewRaggedCalls =
    kLengths.with(Features::of(Feature::kQueryOffsets, Feature::kSinkLogits, Feature::kWindow,
                               Feature::kValueDim, Feature::kFloat8Keys));
constexpr Features kRaggedCalls = kPlainRaggedCalls.with(
    Features::of(Feature::kKeyOrigins, Feature::kLead, Feature::kOddScale, Feature::kFloat8Keys));
constexpr Features kScoredRaggedCalls =
    kRaggedCalls.with(Features::of(Feature::kSoftcap, Feature::kColumns, Feature::kGlobalRows));
constexpr Features kPlainRaggedListedCalls = kPlainListedCalls.with(kLengths);
constexpr Features kRaggedListedCalls =
    kPlainRaggedListedCalls.with(kScoreCalls)
        .with(Features::of(Feature::kPartialBlocks, Feature::kFloat8Keys));

/// Which query tiles have their keys cut into chunks (key_split.h): none; of sequences that differ
/// in length those whose own calls would be cut, whose chunks a thread block takes in turn; those
/// with global rows; or all.
enum class Split : int32_t { kNone, kSequences, kGlobalRows, kAll };

// ---- The list -----------------------------------------------------------------------------------

/// The head dims of kernels: columns that are multiplied. Those that a call lacks are zeros. In
/// slabs (config.h) they are 1 x 32, 1 x 64, 1 x 64, 3 x 32, 3 x 32, 2 x 64, 2 x 64, 5 x 32, 3 x
/// 64, 7 x 32, 4 x 64.
constexpr int32_t kHeadDims[] = {32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256};
constexpr int32_t kNumHeadDims = sizeof(kHeadDims) / sizeof(int32_t);

/// Columns of a tile in shared memory, of which products read the first `head_dim`.
constexpr int32_t columns_of(int32_t head_dim) { return (head_dim + 31) / 32 * 32; }
/// Whether shared memory has no room for a sum of chunks of so many columns, which the workspace
/// then has.
SPARSE_ATTN_HD constexpr bool is_wide(int32_t columns) { return columns > 128; }
/// Whether the keys of many rows are cut too (key_split.h): where thread blocks may sum chunks in
/// shared memory, and no kernel has higher tiles, which would be faster.
SPARSE_ATTN_HD constexpr bool splits_many_rows(int32_t columns) {
  return columns > 96 && !is_wide(columns);
}
/// Columns of the slabs that make so many.
constexpr int32_t slab_of(int32_t columns) { return columns % 64 == 0 ? 64 : 32; }

/// Whether this build has the kernels of a head dim.
constexpr bool is_built(int32_t head_dim) { return SPARSE_ATTN_HEAD_DIM_BITS >> head_dim / 16 & 1; }

/// What a call asks of a kernel.
struct Wanted {
  Features features;
  Split split = Split::kNone;
  bool raw_values = false;  // V may hold rows of keys that do not exist
  int32_t block_q = 0;      // of a list, which is a multiple of the tile's rows
};

/// Whether calls whose plain kernel has this head dim follow maxima lazily (softmax.cuh): with any
/// features but biases and scales that take_maxima_off() is for, since bits depend on it. Where
/// consumers take turns, below, the vote that it takes is waited for; above it was not faster.
constexpr int32_t kMostEager = 96, kMostLazy = 192;
constexpr bool is_lazy(int32_t head_dim) { return head_dim > kMostEager && head_dim <= kMostLazy; }

/// Kernels of a head dim that one file compiles.
enum class Part : int32_t { kWhole, kBiased, kRagged };

struct Kernel {
  int32_t consumers;           // of 64 query rows, that work on a tile
  Features accepts;            // for which it has code
  Split splits;                // the most chunks that it takes
  int32_t keys[kNumHeadDims];  // of a key tile, by head dim; 0: there is no such kernel

  constexpr int32_t rows() const { return consumers * kConsumerRows; }
  /// Whether all masks slide by a column a row.
  constexpr bool is_plain() const {
    return accepts.within(kPlainRaggedCalls.with(kTopCalls).with(kFewRaggedCalls));
  }
  constexpr bool takes_raw_values() const {
    return !accepts.within(kPlainCalls.with(kPlainListedCalls));
  }
  constexpr bool is_ragged() const { return accepts.any(kLengths); }
  constexpr bool is_listed() const { return accepts.has(Feature::kList); }
  constexpr bool is_biased() const { return accepts.any(kBiases); }
  constexpr bool is_top() const { return accepts.has(Feature::kTopK); }
  constexpr Part part() const {
    return is_biased() ? Part::kBiased : is_ragged() ? Part::kRagged : Part::kWhole;
  }
  /// Whether query heads that see the same keys share a tile.
  constexpr bool packs() const { return splits == Split::kAll && !is_biased(); }
  /// Whether thread blocks may sum the chunks of a tile; cut calls of wide heads have no registers
  /// for it.
  constexpr bool folds(int32_t head_dim) const {
    const bool cut = accepts.within(kCutCalls) && !is_wide(head_dim);
    return !is_listed() && (is_ragged() ? splits != Split::kNone : packs() && (is_plain() || cut));
  }

  /// Keys of a tile of a built kernel; 0 where there is none.
  constexpr int32_t keys_at(int32_t head_dim) const {
    for (int32_t i = 0; i < kNumHeadDims; ++i) {
      if (kHeadDims[i] == head_dim) return is_built(head_dim) ? keys[i] : 0;
    }
    return 0;
  }
  /// The least head dim of a built kernel, from one on; 0 where there is none.
  constexpr int32_t head_dim_from(int32_t least) const {
    for (int32_t i = 0; i < kNumHeadDims; ++i) {
      if (kHeadDims[i] >= least && keys_at(kHeadDims[i]) > 0) return kHeadDims[i];
    }
    return 0;
  }
  /// Whether its tiles are dealt on the device, which knows the lengths (deal.h).
  constexpr bool deals() const { return is_ragged() && splits == Split::kAll; }
  /// Kernels of lists, of thresholds and of lengths serve no call without those, and those whose
  /// tiles are dealt no other.
  constexpr bool serves(const Wanted& wanted) const {
    const Features features = wanted.features;
    return features.within(accepts) && wanted.split <= splits &&
           (!deals() || wanted.split == splits) && (!wanted.raw_values || takes_raw_values()) &&
           wanted.block_q % rows() == 0 && is_listed() == features.has(Feature::kList) &&
           is_top() == features.has(Feature::kTopK) && is_ragged() == features.any(kLengths);
  }
};

/// Of kernels that serve a call with the same head dim the first one does. Keys of a tile are what
/// registers (scores, probabilities and output) and shared memory (queries, two tiles of K, two of
/// V) leave room for; those of lists are powers of two, so that blocks divide them.
constexpr Kernel kKernels[] = {
    {3, kPlainCalls, Split::kNone, {128, 128, 128, 112, 112, 0, 0, 0, 0, 0, 0}},
    {2, kPlainCalls, Split::kNone, {0, 0, 128, 112, 112, 128, 128, 128, 112, 96, 80}},
    // Few queries: little code, since it runs for microseconds.
    {2, kPlainCalls, Split::kAll, {128, 128, 128, 112, 112, 128, 128, 128, 112, 96, 80}},
    {2, kSinkCalls, Split::kNone, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    // Documents and padded texts: what code lies unused between theirs costs short ones a third.
    {2, kCutCalls, Split::kNone, {128, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    {2, kRangeCalls, Split::kGlobalRows, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    {2, kStridedCalls, Split::kGlobalRows, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    {2, kScoredCalls, Split::kGlobalRows, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    // The same of few rows, as plain calls are split: where the device alone knows where queries
    // stand, which bits do not tell.
    {2, kCutCalls, Split::kAll, {0, 0, 128, 112, 112, 128, 128, 0, 0, 96, 0}},
    {2, kGeneralCalls, Split::kAll, {128, 128, 128, 128, 128, 128, 128, 128, 112, 80, 80}},
    {2, kBiasedCalls, Split::kAll, {0, 0, 128, 0, 0, 0, 96, 0, 64, 0, 64}},
    {2, kPlainListedCalls, Split::kNone, {0, 0, 128, 0, 128, 0, 128, 0, 64, 0, 64}},
    {2, kListedCalls, Split::kNone, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    {2, kScoredListedCalls, Split::kNone, {0, 0, 128, 0, 128, 0, 128, 0, 64, 0, 64}},
    // Of query blocks of 64 rows.
    {1, kPlainListedCalls, Split::kNone, {0, 0, 128, 0, 128, 0, 128, 0, 64, 0, 0}},
    {1, kListedCalls, Split::kNone, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    {1, kScoredHalfListedCalls, Split::kNone, {0, 0, 128, 0, 128, 0, 128, 0, 64, 0, 0}},
    {1, kBiasedListedCalls, Split::kNone, {0, 0, 64, 0, 0, 0, 64, 0, 0, 0, 0}},
    {2, kTopCalls, Split::kNone, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    // Code that sums chunks costs 2 to 9 %, and leaves no registers for three consumers.
    {3, kPlainRaggedCalls, Split::kNone, {0, 0, 128, 0, 0, 0, 0, 0, 0, 0, 0}},
    {2, kPlainRaggedCalls, Split::kNone, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    // With the tiles of plain calls. At 192 and 256 they win 0 to 2 %; at 160 none was timed.
    {2, kPlainRaggedCalls, Split::kSequences, {0, 0, 128, 112, 112, 0, 128, 0, 0, 96, 0}},
    {2, kRaggedCalls, Split::kSequences, {0, 0, 128, 0, 0, 0, 128, 128, 112, 0, 80}},
    {2, kScoredRaggedCalls, Split::kSequences, {0, 0, 128, 0, 0, 0, 128, 128, 112, 0, 80}},
    // Few query tiles, or those of several heads, which are dealt.
    {2, kFewRaggedCalls, Split::kAll, {0, 0, 128, 112, 112, 0, 128, 128, 112, 96, 80}},
    {2, kPlainRaggedListedCalls, Split::kNone, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
    {2, kRaggedListedCalls, Split::kNone, {0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 0}},
};
constexpr int32_t kNumKernels = sizeof(kKernels) / sizeof(Kernel);

/// Whether this build has such kernels of a head dim.
constexpr bool has_part(Part part, int32_t head_dim) {
  for (const Kernel& kernel : kKernels) {
    if (kernel.part() == part && kernel.keys_at(head_dim) > 0) return true;
  }
  return false;
}

// ---- Choosing -----------------------------------------------------------------------------------

/// A kernel of the list at a head dim of its own.
struct Entry {
  int32_t kernel = 0;
  int32_t head_dim = 0;  // 0: none serves the call

  constexpr bool exists() const { return head_dim > 0; }
  constexpr int32_t keys() const { return kKernels[kernel].keys_at(head_dim); }
};

/// The kernel that serves a call: of the least head dim that is built, from the call's on.
constexpr Entry find_kernel(int32_t head_dim, const Wanted& wanted) {
  Entry found;
  for (int32_t k = 0; k < kNumKernels; ++k) {
    if (!kKernels[k].serves(wanted)) continue;
    const int32_t own = kKernels[k].head_dim_from(head_dim);
    if (own > 0 && (!found.exists() || own < found.head_dim)) found = {k, own};
  }
  return found;
}

/// Whether calls have the same bits from both kernels, since zero columns change none: those that
/// are not split where they have many rows, ...
constexpr bool are_alike_unsplit(Entry a, Entry b) {
  return a.keys() == b.keys() && is_wide(a.head_dim) == is_wide(b.head_dim);
}
/// ... and all.
constexpr bool are_alike(Entry a, Entry b) {
  return are_alike_unsplit(a, b) && splits_many_rows(a.head_dim) == splits_many_rows(b.head_dim);
}

/// The largest head dim that is served; 0 where none is.
constexpr int32_t largest_head_dim(const Wanted& wanted) {
  int32_t largest = 0;
  for (int32_t head_dim : kHeadDims) {
    if (find_kernel(head_dim, wanted).head_dim == head_dim) largest = head_dim;
  }
  return largest;
}

/// Whether rows see a range of the keys by scores that are only scaled, whatever their lengths.
SPARSE_ATTN_HD constexpr bool is_cut_call(Features features) {
  constexpr Features kOwn = kCutCalls.with(kLengths);
  return features.within(kOwn);
}

/// The kernel whose tiles chunks are made of: of plain calls that of few queries, whose tiles plain
/// sequences have too; else the general one, or under biases theirs.
constexpr Entry find_chunked(int32_t head_dim, Features features) {
  if (is_cut_call(features)) {
    return find_kernel(head_dim, {Features(), Split::kAll});
  }
  return find_kernel(head_dim, {features.any(kBiases) ? kBiases : kGeneralCalls, Split::kAll});
}

/// Whether all kernels of chunks that serve calls of a kind have the same tiles. Calls on 8-bit
/// keys are dealt at the head dims at which another kernel takes their whole tiles (may_deal).
constexpr bool chunks_are_alike() {
  for (const Kernel& kernel : kKernels) {
    if (kernel.splits <= Split::kSequences) continue;
    for (int32_t head_dim : kHeadDims) {
      const int32_t keys = kernel.keys_at(head_dim);
      if (keys == 0) continue;
      const Features coarse = kernel.accepts.without(Features::of(Feature::kFloat8Keys));
      if (keys != find_chunked(head_dim, coarse).keys()) return false;
      const bool dealt =
          kernel.deals() && find_kernel(head_dim, {kernel.accepts}).head_dim == head_dim;
      if (dealt && keys != find_chunked(head_dim, kernel.accepts).keys()) return false;
    }
  }
  return true;
}
static_assert(chunks_are_alike(), "a row's bits depend on chunks, so on no choice of kernel");

/// Whether all kernels that may serve a plain call without chunks take so many keys a tile.
constexpr bool plain_tiles_have(int32_t head_dim, int32_t keys) {
  const int32_t own = find_kernel(head_dim, {}).head_dim;
  for (const Kernel& kernel : kKernels) {
    const bool may = kernel.serves({}) && kernel.is_plain() && kernel.splits == Split::kNone;
    const int32_t has = may ? kernel.keys_at(own) : keys;
    if (has != 0 && has != keys) return false;
  }
  return true;
}

}  // namespace sparse_attn::cuda::hopper

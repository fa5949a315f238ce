// What a call asks of an engine, as a set. call_features.h computes it once for a call; an engine
// or a kernel lists what it accepts, so that a feature which nobody has listed is refused and never
// taken for plain. To add one: its line here, its rule in call_features.h, its name in
// capability.cpp, and the engines that serve it.
#pragma once

#include <cstdint>

#include "interval.h"

namespace sparse_attn {

enum class Feature : int32_t {
  kFloat32,        // dtype
  kUnaligned,      // pointers or strides that are no multiples of 16 bytes
  kMask,           // attn_mask
  kKeyBounds,      // key_bounds
  kQueryOffsets,   // query_offset given as a tensor
  kKeyOrigins,     // key_origin, with a pattern that counts from it
  kSoftcap,        // softcap
  kOddScale,       // a scale that is not positive, or very large
  kSinkLogits,     // sink_logits
  kAlibi,          // alibi_slopes
  kWindow,         // a window with a limit on some side
  kDilation,       // every d-th key
  kLead,           // leading keys: sinks, columns of global tokens, strided columns
  kColumns,        // those that are strided
  kGlobalRows,     // rows of the first global tokens
  kGlobalIndices,  // global tokens given as an index tensor
  kList,           // block lists
  kPartialBlocks,  // lists with bits of partial blocks
  kTopK,           // token top-k
  kValueDim,       // a value head dim that differs from the key's
  kPacked,         // queries or keys packed by cumulative lengths
  kUsedKeys,       // lengths of the keys on the device
  kPaged,          // keys in pages
  kFloat8Keys,     // keys and values of 8 bits
  kCount,
};

/// A set of features.
class Features {
 public:
  constexpr Features() = default;
  template <class... F>
  SPARSE_ATTN_HD static constexpr Features of(F... features) {
    return Features((0ull | ... | bit(features)));
  }
  SPARSE_ATTN_HD constexpr bool has(Feature feature) const { return bits_ & bit(feature); }
  SPARSE_ATTN_HD constexpr bool within(Features listed) const {
    return (bits_ & ~listed.bits_) == 0;
  }
  SPARSE_ATTN_HD constexpr bool any(Features of) const { return (bits_ & of.bits_) != 0; }
  SPARSE_ATTN_HD constexpr Features with(Features other) const {
    return Features(bits_ | other.bits_);
  }
  SPARSE_ATTN_HD constexpr Features without(Features other) const {
    return Features(bits_ & ~other.bits_);
  }
  SPARSE_ATTN_HD constexpr void add(Feature feature, bool present = true) {
    if (present) bits_ |= bit(feature);
  }
  SPARSE_ATTN_HD constexpr bool operator==(Features other) const { return bits_ == other.bits_; }

 private:
  SPARSE_ATTN_HD explicit constexpr Features(uint64_t bits) : bits_(bits) {}
  SPARSE_ATTN_HD static constexpr uint64_t bit(Feature feature) {
    return uint64_t{1} << static_cast<int32_t>(feature);
  }
  uint64_t bits_ = 0;
};

/// Under these alone a row sees keys of its window and no others: they say where tensors lie, place
/// rows, hide keys or change scores. With others, also later ones, it may see any key.
constexpr Features kWindowsAlone = Features::of(
    Feature::kFloat32, Feature::kUnaligned, Feature::kMask, Feature::kKeyBounds,
    Feature::kQueryOffsets, Feature::kSoftcap, Feature::kOddScale, Feature::kSinkLogits,
    Feature::kAlibi, Feature::kWindow, Feature::kDilation, Feature::kTopK, Feature::kValueDim,
    Feature::kPacked, Feature::kUsedKeys, Feature::kPaged, Feature::kFloat8Keys);

/// ... and under these every key of its sequence, but for those that causality, bounds and masks
/// hide.
constexpr Features kAllKeys =
    kWindowsAlone.without(Features::of(Feature::kWindow, Feature::kDilation));

/// With these alone all query heads of a key head see the same keys, if they share bounds and lists
/// and but for those that attn_mask hides.
constexpr Features kKeysOfAllHeads = Features::of(
    Feature::kFloat32, Feature::kUnaligned, Feature::kMask, Feature::kKeyBounds,
    Feature::kQueryOffsets, Feature::kKeyOrigins, Feature::kSoftcap, Feature::kOddScale,
    Feature::kSinkLogits, Feature::kAlibi, Feature::kWindow, Feature::kDilation, Feature::kLead,
    Feature::kColumns, Feature::kGlobalRows, Feature::kGlobalIndices, Feature::kList,
    Feature::kPartialBlocks, Feature::kValueDim, Feature::kPacked, Feature::kUsedKeys,
    Feature::kPaged, Feature::kFloat8Keys);

/// With these alone the softmax takes q.k times a positive scale of common size: they say where
/// tensors lie, which keys a row sees and what else the softmax sums. Others, also later ones,
/// count as a transform of scores.
constexpr Features kScaledScores = Features::of(
    Feature::kFloat32, Feature::kUnaligned, Feature::kKeyBounds, Feature::kQueryOffsets,
    Feature::kKeyOrigins, Feature::kSinkLogits, Feature::kWindow, Feature::kDilation,
    Feature::kLead, Feature::kColumns, Feature::kGlobalRows, Feature::kGlobalIndices,
    Feature::kList, Feature::kPartialBlocks, Feature::kTopK, Feature::kValueDim, Feature::kPacked,
    Feature::kUsedKeys, Feature::kPaged, Feature::kFloat8Keys);

}  // namespace sparse_attn

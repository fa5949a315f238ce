// Bounds from a boolean attn_mask that is the same for all rows, as of padding: the keys from the
// first to the last that it allows.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda::hopper {

/// What stands in the workspace for each (batch entry, head) of the mask: the interval of the keys
/// and whether the mask allows all of them, so that it need not be read again.
enum PaddingEntry : int32_t { kPaddingBegin, kPaddingEnd, kPaddingWhole, kPaddingEntries };

/// Whether the call's mask is one of padding, and nothing else bounds its keys.
inline bool is_padding(const AttentionParams& params) {
  const MaskView& mask = params.scores.mask;
  return mask.kind == MaskKind::kBool && mask.stride_q == 0 && params.scores.bounds.data == nullptr;
}

/// Numbers that the entries of a mask of padding have.
int64_t padding_entries(const AttentionParams& params);

/// Writes the entries and makes them the bounds of the call.
Status find_padding(AttentionParams* params, int32_t* entries);

}  // namespace sparse_attn::cuda::hopper

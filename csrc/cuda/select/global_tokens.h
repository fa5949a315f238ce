// Scattered global tokens on the device: an index tensor becomes a bit per key and the ascending
// list of the key tiles that hold one. Called by engines before their kernels; indices outside [0,
// Skv) are dropped, repeated ones count once.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda {

constexpr int32_t kAnyTile = 64;  // tile size for engines that only read the bits

/// Bytes of the bits and of the list in tiles of `block` keys; 0 without scattered global tokens.
int64_t global_token_bytes(const AttentionParams& params, int32_t block);

/// Points `pattern` at the bits and the list that lie, or will lie, at `memory`.
void attach_global_tokens(const AttentionParams& params, void* memory, Pattern* pattern);

/// Builds both at `memory`, in one launch, and attaches them to params->pattern; nothing without
/// global tokens. The first `sinks` keys count as tokens.
Status mark_global_tokens(AttentionParams* params, int32_t block, void* memory, int32_t sinks = 0);

}  // namespace sparse_attn::cuda

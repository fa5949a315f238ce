// Scattered global tokens on the device: an index tensor becomes a bit per key and the ascending
// list of the key tiles that hold one. Called by engines before their kernels; indices outside [0,
// Skv) are dropped, repeated ones count once.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda {

constexpr int32_t kAnyTile = 64;  // tile size for engines that only read the bits

/// Bytes of the bits and of the list in tiles of `block` keys; 0 without scattered global tokens.
int64_t global_token_bytes(const AttentionParams& params, int32_t block);

/// Builds both at `memory` and points params->pattern at them; nothing without global tokens.
Status mark_global_tokens(AttentionParams* params, int32_t block, void* memory);

}  // namespace sparse_attn::cuda

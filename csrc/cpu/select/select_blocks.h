// Block top-k: the key blocks of each query block, as a list (docs/design.md, "Block top-k").
// Packed and paged sequences become selections of their own, so that they have the bits of those.
#pragma once

#include <cstdint>

#include "select_params.h"

namespace sparse_attn::cpu {

int64_t select_workspace_bytes(const SelectParams& params);
Status select_blocks(const SelectParams& params);

}  // namespace sparse_attn::cpu

// Lays out the keys of a section of a call, see sections.h.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda::hopper {

/// Writes the keys and values of `part` that some query may see where `to` has them.
Status lay_out_keys(const AttentionParams& part, const AttentionParams& to);

}  // namespace sparse_attn::cuda::hopper

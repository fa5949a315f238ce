// Writes rows of keys and values into the slots of a cache.
#pragma once

#include "../../cache_params.h"

namespace sparse_attn::cuda {

Status append_to_cache(const AppendParams& params);

}  // namespace sparse_attn::cuda

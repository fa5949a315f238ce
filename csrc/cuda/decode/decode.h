// Calls with few queries, split over the keys: what the portable engine hands on.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda::decode {

/// Whether the call has few queries of a kind that the split kernels take, on a device that runs
/// them. Depends on nothing that differs between rows, heads or batch entries.
bool serves(const AttentionParams& params);

int64_t workspace_bytes(const AttentionParams& params);

/// `aligned`: pointers and strides are multiples of 16 bytes.
Status run(const AttentionParams& params, bool aligned);

}  // namespace sparse_attn::cuda::decode

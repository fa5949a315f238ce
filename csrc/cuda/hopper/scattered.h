// Scattered global tokens: a call with an index tensor becomes two calls whose kernels know nothing
// of them. The first has all rows, with the sinks and the global keys, gathered, as its lead view;
// the second the global rows, gathered, with every key, and its merge writes them over those of the
// first.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda::hopper {

struct ScatteredCalls {
  AttentionParams columns, rows;
  Pattern globals;  // the global keys alone, as its lead view
};

/// Bytes of what is gathered.
int64_t scattered_bytes(const AttentionParams& params);

/// Both calls, whose gathered tensors begin at the workspace of `params`, and theirs after them.
ScatteredCalls scattered_calls(const AttentionParams& params);

/// Fills the gathered tensors of both.
Status gather_globals(const AttentionParams& params, const ScatteredCalls& calls);

}  // namespace sparse_attn::cuda::hopper

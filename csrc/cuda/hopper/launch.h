// What the engine calls: a function for each file of kernels that is compiled.
#pragma once

#include "arguments.h"
#include "table.h"

namespace sparse_attn::cuda::hopper {

/// Launches a kernel of the list that is of this part, at a built head dim.
template <Part kPart, Dtype kDtype, int HEAD_DIM>
Status launch_part(int32_t kernel, const Arguments& args);

/// Launches the kernels of token top-k.
template <Dtype kDtype, int HEAD_DIM>
Status launch_topk(const Arguments& args);

}  // namespace sparse_attn::cuda::hopper

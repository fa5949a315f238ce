// What the engine calls: one function for each head dim that is compiled.
#pragma once

#include "arguments.h"
#include "table.h"

namespace sparse_attn::cuda::hopper {

/// Launches a kernel of the list at a built head dim, one that there is.
template <Dtype kDtype, int HEAD_DIM>
Status launch_head_dim(int32_t kernel, const Arguments& args);

/// The same for those that add attn_mask or ALiBi.
template <Dtype kDtype, int HEAD_DIM>
Status launch_biased(int32_t kernel, const Arguments& args);

/// The same for token top-k.
template <Dtype kDtype, int HEAD_DIM>
Status launch_topk(const Arguments& args);

}  // namespace sparse_attn::cuda::hopper

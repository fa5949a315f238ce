// What the engine calls: one function for each head dim that is compiled, and the numbering of
// query tiles that they share.
#pragma once

#include "arguments.h"
#include "table.h"

namespace sparse_attn::cuda::hopper {

/// Fills what Arguments say about tiles: how many, and in which order.
void arrange_tiles(KernelTile tile, Arguments* args);

/// Goes on to the next heads whose tiles are split, as many as the workspace has room for; false
/// where there are none.
bool next_section(Arguments* args);

/// Launches a kernel of the list at a built head dim, one that there is.
template <Dtype kDtype, int HEAD_DIM>
Status launch_head_dim(int32_t kernel, const Arguments& args);

/// The same for token top-k.
template <Dtype kDtype, int HEAD_DIM>
Status launch_topk(const Arguments& args);

}  // namespace sparse_attn::cuda::hopper

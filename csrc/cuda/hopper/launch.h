// What the engine calls: one function for each configuration that is compiled, and the numbering of
// query tiles that they share.
#pragma once

#include "arguments.h"

namespace sparse_attn::cuda::hopper {

/// Fills what Arguments say about tiles: how many, and in which order.
void arrange_tiles(TileShape tile, Arguments* args);

/// Launches the kernel of a Config; defined for those that engine.cu chooses from.
template <class C>
Status launch(Arguments args);

/// Token top-k of a plain call; `thresholds` is room for [B, Hq, Sq].
template <Dtype kDtype, int HEAD_DIM>
Status launch_topk(const Arguments& args, Threshold* thresholds);

}  // namespace sparse_attn::cuda::hopper

// How the tiles of a call are arranged, before the kernel is launched: how many there are, in which
// order they are dealt out, which have their keys cut into chunks, how their keys are brought, and
// what of the workspace is theirs.
#pragma once

#include "../../arena.h"
#include "arguments.h"

namespace sparse_attn::cuda::hopper {

/// Whether the tiles of sequences that differ in length are to be dealt: where some may be long and
/// have few query tiles, which may not fill the device, and where heads share tiles.
bool may_deal(const AttentionParams& params, int32_t multiprocessors);

/// Fills what Arguments say about tiles of the chosen kernel, and takes their memory.
void arrange_tiles(KernelTile tile, Arena* arena, Arguments* args);

/// Goes on to the next heads whose tiles are split, as many as the workspace has room for; false
/// where there are none.
bool next_section(Arguments* args);

}  // namespace sparse_attn::cuda::hopper

// Tensor maps of a call: strided views of Q, K, V and O for the copy engine.
#pragma once

#include "arguments.h"

namespace sparse_attn::cuda::hopper {

/// Shape of the boxes that a kernel copies.
struct BoxShape {
  int32_t slab;        // columns of a slab; its bytes are the swizzle's width, 128 or 64
  int32_t columns;     // of all slabs; those past a tensor's head dim are zeros
  int32_t query_rows;  // of Q
  int32_t out_rows;    // of O
  int32_t key_rows;    // of K and V
  int32_t lead_rows;   // of K and V in the lead view
  int32_t tile_keys;   // of a key tile
};

/// Whether the maps end after the last key that exists.
inline bool has_short_maps(const AttentionParams& params) {
  return !params.sequences.offsets_on_device() && params.pattern.dilation == 1;
}

/// Keys of a batch entry of the maps: of a sequence, of all that are packed, or of a page.
int32_t mapped_keys(const AttentionParams& params);

/// Whether a map can follow the strides of attn_mask.
bool can_map(const AttentionParams& params);

/// The map of attn_mask, in boxes of so many rows and kMaskColumns.
Status make_mask_map(const AttentionParams& params, int32_t rows, CUtensorMap* map);

/// Fills `maps` and says how they name tiles. A dilated class is a map with a longer row stride, so
/// nothing is moved; classes come in two lengths, so that no row past a class is read or written.
Status make_tensor_maps(const AttentionParams& params, const BoxShape& box, TensorMaps* maps,
                        TileCoordinates* coordinates);

}  // namespace sparse_attn::cuda::hopper

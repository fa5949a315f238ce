// The work of a warp: 16 rows of a query head, on the keys of its unit.
#pragma once

#include "config.cuh"

namespace sparse_attn::cuda::small {

struct Work {
  int32_t slot = 0;  // of the unit, among those of the thread block
  int32_t batch = 0, head = 0, kv_head = 0;
  Sequence sequence;
  int32_t first = 0;  // query of the tile's first row
  int32_t rows = 0;   // of the tile that exist
  int32_t keys = 0;   // of the sequence that may be read

  __device__ __forceinline__ int32_t query(int r) const { return first + r; }
  __device__ __forceinline__ bool has(int r) const { return r < rows; }
};

/// The work of this warp; lengths on the device must be there to be read. Of a unit that does not
/// exist it has neither rows nor keys.
__device__ __forceinline__ Work find_work(const AttentionParams& params, const Grid& grid) {
  const WarpTile own = grid.tile_of(static_cast<int32_t>(blockIdx.x), warp_of_block());
  Work work;
  work.slot = own.slot;
  if (own.unit >= grid.units) return work;
  work.batch = grid.by_heads_kv.divide(own.unit);
  work.kv_head = own.unit - work.batch * params.problem.heads_kv;
  work.sequence = params.sequences.of(work.batch);
  work.keys = params.num_keys(work.sequence);
  const int32_t of_group = grid.by_tiles.divide(own.tile);
  work.head = work.kv_head * grid.group + of_group;
  work.first = (own.tile - of_group * grid.tiles) * kTileRows;
  if (own.tile < grid.unit_tiles) {
    work.rows = imax(0, imin(work.sequence.rows - work.first, kTileRows));
  }
  return work;
}

}  // namespace sparse_attn::cuda::small

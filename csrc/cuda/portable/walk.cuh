// The tiles of keys that a query tile visits, one after the other: lead tiles, the main range or
// the list, tiles with scattered global tokens. Everything is uniform over the thread block.
#pragma once

#include "../../params.h"

namespace sparse_attn::cuda::portable {

/// A visited tile. `start` is its first element of its view; a gathered tile has a first key for
/// each of its granules instead, kUnlimited where the list names none.
template <int kGranules>
struct TileStep {
  int32_t start = 0;
  bool lead = false;
  bool masked = false;
  int32_t granules[kGranules];
};

/// What the walk of one query tile needs; lives in shared memory.
struct WalkPlan {
  Tiles tiles;
  Interval
      keys_loaded;  // elements of the main view that exist for some row; the rest loads as zeros
  Interval lead_loaded;
  int32_t range_steps = 0;  // lead and main tiles of a range pattern
  int32_t steps = 0;
  ListedRuns runs;  // of a list
};

/// Walks a list of blocks whose size is no multiple of BLOCK_KV by granules, several to a tile.
template <int BLOCK_KV, bool kGather>
struct TileWalk {
  /// Keys of a granule: a listed block is a whole number of them, whatever its size.
  static constexpr int32_t kGranule = BLOCK_KV < 16 ? BLOCK_KV : 16;

  static constexpr int32_t kGranules = kGather ? BLOCK_KV / kGranule : 1;
  using Step = TileStep<kGranules>;

  const Pattern& pattern;
  const WalkPlan& plan;

  /// Moves `position` past the next visited tile and describes it; false when there is none.
  __device__ __forceinline__ bool next(int32_t& position, Step& step) const {
    while (position < plan.steps) {
      int32_t at = position++;
      if (pattern.list.present() ? listed(at, step) : ranged(at, step)) return true;
    }
    return false;
  }

 private:
  __device__ __forceinline__ bool ranged(int32_t at, Step& step) const {
    const Tiles& tiles = plan.tiles;
    if (at >= plan.range_steps) return global_tile(at - plan.range_steps, step);
    int32_t left = tiles.lead_left.size();
    int32_t tile;
    if (at < left) {
      tile = tiles.lead_left.begin + at;
    } else if (at < left + tiles.main.size()) {
      tile = tiles.main.begin + at - left;
    } else {
      tile = tiles.lead_right.begin + at - left - tiles.main.size();
    }
    step.lead = at < left || at >= left + tiles.main.size();
    step.masked = step.lead || !tiles.full.contains(tile);
    step.start = tile * BLOCK_KV;
    return true;
  }

  /// A tile with a scattered global token, unless another step visits it or no row reaches it.
  __device__ __forceinline__ bool global_tile(int32_t index, Step& step) const {
    const Tiles& tiles = plan.tiles;
    int32_t tile = pattern.global_tiles[index];
    if (tiles.main.contains(tile) || tiles.lead_left.contains(tile) ||
        tiles.lead_right.contains(tile)) {
      return false;
    }
    step.start = tile * BLOCK_KV;
    step.lead = step.masked = true;
    return step.start < plan.keys_loaded.end;
  }

  __device__ __forceinline__ bool listed(int32_t at, Step& step) const {
    const ListedRuns& runs = plan.runs;
    step.lead = false;
    if constexpr (kGather) {
      step.start = 0;
      step.masked = false;
#pragma unroll
      for (int32_t g = 0; g < kGranules; ++g) {
        int32_t r = at * kGranules + g;
        Interval run = r < runs.count ? runs.keys(r) : Interval{kUnlimited, kUnlimited};
        step.granules[g] = run.begin;
        step.masked |= plan.tiles.needs_mask(run);
      }
      return true;
    } else {
      Interval run = runs.keys(at);
      step.start = run.begin;
      step.masked = plan.tiles.needs_mask(run);
      return plan.tiles.visits(run);
    }
  }
};

/// The plan of the query tile `rows`; `bounds` are those of its rows.
template <int BLOCK_KV, bool kGather>
__device__ WalkPlan plan_walk(const Pattern& pattern, const Slice& slice, Interval rows,
                              const Bounds& bounds, int64_t batch, int64_t head, int32_t list_row) {
  WalkPlan plan;
  plan.tiles = visited_tiles(pattern, slice, rows, bounds, BLOCK_KV);
  plan.keys_loaded = slice.keys.inside(bounds.any);
  plan.lead_loaded = pattern.lead.inside(bounds.any);
  if (pattern.list.present()) {
    using Walk = TileWalk<BLOCK_KV, kGather>;
    int32_t length = kGather ? Walk::kGranule : BLOCK_KV;
    plan.runs = pattern.list.runs(batch, head, list_row, length);
    plan.steps = ceil_div(plan.runs.count, Walk::kGranules);
    return plan;
  }
  plan.range_steps = plan.steps = plan.tiles.count();
  if (pattern.num_global_tiles != nullptr) plan.steps += *pattern.num_global_tiles;
  return plan;
}

}  // namespace sparse_attn::cuda::portable

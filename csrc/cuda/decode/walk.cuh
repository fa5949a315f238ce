// The keys that a row tile visits, chunk by chunk, in steps of kStepKeys keys and runs of steps of
// one kind. Chunks lie at fixed places of their axis (of the list, for block lists), so what a row
// adds up in a chunk does not depend on the other rows of its tile.
#pragma once

#include "../../visited_tiles.h"
#include "plan.h"

namespace sparse_attn::cuda::decode {

/// A visited step as a warp's loader describes it: the first element of its view and its chunk.
struct Step {
  int32_t start = 0;
  int32_t chunk = 0;
  bool lead = false;
  bool masked = false;
  int32_t bits = -1;  // row of bits of a partial block
  int32_t turn = 0;   // of the chunk: steps at fixed places, which a warp may multiply at once
};

/// What the walk of one row tile needs; lives in shared memory.
struct WalkPlan {
  Tiles tiles;           // in steps
  Interval keys_loaded;  // elements of the main view that exist for some row; the rest are zeros
  Interval lead_loaded;  // the same of the lead view, where that has an axis of its own
  Interval left, main, right;  // visited chunks, of the axis: leading ones, the window's, the rest
  ListedRuns listed;           // steps of a list's blocks
  int32_t chunks = 0;          // all of them
};

__device__ __forceinline__ Interval chunks_of(Interval steps, int32_t chunk_steps) {
  if (steps.empty()) return {};
  return {steps.begin / chunk_steps, ceil_div(steps.end, chunk_steps)};
}

/// The plan for rows `rows` of the slice; `bounds` are those of the tile's rows.
__device__ inline WalkPlan plan_walk(const Pattern& pattern, const Slice& slice, Interval rows,
                                     const Bounds& bounds, int64_t batch, int64_t head,
                                     int32_t list_row, int32_t chunk_steps, int32_t max_chunks) {
  WalkPlan plan;
  plan.tiles = visited_tiles(pattern, slice, rows, bounds, kStepKeys);
  plan.keys_loaded = slice.keys.inside(bounds.any);
  plan.lead_loaded = slice.lead.inside(pattern, bounds.any);
  if (pattern.list.present()) {
    const BlockList& list = pattern.list;
    plan.listed = list.runs(batch, head, list_row, kStepKeys);
    plan.chunks = ceil_div(plan.listed.count, chunk_steps);
  } else {
    plan.left = chunks_of(plan.tiles.lead_left, chunk_steps);
    plan.main = chunks_of(plan.tiles.main, chunk_steps);
    plan.right = chunks_of(plan.tiles.lead_right, chunk_steps);
    if (pattern.shared_axis()) {
      plan.main.begin = imax(plan.main.begin, plan.left.end);
      plan.right.begin = imax(plan.right.begin, imax(plan.main.end, plan.left.end));
    }
    plan.chunks = plan.left.size() + plan.main.size() + plan.right.size();
  }
  plan.chunks = imin(plan.chunks, max_chunks);
  return plan;
}

/// Walks a warp's steps of the chunks: every `warps`-th, by their place in the chunk.
struct Walk {
  const Pattern& pattern;
  const WalkPlan& plan;
  int32_t chunk_steps;
  int32_t chunk, end_chunk;
  int32_t warp, warps;  // a power of two, which divides a chunk's steps
  int32_t at = 0;       // steps of the chunk after the run
  Interval run = {};    // elements of consecutive steps in which the warp's next one begins
  bool lead = false;    // of the run
  bool masked = false;
  int32_t bits = -1;    // row of bits of its block
  int32_t at_once = 1;  // steps of a turn
  int32_t place = 0;    // of the warp's next step in the chunk

  /// Describes the next visited step; a step of chunk `end_chunk` means that there is none.
  __device__ __forceinline__ Step next() {
    while (run.begin >= run.end && chunk < end_chunk) find_run();
    Step step = {run.begin, run.begin < run.end ? chunk : end_chunk, lead, masked, bits};
    step.turn = place / (warps * at_once);
    place += warps;
    run.begin += warps * kStepKeys;
    return step;
  }

 private:
  /// Moves on to the next run of the chunk, which may be empty, or to the next chunk.
  __device__ __forceinline__ void find_run() {
    if (at == chunk_steps) {
      at = 0;
      ++chunk;
    } else if (pattern.list.present()) {
      find_listed();
    } else {
      find_ranged();
    }
  }

  /// Makes the run of `steps`, the first of which stands at `first` in the chunk.
  __device__ __forceinline__ void set_run(Interval steps, int32_t first) {
    const int32_t skipped = (warp - first) & (warps - 1);
    place = first + skipped;
    steps.begin += skipped;
    run = {steps.begin * kStepKeys, steps.end * kStepKeys};
  }

  /// The first of the visited intervals that reaches past `at`; they ascend on their axis.
  __device__ __forceinline__ void find_ranged() {
    const Tiles& tiles = plan.tiles;
    const bool shared = pattern.shared_axis();
    const bool left = chunk < plan.left.size();
    const int32_t past = chunk - plan.left.size();  // the left chunks
    const int32_t on_axis = left                      ? plan.left.begin + chunk
                            : past < plan.main.size() ? plan.main.begin + past
                                                      : plan.right.begin + past - plan.main.size();
    const int32_t first = on_axis * chunk_steps;
    Interval rest = {first + at, first + chunk_steps};
    Interval steps = {rest.end, rest.end};
    auto take = [&](Interval visited, bool is_lead, bool is_masked) {
      visited = intersect(visited, rest);
      if (visited.empty() || visited.begin >= steps.begin) return;
      steps = visited;
      lead = is_lead;
      masked = is_masked;
    };
    if (shared || left) {
      take(tiles.lead_left, true, true);
      take(tiles.lead_right, true, true);
    }
    if (shared || !left) {
      take({tiles.main.begin, imin(tiles.full.begin, tiles.main.end)}, false, true);
      take(tiles.full, false, false);
      take({imax(tiles.full.end, tiles.main.begin), tiles.main.end}, false, true);
    }
    set_run(steps, steps.begin - first);
    at = steps.end - first;
  }

  /// The rest of the block that holds the warp's first step from `at` of the chunk on; entries that
  /// name no block have nothing that is visited.
  __device__ __forceinline__ void find_listed() {
    at += (warp - at) & (warps - 1);
    const int32_t step = chunk * chunk_steps + at;
    if (at >= chunk_steps || step >= plan.listed.count) {
      at = chunk_steps;
      return;
    }
    const int32_t per_block = plan.listed.per_block;
    const int32_t inside = step - plan.listed.entry_of(step) * per_block;
    const int32_t count = imin(per_block - inside, chunk_steps - at);
    const int32_t first = plan.listed.keys(step).begin / kStepKeys;
    Interval steps = intersect({first, first + count}, plan.tiles.main);
    lead = false;
    bits = pattern.list.bits_row(plan.listed, step);
    masked = plan.tiles.needs_mask({steps.begin * kStepKeys, steps.end * kStepKeys});
    set_run(steps, at + steps.begin - first);
    at += count;
  }
};

}  // namespace sparse_attn::cuda::decode

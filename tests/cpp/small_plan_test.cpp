// How the small engine shares a call out: every tile of every unit to one warp, in thread blocks
// that hold no more than their kernel has room for.
#include <map>
#include <utility>

#include "check.h"
#include "cuda/small/plan.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::small;

namespace {

Problem problem_of(int32_t batch, int32_t heads_kv, int32_t group, int32_t seq_q, int32_t seq_kv,
                   int32_t head_dim) {
  return {batch, heads_kv * group, heads_kv, seq_q, seq_kv, head_dim, head_dim, Dtype::kFloat16};
}

void check_tiles(const Problem& problem) {
  const Grid grid = plan_grid(problem);
  const std::string text = std::to_string(problem.batch) + "x" + std::to_string(problem.heads_q) +
                           "/" + std::to_string(problem.heads_kv) + "x" +
                           std::to_string(problem.seq_q) + " on " + std::to_string(problem.seq_kv);
  const int32_t pitch = 2 * kernel_head_dim(problem.head_dim);
  CHECK(grid.threads() <= 32 * most_warps(kernel_keys(problem.seq_kv)), text);
  CHECK(grid.shared_bytes(pitch) <= 99 << 10, text + ": every device from 8.0 on has it");
  CHECK(grid.key_rows >= problem.seq_kv && grid.key_rows <= kernel_keys(problem.seq_kv), text);
  CHECK(grid.tiles * kTileRows >= problem.seq_q, text);
  CHECK(grid.unit_tiles == grid.tiles * problem.heads_q / problem.heads_kv, text);
  std::map<std::pair<int32_t, int32_t>, int> taken;
  for (int32_t block = 0; block < grid.blocks(); ++block) {
    for (int32_t warp = 0; warp < grid.warps * grid.at_once; ++warp) {
      const WarpTile own = grid.tile_of(block, warp);
      CHECK(own.slot >= 0 && own.slot < grid.at_once, text);
      CHECK(own.slot == warp / grid.warps, text + ": a slot's warps are neighbours");
      if (own.unit < grid.units && own.tile < grid.unit_tiles) ++taken[{own.unit, own.tile}];
    }
  }
  CHECK(static_cast<int32_t>(taken.size()) == grid.units * grid.unit_tiles, text);
  for (const auto& [tile, times] : taken) CHECK(times == 1, text);
}

void test_every_tile_has_one_warp() {
  for (int32_t batch : {1, 3, 7}) {
    for (int32_t heads_kv : {1, 2, 5}) {
      for (int32_t group : {1, 3, 4, 9}) {
        for (int32_t seq_q : {1, 16, 17, 33, 48, 64, 65, 100, 128, 129, 515}) {
          for (int32_t seq_kv : {0, 1, 32, 33, 64, 65, 96, kMostKeys}) {
            for (int32_t head_dim : {8, 32, 64, kMostHeadDim}) {
              check_tiles(problem_of(batch, heads_kv, group, seq_q, seq_kv, head_dim));
            }
          }
        }
      }
    }
  }
}

void test_short_units_share_a_thread_block() {
  CHECK(plan_grid(problem_of(64, 8, 1, 16, 16, 32)).at_once == 4, "a tile each");
  CHECK(plan_grid(problem_of(64, 8, 1, 16, 16, 64)).at_once == 2,
        "four would take too much memory");
  CHECK(plan_grid(problem_of(64, 8, 1, 32, 32, 64)).at_once == 2, "two tiles each");
  CHECK(plan_grid(problem_of(64, 8, 1, 33, 32, 64)).at_once == 1, "three would leave a warp");
  const Grid wide = plan_grid(problem_of(64, 8, 1, 16, 128, 128));
  CHECK(wide.at_once == 1, "keys that fill shared memory");
  const Grid tall = plan_grid(problem_of(1, 1, 1, 128, 128, 64));
  CHECK(tall.unit_blocks == 1 && tall.warps == 8, "all tiles of a sequence share its keys");
}

}  // namespace

int main() {
  test_every_tile_has_one_warp();
  test_short_units_share_a_thread_block();
  return check::summary();
}

// What a window holds at most, counted row by row: plans of every engine size their work by it.
#include "check.h"
#include "cuda/decode/plan.h"
#include "cuda/hopper/key_split.h"
#include "visited_tiles.h"

using namespace sparse_attn;

namespace {

constexpr int32_t kBlock = 4, kRows = 3;

/// Whether a row at position p sees key j: the words of the pattern, without its code.
bool sees(const Pattern& pattern, int32_t p, int32_t j) {
  if ((j - p) % pattern.dilation != 0) return false;
  const int32_t tap = (j - p) / pattern.dilation;
  return -pattern.left <= tap && tap <= pattern.right && !(pattern.causal && tap > 0);
}

/// The most that rows, and tiles of rows, see of a sequence, wherever they stand.
struct Most {
  int32_t keys = 0, tiles = 0;
};

Most count_most(const Pattern& pattern, int32_t keys) {
  Most most;
  for (int32_t offset = -20; offset <= keys + 20; ++offset) {
    int32_t seen = 0;
    for (int32_t j = 0; j < keys; ++j) seen += sees(pattern, offset, j);
    most.keys = imax(most.keys, seen);
    const Sequence sequence = {kRows * pattern.dilation, keys, offset};
    for (int32_t c = 0; c < pattern.dilation; ++c) {
      const Slice slice = make_slice(pattern, c, sequence);
      const Tiles tiles = visited_tiles(pattern, slice, {0, kRows}, unbounded(keys), kBlock);
      most.tiles = imax(most.tiles, tiles.count());
    }
  }
  return most;
}

void test_window(const Pattern& pattern, int32_t keys) {
  const std::string text = "window (" + std::to_string(pattern.left) + ", " +
                           std::to_string(pattern.right) + "), dilation " +
                           std::to_string(pattern.dilation) + ", causal " +
                           std::to_string(pattern.causal) + ", " + std::to_string(keys) + " keys";
  const Most most = count_most(pattern, keys);
  CHECK(pattern.most_window(ceil_div(keys, pattern.dilation)) == most.keys, text);
  CHECK(cuda::decode::visited_keys(pattern, keys) == most.keys, text);
  const int32_t tiles = cuda::hopper::most_visited(pattern, keys, {kRows, kBlock, 64, true});
  CHECK(tiles >= most.tiles && tiles <= most.tiles + 1, text);
}

}  // namespace

int main() {
  for (int32_t left : {0, 1, 2, 5, 9, kUnlimited}) {
    for (int32_t right : {0, 1, 4, kUnlimited}) {
      for (int32_t dilation : {1, 2, 3}) {
        for (bool causal : {false, true}) {
          for (int32_t keys : {1, 2, 7, 16, 33}) {
            Pattern pattern;
            pattern.left = left;
            pattern.right = right;
            pattern.dilation = dilation;
            pattern.causal = causal;
            test_window(pattern, keys);
          }
        }
      }
    }
  }
  return check::summary();
}

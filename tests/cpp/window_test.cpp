// What a window holds at most, and which keys windows reach, counted row by row: plans of every
// engine size their work by it, and keys that no row reaches are not copied.
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

/// The keys that rows at `positions` reach, from the first to the last, and how many they are.
void test_reach(const Pattern& pattern, int32_t keys, int32_t rows, const std::string& text) {
  int32_t most = 0;
  for (int32_t offset = -20; offset <= keys + 20; ++offset) {
    const Interval positions = {offset, offset + rows};
    const Interval reached = reached_keys(pattern, positions, keys);
    CHECK(reached.begin >= 0 && reached.end <= keys, text);
    int32_t seen = 0;
    for (int32_t j = 0; j < keys; ++j) {
      bool one = false;
      for (int32_t p = positions.begin; p < positions.end; ++p) one |= sees(pattern, p, j);
      seen += one;
      CHECK(reached.contains(j) || !one, text);
      // Of steps rows may leave out the first keys of a sequence, and the last.
      CHECK(!reached.contains(j) || one || rows < pattern.dilation, text);
    }
    most = imax(most, seen);
  }
  if (pattern.dilation == 1) CHECK(pattern.most_window(keys, rows) == most, text);
  Pattern wider = pattern;
  wider.left += 3;
  if (pattern.causal) return;
  wider.right += 3;
  const Interval positions = {keys / 2, keys / 2 + rows};
  const Interval reached = reached_keys(pattern, positions, keys, 3);
  const Interval same = reached_keys(wider, positions, keys);
  CHECK(reached.begin == same.begin && reached.end == same.end, text);
}

/// Of positions as far as they may lie, in steps as wide as they may be.
void test_far_reach() {
  Pattern pattern;
  pattern.dilation = kMaxLength;
  for (int32_t offset : {-kMaxLength, 0, kMaxLength}) {
    const Interval all = reached_keys(pattern, {offset, offset + 1}, kMaxLength, 16);
    CHECK(all.begin == 0 && all.end == kMaxLength, std::to_string(offset));
  }
  pattern.left = pattern.right = 0;
  CHECK(reached_keys(pattern, {-kMaxLength, 0}, kMaxLength).empty(), "before all keys");
  CHECK(reached_keys(pattern, {kMaxLength, 2 * kMaxLength}, kMaxLength).empty(), "past all keys");
}

/// Rows of global tokens see all keys, wherever their tokens are listed.
void test_global_rows_see_all() {
  constexpr uint32_t kBits = 1;
  Pattern pattern, counted, marked;
  pattern.left = pattern.right = 2;
  counted = marked = pattern;
  counted.global_count = 1;
  marked.global_bits = &kBits;
  CHECK(pattern.most_seen(100, 4) == 8, "the window of 4 rows");
  CHECK(counted.most_seen(100, 4) == 100 && marked.most_seen(100, 4) == 100, "all keys");
}

void test_window(const Pattern& pattern, int32_t keys) {
  const std::string text = "window (" + std::to_string(pattern.left) + ", " +
                           std::to_string(pattern.right) + "), dilation " +
                           std::to_string(pattern.dilation) + ", causal " +
                           std::to_string(pattern.causal) + ", " + std::to_string(keys) + " keys";
  for (int32_t rows = 1; rows <= 4; ++rows) test_reach(pattern, keys, rows, text);
  const Most most = count_most(pattern, keys);
  CHECK(pattern.most_window(ceil_div(keys, pattern.dilation)) == most.keys, text);
  CHECK(cuda::decode::visited_keys(pattern, keys) == most.keys, text);
  const int32_t tiles = cuda::hopper::most_visited(pattern, keys, {kRows, kBlock, 64, true});
  CHECK(tiles >= most.tiles && tiles <= most.tiles + 1, text);
}

}  // namespace

int main() {
  test_far_reach();
  test_global_rows_see_all();
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

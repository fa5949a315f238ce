// Tests of csrc/pattern.h: over thousands of shapes, an engine's walk over the visited tiles counts
// exactly the pairs that the dense truth allows, each once; tiles without a mask are whole; no
// visited tile is idle; and arithmetic at the ends of the 32-bit range stays defined (build with
// -fsanitize=undefined,address). Run: pattern_test [cases of each kind].
#include <climits>
#include <cstdlib>
#include <initializer_list>
#include <random>

#include "check.h"
#include "dense_case.h"
#include "tile_walk.h"
#include "visited_tiles.h"

namespace {

using sparse_attn::Interval;
using sparse_attn::kMaxLength;
using sparse_attn::kUnlimited;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int between(int low, int high) { return low + static_cast<int>(engine_() % (high - low + 1u)); }
  bool chance(int percent) { return between(1, 100) <= percent; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int>(values.size()) - 1)];
  }

 private:
  std::mt19937 engine_;
};

Side random_side(Random& random) {
  switch (random.between(0, 5)) {
    case 0:
      return std::nullopt;
    case 1:
      return 0;
    case 2:
      return random.pick<int64_t>({1000, kUnlimited - 1, kUnlimited, int64_t{1} << 40});
    default:
      return random.between(0, 40);
  }
}

int64_t random_offset(Random& random, int seq_q, int seq_kv) {
  switch (random.between(0, 7)) {
    case 0:
      return 0;
    case 1:
      return random.between(-90, 90);
    case 2:
      return -seq_q - random.between(-2, 2);
    case 3:
      return seq_kv + random.between(-2, 2);
    default:
      return seq_kv - seq_q;
  }
}

/// Key bounds of a row: everything, nothing, a padded side, anything at all.
void random_bounds(Random& random, Case* c) {
  for (int i = 0; i < c->seq_q; ++i) {
    int low = random.between(-3, c->seq_kv + 3);
    int high = random.between(-3, c->seq_kv + 3);
    switch (random.between(0, 5)) {
      case 0:
        low = INT_MIN, high = INT_MAX;
        break;
      case 1:
        low = INT_MAX, high = INT_MIN;
        break;
      case 2:
        low = 0;
        break;
      case 3:
        high = c->seq_kv;
        break;
    }
    c->bounds.push_back(low);
    c->bounds.push_back(high);
  }
}

Case random_shape(Random& random, const char* kind) {
  Case c;
  c.kind = kind;
  c.seq_q = random.chance(10) ? 1 : random.between(1, 70);
  c.seq_kv = random.chance(10) ? 1 : random.between(1, 70);
  c.offset = random_offset(random, c.seq_q, c.seq_kv);
  c.causal = random.chance(50);
  c.tile_q = random.pick({1, 2, 3, 8, 16, 31, 32, 64});
  c.tile_kv = random.pick({8, 16, 24, 32, 64});
  if (random.chance(25)) random_bounds(random, &c);
  if (random.chance(30)) {
    c.origin = random.pick<int32_t>({1, -1, random.between(-40, 90), INT_MAX, INT_MIN});
  }
  return c;
}

Case full_case(Random& random) { return random_shape(random, "full"); }

Case band_case(Random& random) {
  Case c = random_shape(random, "band");
  c.left = random_side(random);
  c.right = random_side(random);
  return c;
}

Case sinks_case(Random& random) {
  Case c = band_case(random);
  c.kind = "band with sinks";
  c.sinks = random.pick({1, 4, random.between(1, 70), 100});
  return c;
}

Case global_count_case(Random& random) {
  Case c = random.chance(30) ? sinks_case(random) : band_case(random);
  c.kind = "band with leading global tokens";
  c.global_count = random.pick<int64_t>({1, 3, random.between(1, 70), 100, int64_t{1} << 40});
  return c;
}

Case global_token_case(Random& random) {
  Case c = random.chance(30) ? sinks_case(random) : band_case(random);
  c.kind = "band with scattered global tokens";
  int percent = random.pick({0, 3, 20, 100});
  for (int j = 0; j < c.seq_kv; ++j) c.global_token.push_back(random.chance(percent));
  return c;
}

Case listed_columns_case(Random& random) {
  Case c = band_case(random);
  c.kind = "band with listed leading keys";
  c.columns_alone = true;
  int percent = random.pick({0, 3, 20, 100});
  for (int j = 0; j < c.seq_kv; ++j) c.global_token.push_back(random.chance(percent));
  return c;
}

Case dilated_case(Random& random) {
  Case c = random_shape(random, "dilated");
  c.dilation = random.pick<int64_t>(
      {1, 2, 3, random.between(1, 9), random.between(60, 150), kUnlimited, int64_t{1} << 40});
  c.left = random_side(random);
  c.right = random_side(random);
  if (random.chance(40)) c.sinks = random.pick({1, 4, random.between(1, 70), 100});
  return c;
}

Case strided_case(Random& random) {
  Case c = random_shape(random, "strided");
  c.local = random.pick<int64_t>({1, 2, random.between(1, 40), 1000, int64_t{1} << 40});
  c.stride = random.pick<int64_t>(
      {1, 2, random.between(1, 20), random.between(60, 90), 1000, int64_t{1} << 40});
  return c;
}

Case listed_case(Random& random) {
  Case c = random_shape(random, "block list");
  Layout& layout = c.layout;
  layout.block_q = random.pick({4, 8, 12, 16, 32, 48, 64, 128});
  layout.block_kv = random.pick({4, 8, 12, 16, 32, 48, 64, 128});
  layout.num_q = (c.seq_q + layout.block_q - 1) / layout.block_q;
  layout.num_kv = (c.seq_kv + layout.block_kv - 1) / layout.block_kv;
  int percent = random.pick({0, 30, 60, 100});
  for (int x = 0; x < layout.num_q * layout.num_kv; ++x) {
    layout.mask.push_back(random.chance(percent));
  }
  return c;
}

void test_random_cases(long cases) {
  using Maker = Case (*)(Random&);
  const Maker makers[] = {full_case,         band_case,         sinks_case,
                          global_count_case, global_token_case, listed_columns_case,
                          dilated_case,      strided_case,      listed_case};
  Random random(20240607);
  for (Maker make : makers) {
    for (long n = 0; n < cases; ++n) {
      Case c = make(random);
      c.prepare();
      TileWalk(c).run();
    }
  }
}

/// Every small band exhaustively: each side of a tile edge, each place of the diagonal.
void test_every_small_band() {
  for (int seq_q : {1, 9}) {
    for (int seq_kv : {1, 7, 8, 9, 17}) {
      for (int offset = -11; offset <= 19; ++offset) {
        for (int left = -1; left <= 9; ++left) {
          for (int right = -1; right <= 2; ++right) {
            Case c;
            c.kind = "small band";
            c.seq_q = seq_q;
            c.seq_kv = seq_kv;
            c.offset = offset;
            c.causal = right < 0;
            if (left >= 0) c.left = left;
            if (right >= 0) c.right = right;
            c.tile_q = 4;
            TileWalk(c).run();
          }
        }
      }
    }
  }
}

/// Positions as far out as a call can ask for: unlimited sides still reach every key.
void test_far_offsets() {
  for (int64_t offset : {INT_MIN, -kUnlimited, -kMaxLength, kMaxLength, kUnlimited, INT_MAX}) {
    for (int mode = 0; mode < 16; ++mode) {
      Case c;
      c.kind = "far offset";
      c.seq_q = 5;
      c.seq_kv = 20;
      c.offset = offset;
      c.causal = mode & 1;
      if (mode & 2) c.left = 7;
      if (mode & 4) c.right = 0;
      if (mode & 8) c.sinks = 2;
      c.tile_q = 4;
      TileWalk(c).run();
    }
  }
}

std::string text_of(Interval x) {
  return "[" + std::to_string(x.begin) + ", " + std::to_string(x.end) + ")";
}

/// The longest lengths: rows and tiles at both ends against 64-bit arithmetic.
void test_longest_lengths() {
  const int32_t length = kMaxLength;
  const Interval all = {0, length};
  for (int64_t offset : {-kMaxLength, -1, 0, 1, kMaxLength}) {
    for (int64_t left : {0, 5, kMaxLength, kUnlimited}) {
      for (int64_t right : {0, 5, kMaxLength, kUnlimited}) {
        sparse_attn::Pattern pattern;
        pattern.left = static_cast<int32_t>(left);
        pattern.right = static_cast<int32_t>(right);
        sparse_attn::Slice slice =
            sparse_attn::make_slice(pattern, 0, {length, length, static_cast<int32_t>(offset)});
        for (int32_t r : {0, 1, length / 2, length - 1}) {
          int64_t p = r + offset;
          int64_t begin = left == kUnlimited ? 0 : std::max<int64_t>(0, p - left);
          int64_t end = right == kUnlimited ? length : std::min<int64_t>(length, p + right + 1);
          Interval keys = sparse_attn::make_row(pattern, slice, r, all).keys;
          std::string text = "position " + std::to_string(p) + ", window (" + std::to_string(left) +
                             ", " + std::to_string(right) + "), keys " + text_of(keys);
          CHECK(keys.empty() ? begin >= end : keys.begin == begin && keys.end == end, text);
          sparse_attn::Tiles tiles = sparse_attn::visited_tiles(pattern, slice, {r, r + 1},
                                                                sparse_attn::unbounded(length), 64);
          CHECK(tiles.main.size() == (begin < end ? (end + 63) / 64 - begin / 64 : 0), text);
        }
      }
    }
  }
}

/// Entries and counts that a device may hold: clamped or skipped, never followed.
void test_untrusted_lists() {
  const int32_t counts[] = {-5, 2, INT_MAX};
  const int32_t indices[] = {0, 1, -1, 3, INT_MIN, INT_MAX};
  sparse_attn::BlockList list;
  list.counts = counts;
  list.indices = indices;
  list.index_stride_q = 2;
  list.block_q = list.block_kv = 16;
  list.num_q = 3;
  list.num_kv = 3;
  list.max_count = 2;
  CHECK(list.runs(0, 0, 0, 16).count == 0, "a negative count");
  CHECK(list.runs(0, 0, 1, 16).count == 2, "a count that fits");
  CHECK(list.runs(0, 0, 2, 16).count == 2, "a count beyond the list");
  CHECK(list.runs(0, 0, 1, 8).count == 4, "runs of half a block");
  sparse_attn::ListedRuns fits = list.runs(0, 0, 0, 8);
  CHECK(fits.keys(1).begin == 8 && fits.keys(1).end == 16, "the second half of an entry");
  CHECK(fits.keys(2).begin == 16 && fits.keys(2).end == 24, "the next entry");
  for (int row : {1, 2}) {
    for (int r : {0, 1, 2, 3}) {
      CHECK(list.runs(0, 0, row, 8).keys(r).empty(), "an entry that names no block");
    }
  }
}

/// A row without keys narrows what all rows have and leaves alone what any has.
void test_bounds() {
  sparse_attn::Bounds bounds = sparse_attn::no_rows(20);
  CHECK(bounds.any.empty(), "no rows, no keys");
  bounds.add({4, 9});
  bounds.add({6, 12});
  CHECK(bounds.any.begin == 4 && bounds.any.end == 12, "the hull of " + text_of(bounds.any));
  CHECK(bounds.all.begin == 6 && bounds.all.end == 9, "the intersection " + text_of(bounds.all));
  bounds.add({17, 17});
  CHECK(bounds.any.begin == 4 && bounds.any.end == 12, "an empty row");
  CHECK(bounds.all.empty(), "not all rows have a key");
}

void test_division() {
  for (int a = -20; a <= 20; ++a) {
    for (int b = 1; b <= 9; ++b) {
      int down = 0;
      while (down * b > a) --down;
      while ((down + 1) * b <= a) ++down;
      std::string text = std::to_string(a) + " / " + std::to_string(b);
      CHECK(sparse_attn::floor_div(a, b) == down, text);
      CHECK(sparse_attn::ceil_div(a, b) == down + (down * b != a), text);
    }
  }
}

/// Elements of a tile past the end of a view with a huge step, whose keys int32 does not hold.
void test_keys_past_a_view() {
  const int32_t last = 1023;
  for (int32_t step : {1, 3, 1 << 24, 1 << 28, 1 << 30}) {
    const sparse_attn::View view = sparse_attn::residue_class(5, step, last + 1);
    for (int32_t u = 0; u < 512; ++u) {
      const int64_t key = 5 + int64_t{u} * step;
      const int32_t wanted = key < last ? static_cast<int32_t>(key) : last;
      const std::string text = "element " + std::to_string(u) + " by " + std::to_string(step);
      CHECK(view.at_most(u, last) == wanted, text);
    }
  }
}

static_assert(sparse_attn::make_slice({}, 0, {4, 6, 2}).shift == 2,
              "slices are constant expressions");
static_assert(sparse_attn::residue_class(2, 3, 9).at(2) == 8, "views are constant expressions");

}  // namespace

int main(int argc, char** argv) {
  long cases = argc > 1 ? std::atol(argv[1]) : 2000;
  test_division();
  test_keys_past_a_view();
  test_bounds();
  test_untrusted_lists();
  test_every_small_band();
  test_far_offsets();
  test_longest_lengths();
  test_random_cases(cases);
  return check::summary();
}

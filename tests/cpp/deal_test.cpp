// The deal of chunks to thread blocks: every chunk is taken once, a piece of several is a tile's
// last ones, partial results have room of their own, and thread blocks end at about the same time.
#include "cuda/hopper/deal.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

#include "check.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::hopper;

namespace {

constexpr int32_t kBlocks = 132;
constexpr int32_t kNarrow = 128, kWide = 256;  // columns, with groups of chunks and without

/// Query tiles of `width` heads each, as long as a sequence's chunks ask for.
struct Tiles {
  int32_t width, columns;
  std::vector<Piece> all;
  int64_t visited = 0;  // key tiles

  void add(int32_t visits, int32_t chunks) {
    const int32_t length = std::max(1, ceil_div(visits, chunks));
    const auto number = static_cast<int32_t>(all.size());
    Piece tile = {number * width, 0, length, visits, 0, 0, -1, 1};
    tile.count = tile.chunks();
    all.push_back(tile);
    visited += int64_t{visits} * width;
  }
};

bool are_equal(const std::vector<Piece>& some, const std::vector<Piece>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                    [](const Piece& a, const Piece& b) {
                      return a.problem == b.problem && a.first == b.first && a.count == b.count &&
                             a.slot == b.slot && a.pieces == b.pieces;
                    });
}

struct Lists {
  std::vector<Piece> pieces;
  std::vector<Piece> merged;
};

/// Deals with so many threads. Each pass over them knows one more of their sums, so that the last
/// one knows all.
Lists deal_out(const Tiles& tiles, int32_t threads, int32_t slots = kSlotsOfBlock * kBlocks) {
  constexpr int32_t kSums = 5;
  const auto all = static_cast<int32_t>(tiles.all.size());
  Lists lists;
  Deal deal;
  deal.by_width = Divisor(tiles.width);
  deal.slots = slots;
  lists.pieces.resize(all + slots / tiles.width);
  lists.merged.resize(std::min(all, slots / (2 * tiles.width)));
  deal.pieces = lists.pieces.data();
  deal.merged = lists.merged.data();
  std::vector<std::vector<int32_t>> values(threads, std::vector<int32_t>(kSums));
  Dealt dealt = {};
  for (int32_t pass = 0; pass <= kSums; ++pass) {
    std::vector<Piece> own_tiles = tiles.all;
    deal.tiles = own_tiles.data();
    // Places are known in the last pass alone.
    std::vector<Piece> spare(pass < kSums ? 20 * all + 100 : 0);
    std::vector<Piece> spare_merged(spare.size());
    if (pass < kSums) deal.slots = slots;
    Deal pass_deal = deal;
    if (pass < kSums) {
      pass_deal.pieces = spare.data();
      pass_deal.merged = spare_merged.data();
    }
    const int32_t stretch = ceil_div(all, threads);
    for (int32_t t = 0; t < threads; ++t) {
      int32_t call = 0;
      auto sums = [&](int32_t value) {
        values[t][call] = value;
        struct {
          int32_t before, all;
        } sum = {0, 0};
        for (int32_t other = 0; other < threads; ++other) {
          if (other < t) sum.before += values[other][call];
          sum.all += values[other][call];
        }
        ++call;
        return sum;
      };
      const Interval own = {std::min(t * stretch, all), std::min((t + 1) * stretch, all)};
      dealt = deal_pieces(pass_deal, DealRule::of(tiles.visited, tiles.columns, kBlocks), all, own,
                          sums);
    }
  }
  CHECK(dealt.pieces <= static_cast<int32_t>(lists.pieces.size()), std::to_string(dealt.pieces));
  CHECK(dealt.merged <= static_cast<int32_t>(lists.merged.size()), std::to_string(dealt.merged));
  lists.pieces.resize(dealt.pieces);
  lists.merged.resize(dealt.merged);
  return lists;
}

/// Every chunk is in one piece, which has one sum, every piece of a cut tile has a slot of its own,
/// and the merge knows the last piece of each.
void test_chunks_are_taken_once(const Tiles& tiles, const Lists& lists, const std::string& text) {
  std::vector<std::vector<int32_t>> taken;
  for (const Piece& tile : tiles.all) taken.emplace_back(tile.chunks());
  std::vector<int32_t> slots(kSlotsOfBlock * kBlocks), last(tiles.all.size(), -1);
  for (size_t at = 0; at < lists.pieces.size(); ++at) {
    const Piece& piece = lists.pieces[at];
    const int32_t number = piece.problem / tiles.width;
    const int32_t chunks = tiles.all[number].chunks();
    for (int32_t c = 0; c < piece.count; ++c) ++taken[number].at(piece.first + c);
    CHECK(piece.count == 1 || piece.first + piece.count == chunks, text);
    const int32_t group = group_of(piece.visited, tiles.columns), in_group = piece.first % group;
    CHECK(in_group == 0 || piece.count <= group - in_group, text);
    CHECK((piece.slot < 0) == (piece.pieces == 1), text);
    if (piece.first + piece.count == chunks) last[number] = static_cast<int32_t>(at);
    for (int32_t i = 0; piece.slot >= 0 && i < tiles.width; ++i) {
      ++slots.at(piece.slot + i * piece.pieces + piece.first);
    }
  }
  for (const auto& tile : taken) {
    for (int32_t times : tile) CHECK(times == 1, text);
  }
  for (int32_t times : slots) CHECK(times <= 1, text);
  std::vector<Piece> merged, listed = lists.merged;
  for (int32_t at : last) {
    CHECK(at >= 0, text);
    if (lists.pieces[at].pieces > 1) merged.push_back(lists.pieces[at]);
  }
  std::sort(listed.begin(), listed.end(),
            [](const Piece& a, const Piece& b) { return a.problem < b.problem; });
  CHECK(are_equal(listed, merged), text);
}

/// Key tiles of the thread block that ends last, where each takes the next piece when it is free.
int64_t longest_block(const Tiles& tiles, const Lists& lists) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> ends;
  for (int32_t block = 0; block < kBlocks; ++block) ends.push(0);
  int64_t longest = 0;
  for (const Piece& piece : lists.pieces) {
    const int32_t begin = piece.first * piece.length;
    const int32_t visits = std::min(piece.count * piece.length, piece.visited - begin);
    for (int32_t i = 0; i < tiles.width; ++i) {
      const int64_t end = ends.top() + visits;
      ends.pop();
      ends.push(end);
      longest = std::max(longest, end);
    }
  }
  return longest;
}

/// Those of one length, in many numbers: no thread block has much more than its share, but for the
/// length of a chunk, and there is room for all results.
void test_tiles_of_one_length() {
  auto test = [](int32_t width, int32_t rows, int32_t visits, int32_t chunks, int32_t columns) {
    Tiles tiles = {width, columns, {}};
    for (int32_t row = 0; row < rows; ++row) tiles.add(visits, chunks);
    const Lists lists = deal_out(tiles, 1);
    const std::string text = std::to_string(rows) + " x " + std::to_string(width) + " tiles of " +
                             std::to_string(visits) + " in " + std::to_string(chunks) + ", " +
                             std::to_string(columns) + " columns";
    test_chunks_are_taken_once(tiles, lists, text);
    const auto share = static_cast<double>(tiles.visited) / kBlocks;
    const auto longest = static_cast<double>(longest_block(tiles, lists));
    const double most = 1.2 * share + tiles.all[0].length + 4;
    CHECK(longest <= most, text + ": " + std::to_string(longest) + " of " + std::to_string(share));
  };
  for (int32_t width : {1, 8, 32}) {
    for (int32_t rows = 1; rows * width <= 8 * kBlocks; rows += 1 + rows / 32) {
      for (int32_t visits : {8, 32, 128, 512, 1024}) {
        for (int32_t chunks : {8, 16}) {
          for (int32_t columns : {kNarrow, kWide}) test(width, rows, visits, chunks, columns);
        }
      }
    }
  }
}

/// A few long sequences beside many short ones do not run on alone.
void test_ragged_lengths() {
  for (int32_t width : {1, 8, 32}) {
    for (int32_t longs : {1, 2, 5}) {
      for (int32_t shorts : {0, 3, 15, 60}) {
        for (int32_t visits : {1, 8, 100}) {
          Tiles tiles = {width, kNarrow, {}};
          for (int32_t row = 0; row < longs; ++row) tiles.add(1024 - 100 * row, 16);
          for (int32_t row = 0; row < shorts; ++row) tiles.add(visits, visits < 8 ? 1 : 8);
          const std::string text = std::to_string(longs) + " long and " + std::to_string(shorts) +
                                   " of " + std::to_string(visits) + " x " + std::to_string(width);
          const Lists lists = deal_out(tiles, 1);
          test_chunks_are_taken_once(tiles, lists, text);
          const auto share = static_cast<double>(tiles.visited) / kBlocks;
          const auto longest = static_cast<double>(longest_block(tiles, lists));
          CHECK(longest <= 1.2 * share + 64, text + ": " + std::to_string(longest));
          for (int32_t threads : {2, 7, 100}) {
            const Lists same = deal_out(tiles, threads);
            const bool equal =
                are_equal(same.merged, lists.merged) && are_equal(same.pieces, lists.pieces);
            CHECK(equal, text + ", " + std::to_string(threads) + " threads");
          }
        }
      }
    }
  }
}

/// Tiles for whose results there is no room stay whole.
void test_few_slots() {
  for (int32_t slots : {0, 7, 8, 100, 128, 200}) {
    Tiles tiles = {4, kNarrow, {}};
    for (int32_t row = 0; row < 6; ++row) tiles.add(512, 16);
    const Lists lists = deal_out(tiles, 1, slots);
    test_chunks_are_taken_once(tiles, lists, std::to_string(slots) + " slots");
    const auto cut = static_cast<int32_t>(lists.merged.size());
    CHECK((cut > 0) == (slots >= 100), std::to_string(slots) + " slots");
    CHECK(cut * 2 * 4 <= slots, std::to_string(slots) + " slots");
  }
}

/// Empty tiles and those of one chunk are whole pieces; of no tile there is no piece.
void test_who_is_not_cut() {
  Tiles tiles = {8, kNarrow, {}};
  CHECK(deal_out(tiles, 3).pieces.empty(), "no tile");
  tiles.add(0, 16);
  tiles.add(2000, 1);
  const Lists lists = deal_out(tiles, 1);
  test_chunks_are_taken_once(tiles, lists, "an empty tile and one chunk");
  CHECK(lists.pieces.size() == 2 && lists.merged.empty(), "an empty tile and one chunk");
}

/// A tile's chunks are those of the same sequence's own call.
void test_chunks_of_a_sequence() {
  constexpr KernelTile kTile = {128, 128, 128, true, true, true};
  for (int32_t left : {kUnlimited, 3000}) {
    for (int32_t rows : {1, 17, 64, 65, 200, 500, 600, 1500}) {
      for (int32_t keys : {0, 100, 1024, 4097, 70000}) {
        for (bool causal : {false, true}) {
          AttentionParams params;
          params.problem.batch = 1;
          params.problem.seq_q = rows;
          params.problem.seq_kv = keys + 1000;  // a bound
          params.pattern.left = left;
          params.pattern.causal = causal;
          const Sequence sequence = {rows, keys, keys - rows};
          for (int32_t block = 0; block < ceil_div(rows, 128); ++block) {
            const Piece tile = whole_tile(params, sequence, 0, block, kTile);
            const KeySplit own =
                split_of_sequence(params.pattern, params.features, sequence, true, block, kTile);
            const std::string text = std::to_string(rows) + " on " + std::to_string(keys);
            CHECK(tile.count == tile.chunks() && tile.first == 0, text);
            CHECK(tile.visited <= most_visited(params.pattern, keys, kTile), text);
            const int32_t length =
                own.chunks == 0 ? imax(1, tile.visited) : own.chunk_tiles(tile.visited);
            CHECK(tile.length == length, text);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_tiles_of_one_length();
  test_ragged_lengths();
  test_few_slots();
  test_who_is_not_cut();
  test_chunks_of_a_sequence();
  return check::summary();
}

// The sections of calls whose keys Hopper lays out: they hold every key head of every entry once,
// within the memory, and find their part of each tensor.
#include "cuda/hopper/sections.h"

#include <algorithm>
#include <vector>

#include "check.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::hopper;

namespace {

AttentionParams case_of(int32_t batch, int32_t heads, int32_t keys) {
  AttentionParams params;
  params.problem = {batch, 4 * heads, heads, 100, keys, 128, 64, Dtype::kBFloat16};
  params.sequences.rows = 100;
  params.sequences.keys = keys;
  params.keys.dtype = Dtype::kFloat8;
  params.query = {reinterpret_cast<void*>(uintptr_t{1} << 40), int64_t{heads} * 51200, 12800, 128};
  params.keys.key = {reinterpret_cast<void*>(uintptr_t{1} << 41), int64_t{heads} * keys * 128,
                     int64_t{keys} * 128, 128};
  return params;
}

int64_t distance(const TensorView& from, const TensorView& to) {
  return static_cast<char*>(to.data) - static_cast<char*>(from.data);
}

void test_sections_hold_all_heads_once(int32_t batch, int32_t heads, int32_t keys) {
  const std::string text =
      std::to_string(batch) + " x " + std::to_string(heads) + " x " + std::to_string(keys);
  const AttentionParams params = case_of(batch, heads, keys);
  const Sections sections(params);
  const int64_t head_bytes = int64_t{keys} * (128 + 64) * 2;
  CHECK(sections.bytes() <= std::max(int64_t{256} << 20, head_bytes) + 512, text);
  std::vector<int32_t> held(int64_t{batch} * heads);
  for (int32_t section = 0; section < sections.count(); ++section) {
    const AttentionParams part = sections.part(section);
    const int64_t first = distance(params.keys.key, part.keys.key) / (int64_t{keys} * 128);
    CHECK(distance(params.query, part.query) == first * 4 * 12800 * 2, text);
    const AttentionParams call = sections.laid_out(part);
    const int64_t bytes = int64_t{part.problem.batch} * call.keys.key.stride_b * 2;
    CHECK(distance(call.keys.key, call.keys.value) >= bytes, text);
    CHECK(call.keys.dtype == Dtype::kBFloat16 && call.problem.group() == 4, text);
    for (int32_t b = 0; b < part.problem.batch; ++b) {
      for (int32_t h = 0; h < part.problem.heads_kv; ++h) ++held.at(first + int64_t{b} * heads + h);
    }
  }
  for (int32_t times : held) CHECK(times == 1, text);
}

void test_small_windows_on_many_sections() {
  AttentionParams params = case_of(8, 8, 1 << 16);
  CHECK(!is_cut_small(params), "all keys");
  params.pattern.left = 1024;
  params.pattern.causal = true;
  CHECK(is_cut_small(params), "a window");
  params.problem.batch = 1;
  CHECK(!is_cut_small(params), "few sections");
  params.problem.batch = 8;
  params.keys.dtype = Dtype::kBFloat16;
  CHECK(!is_cut_small(params), "keys that are not laid out");
}

void test_pages_of_many_readers() {
  AttentionParams params = case_of(1, 8, 1 << 16);
  const int32_t table = 0;
  params.keys.dtype = Dtype::kBFloat16;
  params.problem.seq_q = 2048;
  CHECK(!lays_out(params), "tensors");
  params.keys.table = &table;
  for (int32_t page_size : {16, 32, 48, 64, 80, 128}) {
    params.keys.page_size = page_size;
    CHECK(lays_out(params) == (page_size % 64 != 0), std::to_string(page_size));
  }
  params.keys.page_size = 16;
  params.pattern.left = 100;
  params.pattern.causal = true;
  CHECK(!lays_out(params), "a window of few rows");
  params.pattern.left = 1000;
  CHECK(lays_out(params), "a window of many");
  params.problem.batch = 64;
  CHECK(!lays_out(params), "many sections");
  params.problem.batch = 1;
  params.problem.seq_q = 100;
  CHECK(!lays_out(params), "few queries");
}

/// Rows of K and V of `columns` that follow each other, `gap` elements apart.
AttentionParams rows_of(int32_t columns, int32_t gap) {
  AttentionParams params = case_of(2, 8, 4096);
  params.problem.head_dim = params.problem.value_dim = columns;
  params.problem.seq_q = 2048;
  params.keys.dtype = Dtype::kBFloat16;
  const int64_t row = columns + gap;
  params.keys.key.stride_s = row;
  params.keys.key.stride_h = 4096 * row;
  params.keys.key.stride_b = 8 * 4096 * row;
  params.keys.value = params.keys.key;
  return params;
}

void test_rows_inside_sectors() {
  for (int32_t columns : {72, 104, 120, 128, 136, 144, 152, 160, 168, 184, 192, 200, 216, 248}) {
    const bool narrow = (columns > 128 && columns <= 160) || (columns > 192 && columns <= 224);
    const bool slow = columns == 104 || columns == 168;
    const std::string text = std::to_string(columns) + " columns";
    CHECK(lays_out(rows_of(columns, 0)) == ((narrow || slow) && columns % 16 != 0), text);
    CHECK(lays_out(rows_of(columns, 8)) == (narrow && columns % 16 == 0), text);
  }
  AttentionParams params = rows_of(136, 0);
  params.problem.seq_q = 500;
  CHECK(!lays_out(params), "few queries");
  params = rows_of(136, 0);
  params.problem.heads_q = 8;
  CHECK(lays_out(params), "as many rows as pay");
  params.pattern.causal = true;
  CHECK(!lays_out(params), "half of them");
  params = rows_of(104, 0);
  params.problem.heads_q = 8;
  CHECK(!lays_out(params), "half of the rows that pay at 104 columns");
  params = rows_of(136, 8);
  CHECK(!lays_out(params), "rows of whole sectors");
  params.keys.value.stride_h += 8;
  CHECK(lays_out(params), "heads of values inside sectors");
}

void test_laid_out_rows_are_whole_sectors() {
  for (int32_t columns : {40, 136, 144, 216}) {
    AttentionParams params = rows_of(columns, 0);
    const Sections sections(params);
    const AttentionParams call = sections.laid_out(sections.part(0));
    const int32_t unit = columns % 16 == 0 ? 16 : 32;  // one sector, or two
    const int64_t row = ceil_div(columns, unit) * unit;
    for (const TensorView& tensor : {call.keys.key, call.keys.value}) {
      CHECK(tensor.stride_s == row && tensor.stride_h == 4096 * row, std::to_string(columns));
      CHECK(!straddles_sectors(tensor), std::to_string(columns));
    }
    CHECK(distance(call.keys.key, call.keys.value) >= 2 * 8 * 4096 * row * 2,
          std::to_string(columns));
    CHECK(sections.bytes() >= 2 * 2 * 8 * 4096 * row * 2, std::to_string(columns));
  }
}

}  // namespace

int main() {
  for (int32_t batch : {1, 3, 9}) {
    for (int32_t heads : {1, 8, 10}) {
      for (int32_t keys : {64, 5000, 1 << 16, 1 << 20}) {
        test_sections_hold_all_heads_once(batch, heads, keys);
      }
    }
  }
  test_small_windows_on_many_sections();
  test_pages_of_many_readers();
  test_rows_inside_sectors();
  test_laid_out_rows_are_whole_sectors();
  return check::summary();
}

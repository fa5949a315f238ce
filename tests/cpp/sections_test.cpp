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
  return check::summary();
}

// Groups as ranges and codes: (k - least) / (greatest - least) in steps, by channel. Threads share
// groups.
#include "cpu/select/sketch.h"

#include <algorithm>
#include <cstring>

#include "cpu/float8_numbers.h"
#include "cpu/rows.h"
#include "cpu/tensor_rows.h"

namespace sparse_attn::cpu {
namespace {

Rows ranges_of(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head, int32_t row) {
  const char* data = static_cast<const char*>(sketch.ranges);
  return {data + sketch.ranges_at(entry, head, row) * size_of(dtype), sketch.head_dim,
          static_cast<Element>(dtype)};
}

SketchCodes codes_of(const SketchView& sketch, int64_t entry, int64_t head, int32_t begin,
                     int32_t count) {
  return {sketch.codes + sketch.codes_at(entry, head, begin), count, sketch.row_words(),
          ceil_div(sketch.head_dim, sketch.codes_of_word()), sketch.bits};
}

}  // namespace

void sketch_group(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head, int32_t first,
                  int32_t end, const KeyRow& key) {
  const VectorMath& math = vector_math();
  const int32_t head_dim = sketch.head_dim, count = end - first;
  const int64_t stride = round_up(head_dim, 16);
  float rows[kSketchGroup * kMaxHeadDim], least[kMaxHeadDim], greatest[kMaxHeadDim];
  for (int32_t r = 0; r < count; ++r) {
    math.to_float(static_cast<Element>(dtype), key(first + r), rows + r * stride, head_dim);
  }
  math.sketch.range(rows, stride, count, head_dim, least, greatest);
  const Rows ranges = ranges_of(sketch, dtype, entry, head, first);
  char* target = static_cast<char*>(const_cast<void*>(ranges.data));
  math.from_float(ranges.element, least, 1.0f, target, head_dim);
  math.from_float(ranges.element, greatest, 1.0f, target + int64_t{head_dim} * size_of(dtype),
                  head_dim);
  math.sketch.codes(rows, stride, count, head_dim, sketch.bits, least, greatest,
                    sketch.codes + sketch.codes_at(entry, head, first), sketch.row_words());
}

void sketch_ranges(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head, int32_t row,
                   float* least, float* greatest) {
  const VectorMath& math = vector_math();
  const Rows ranges = ranges_of(sketch, dtype, entry, head, row);
  math.to_float(ranges.element, ranges.data, least, sketch.head_dim);
  math.to_float(ranges.element, strided(ranges, 1, 1).data, greatest, sketch.head_dim);
}

void add_sketched_keys(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head,
                       int32_t begin, int32_t count, float* sum) {
  float least[kMaxHeadDim], greatest[kMaxHeadDim], codes[kMaxChannels];
  sketch_ranges(sketch, dtype, entry, head, begin, least, greatest);
  vector_math().sketch.sums(codes_of(sketch, entry, head, begin, count), codes);
  const auto keys = static_cast<float>(count);
  for (int32_t d = 0; d < sketch.head_dim; ++d) {
    sum[d] += keys * sketch.number(codes[d] / keys, least[d], greatest[d]);
  }
}

void sketch_scores(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head,
                   int32_t begin, int32_t count, SketchQueries queries, float* scores,
                   int64_t stride) {
  const VectorMath& math = vector_math();
  float least[kMaxHeadDim], greatest[kMaxHeadDim];
  const int64_t padded = round_up(sketch.head_dim, 16);
  std::fill(least + sketch.head_dim, least + padded, 0.0f);
  std::fill(greatest + sketch.head_dim, greatest + padded, 0.0f);
  sketch_ranges(sketch, dtype, entry, head, begin, least, greatest);
  math.sketch.scores(codes_of(sketch, entry, head, begin, count), least, greatest, queries.rows,
                     kMaxHeadDim, queries.count, scores, stride);
}

namespace {

/// New tokens of a batch entry and key head, and the keys of its group that is not full.
struct NewTokens {
  const SketchAppendParams& params;
  int64_t batch, head;
  Interval added;
  int64_t row_bytes;
  Rows keys;
  char* open;

  NewTokens(const SketchAppendParams& params, int64_t item)
      : params(params),
        batch(item / params.sketch.heads),
        head(item % params.sketch.heads),
        added(params.added(batch)),
        row_bytes(int64_t{params.sketch.head_dim} * size_of(params.dtype)),
        keys(rows_of(params.key, params.dtype, batch, head)),
        open(static_cast<char*>(params.open_keys) + item * kSketchGroup * row_bytes) {}

  /// Where the first group of new tokens alone begins.
  int32_t first_whole() const {
    return static_cast<int32_t>(round_up(int64_t{added.begin}, kSketchGroup));
  }
  void write_group(int32_t first, int32_t end, const KeyRow& key) const {
    sketch_group(params.sketch, params.dtype, batch, head, first, end, key);
  }
  void keep(Interval tokens) const {
    for (int32_t j = tokens.begin; j < tokens.end; ++j) {
      std::memcpy(open + j % kSketchGroup * row_bytes, strided(keys, j - added.begin, 1).data,
                  row_bytes);
    }
  }
  void extend_open() const {
    const Interval tokens = {added.begin, imin(added.end, first_whole())};
    if (tokens.empty()) return;
    keep(tokens);
    write_group(tokens.begin / kSketchGroup * kSketchGroup, tokens.end,
                [&](int32_t j) { return open + j % kSketchGroup * row_bytes; });
  }
  /// Groups of new tokens alone, among the tokens.
  void write_groups(Interval tokens) const {
    for (int32_t j = tokens.begin; j < tokens.end; j += kSketchGroup) {
      const int32_t end = imin(j + kSketchGroup, tokens.end);
      write_group(j, end, [&](int32_t j) { return strided(keys, j - added.begin, 1).data; });
      if (end % kSketchGroup != 0) keep({j, end});
    }
  }
};

}  // namespace

Status append_to_sketch(const SketchAppendParams& params) {
  constexpr int32_t kTokensPerTurn = 16 * kSketchGroup;
  const int64_t heads = params.sketch.heads, entries = params.batch * heads;
  bool extends = false, begins = false;  // open groups, and groups of new tokens alone
  for (int64_t batch = 0; batch < params.batch; ++batch) {
    const NewTokens tokens(params, batch * heads);
    extends |= tokens.added.begin < tokens.first_whole();
    begins |= tokens.first_whole() < tokens.added.end;
  }
  bool ran = true;
  if (extends) {  // before the new open group takes the place of the old one
    ran = for_each_item(num_workers(), entries,
                        [&](int32_t, int64_t item) { NewTokens(params, item).extend_open(); });
  }
  if (ran && begins) {
    const int64_t turns = ceil_div(params.tokens, kTokensPerTurn);
    ran = for_each_item(num_workers(), entries * turns, [&](int32_t, int64_t turn) {
      const NewTokens tokens(params, turn / turns);
      const int32_t first =
          tokens.first_whole() + static_cast<int32_t>(turn % turns) * kTokensPerTurn;
      tokens.write_groups({first, imin(first + kTokensPerTurn, tokens.added.end)});
    });
  }
  if (!ran) return {1, "the thread pool failed"};
  for (int32_t batch = 0; batch < params.batch; ++batch) {
    params.lengths[batch] = params.added(batch).end;
  }
  return {};
}

Status sketch_pages(const SketchPagesParams& params) {
  const SketchView& sketch = params.sketch;
  return for_each_row(params.num_slots, [&](int64_t at) {
    const int64_t slot = params.slots[at];
    if (!params.exists(slot)) return;
    // Mostly the next slot is of the same group, which spares looking at all of them.
    if (at + 1 < params.num_slots && !params.ends_group_beside(at, at + 1)) return;
    for (int64_t other = 0; other < params.num_slots; ++other) {
      if (!params.ends_group_beside(at, other)) return;
    }
    const int64_t page = slot / sketch.rows;
    const int32_t row = static_cast<int32_t>(slot % sketch.rows);
    const int32_t first = row / sketch.group * sketch.group;
    params.lengths[sketch.length_at(page, row)] = row + 1 - first;
    for (int64_t head = 0; head < sketch.heads; ++head) {
      if (!params.float8) {
        const Rows keys = rows_of(params.cache, params.dtype, page, head);
        sketch_group(sketch, params.dtype, page, head, first, row + 1,
                     [&](int32_t j) { return strided(keys, j, 1).data; });
        continue;
      }
      const Float8Numbers numbers(params.dtype, params.scale.at(0, head));
      uint16_t keys[kSketchGroup * kMaxHeadDim];
      auto key = [&](int32_t j) { return keys + int64_t{j - first} * sketch.head_dim; };
      for (int32_t j = first; j <= row; ++j) {
        const int64_t place =
            page * params.cache.stride_b + head * params.cache.stride_h + j * params.cache.stride_s;
        numbers.write(static_cast<const char*>(params.cache.data) + place, sketch.head_dim, key(j));
      }
      sketch_group(sketch, params.dtype, page, head, first, row + 1, key);
    }
  });
}

}  // namespace sparse_attn::cpu

// Groups as ranges and codes: (k - least) / (greatest - least) in steps, by channel. Threads share
// groups.
#include "cpu/select/sketch.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/rows.h"
#include "cpu/tiled/keys.h"

namespace sparse_attn::cpu {
namespace {

Rows ranges_of(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head, int32_t row) {
  const char* data = static_cast<const char*>(sketch.ranges);
  return {data + sketch.ranges_at(entry, head, row) * size_of(dtype), sketch.head_dim,
          static_cast<Element>(dtype)};
}

void write_codes(const SketchView& sketch, const float* key, const float* least,
                 const float* greatest, uint32_t* words) {
  std::memset(words, 0, sketch.row_words() * sizeof(uint32_t));
  const int32_t per_word = sketch.codes_of_word();
  for (int32_t d = 0; d < sketch.head_dim; ++d) {
    words[d / per_word] |= sketch.code(key[d], least[d], greatest[d])
                           << sketch.bit_of(d % per_word);
  }
}

}  // namespace

void sketch_group(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head, int32_t first,
                  int32_t end, const KeyRow& key) {
  const VectorMath& math = vector_math();
  const int32_t head_dim = sketch.head_dim;
  float rows[kSketchGroup][kMaxHeadDim], least[kMaxHeadDim], greatest[kMaxHeadDim];
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  std::fill(least, least + head_dim, kNone);
  std::fill(greatest, greatest + head_dim, kNone);
  for (int32_t r = 0; r < end - first; ++r) {
    math.to_float(static_cast<Element>(dtype), key(first + r), rows[r], head_dim);
    for (int32_t d = 0; d < head_dim; ++d) {
      least[d] = std::fmin(least[d], rows[r][d]);  // of numbers
      greatest[d] = std::fmax(greatest[d], rows[r][d]);
    }
  }
  Rows ranges = ranges_of(sketch, dtype, entry, head, first);
  char* target = static_cast<char*>(const_cast<void*>(ranges.data));
  math.from_float(ranges.element, least, 1.0f, target, head_dim);
  math.from_float(ranges.element, greatest, 1.0f, target + int64_t{head_dim} * size_of(dtype),
                  head_dim);
  for (int32_t r = 0; r < end - first; ++r) {
    write_codes(sketch, rows[r], least, greatest,
                sketch.codes + sketch.codes_at(entry, head, first + r));
  }
}

void sketch_scores(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head,
                   int32_t begin, int32_t end, const float* query, float* scores) {
  const VectorMath& math = vector_math();
  const int32_t head_dim = sketch.head_dim, per_word = sketch.codes_of_word();
  const uint32_t mask = sketch.levels();
  float least[kMaxHeadDim], steps[kMaxHeadDim], base = 0.0f;
  const Rows ranges = ranges_of(sketch, dtype, entry, head, begin);
  math.to_float(ranges.element, ranges.data, least, head_dim);
  math.to_float(ranges.element, strided(ranges, 1, 1).data, steps, head_dim);
  for (int32_t d = 0; d < head_dim; ++d) {
    base += query[d] * least[d];
    steps[d] = query[d] * ((steps[d] - least[d]) / static_cast<float>(mask));
  }
  for (int32_t j = begin; j < end; ++j) {
    const uint32_t* words = sketch.codes + sketch.codes_at(entry, head, j);
    float score = base;
    for (int32_t d = 0; d < head_dim; ++d) {
      const uint32_t code = words[d / per_word] >> sketch.bit_of(d % per_word) & mask;
      score += steps[d] * static_cast<float>(code);
    }
    scores[j - begin] = score;
  }
}

Status append_to_sketch(const SketchAppendParams& params) {
  const SketchView& sketch = params.sketch;
  const int64_t row_bytes = int64_t{sketch.head_dim} * size_of(params.dtype);
  Status status = for_each_row(int64_t{params.batch} * sketch.heads, [&](int64_t item) {
    const int64_t batch = item / sketch.heads, head = item % sketch.heads;
    const Interval added = params.added(batch);
    const Rows keys = rows_of(params.key, params.dtype, batch, head);
    char* open = static_cast<char*>(params.open_keys) + item * kSketchGroup * row_bytes;
    auto new_key = [&](int32_t j) { return strided(keys, j - added.begin, 1).data; };
    auto keep = [&](int32_t j) {
      std::memcpy(open + j % kSketchGroup * row_bytes, new_key(j), row_bytes);
    };
    int32_t j = added.begin;
    const int32_t open_end = imin(added.end, static_cast<int32_t>(round_up(j, kSketchGroup)));
    if (j < open_end) {
      const int32_t first = j / kSketchGroup * kSketchGroup;
      for (; j < open_end; ++j) keep(j);
      sketch_group(sketch, params.dtype, batch, head, first, open_end,
                   [&](int32_t j) { return open + j % kSketchGroup * row_bytes; });
    }
    for (; j < added.end; j += kSketchGroup) {
      const int32_t end = imin(j + kSketchGroup, added.end);
      sketch_group(sketch, params.dtype, batch, head, j, end, new_key);
      if (end % kSketchGroup == 0) continue;
      for (int32_t kept = j; kept < end; ++kept) keep(kept);
    }
  });
  for (int32_t batch = 0; batch < params.batch; ++batch) {
    params.lengths[batch] = params.added(batch).end;
  }
  return status;
}

Status sketch_pages(const SketchPagesParams& params) {
  const SketchView& sketch = params.sketch;
  return for_each_row(params.num_slots, [&](int64_t at) {
    const int64_t slot = params.slots[at];
    if (!params.exists(slot)) return;
    for (int64_t other = 0; other < params.num_slots; ++other) {
      if (!params.ends_group_beside(at, other)) return;
    }
    const int64_t page = slot / sketch.rows;
    const int32_t row = static_cast<int32_t>(slot % sketch.rows);
    const int32_t first = row / sketch.group * sketch.group;
    for (int64_t head = 0; head < sketch.heads; ++head) {
      const Rows keys = rows_of(params.cache, params.dtype, page, head);
      sketch_group(sketch, params.dtype, page, head, first, row + 1,
                   [&](int32_t j) { return strided(keys, j, 1).data; });
    }
  });
}

}  // namespace sparse_attn::cpu

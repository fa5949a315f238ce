// The key sketch on the CPU: groups of tokens as ranges and codes, and a row's scores from them.
#pragma once

#include <functional>

#include "cpu/vector/vector_math.h"
#include "sketch_params.h"

namespace sparse_attn::cpu {

/// Calls visit(part) for the part of each group that lies in `keys`.
template <class Visit>
void for_each_group(const SketchView& sketch, Interval keys, const Visit& visit) {
  for (Interval part = {keys.begin, keys.begin}; part.end < keys.end;) {
    part = {part.end, sketch.end_of_group(part.end, keys.end)};
    visit(part);
  }
}

/// Where the key of a token lies.
using KeyRow = std::function<const void*(int32_t)>;

/// Sketches the tokens [first, end) of entry and head, all of one group, as its only ones.
void sketch_group(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head, int32_t first,
                  int32_t end, const KeyRow& key);

/// The least and the greatest elements of the group that holds a row.
void sketch_ranges(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head, int32_t row,
                   float* least, float* greatest);

/// sum += the sketched keys of `count` rows from `begin` on, all of one group.
void add_sketched_keys(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head,
                       int32_t begin, int32_t count, float* sum);

/// Rows in float32, each followed by zeros up to kMaxHeadDim.
struct SketchQueries {
  const float* rows = nullptr;
  int32_t count = 0;
};

/// scores[query, j - begin] = query . sketched key j, for `count` rows from `begin` on, all of one
/// group and both multiples of 16. Rows that hold no token get a score too, of any value.
void sketch_scores(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head,
                   int32_t begin, int32_t count, SketchQueries queries, float* scores,
                   int64_t stride);

Status append_to_sketch(const SketchAppendParams& params);
Status sketch_pages(const SketchPagesParams& params);

}  // namespace sparse_attn::cpu

// The key sketch on the CPU: groups of tokens as ranges and codes, and a row's scores from them.
#pragma once

#include "cpu/vector/vector_math.h"
#include "sketch_params.h"

namespace sparse_attn::cpu {

/// Sketches the tokens [first, end) of entry and head as the first ones of their group or, where
/// `first` lies inside, as the only ones. Row 0 of `keys` is that of `first`.
void sketch_group(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head, int32_t first,
                  int32_t end, const Rows& keys);

/// scores[j] = query . sketched key j, for the tokens [begin, end) of an entry and head.
void sketch_scores(const SketchView& sketch, Dtype dtype, int64_t entry, int64_t head,
                   int32_t begin, int32_t end, const float* query, float* scores);

Status append_to_sketch(const SketchAppendParams& params);
Status sketch_pages(const SketchPagesParams& params);

}  // namespace sparse_attn::cpu

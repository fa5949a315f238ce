// The tensors of a key sketch, checked.
#pragma once

#include "arguments.h"

namespace sparse_attn {

/// What a sketch is of: entries are batch entries, or pages of `page_size` rows.
struct SketchShape {
  int64_t entries = 0, heads = 0, head_dim = 0;
  int64_t page_size = 0;  // 0: of batch entries, any number of rows
};

/// The view of checked tensors; `key` says their type and device, `name` what sentences call it.
SketchView check_sketch(const std::string& op, const SketchShape& shape, const Tensor& codes,
                        const Tensor& ranges, const Tensor& key, const char* name);

/// The tokens that a sketch holds, int32: (batch), of pages (entries, groups of a page).
int32_t* check_sketch_lengths(const std::string& op, const SketchView& view, int64_t entries,
                              const Tensor& lengths, const Tensor& key, const char* name);

/// How many tokens a group of a page has.
int32_t sketch_group_of(int64_t page_size);

}  // namespace sparse_attn

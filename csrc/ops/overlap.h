// Whether an output shares memory with an input, or with itself.
#pragma once

#include <utility>
#include <vector>

#include "arguments.h"

namespace sparse_attn {

using NamedTensor = std::pair<const char*, const Tensor*>;

/// Raises if `out` overlaps itself or one of `others`.
void check_no_overlap(const std::string& op, const char* name, const Tensor& out,
                      const std::vector<NamedTensor>& others);

/// The same with the tensor arguments of an attention call.
void check_no_overlap(const std::string& op, const char* name, const Tensor& out,
                      const CallArguments& args);

}  // namespace sparse_attn

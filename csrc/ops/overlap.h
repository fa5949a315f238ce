// Whether an output shares memory with an input, or with itself.
#pragma once

#include "arguments.h"

namespace sparse_attn {

/// Raises if `out` overlaps a tensor argument of the call or itself.
void check_no_overlap(const std::string& op, const char* name, const Tensor& out,
                      const CallArguments& args);

}  // namespace sparse_attn

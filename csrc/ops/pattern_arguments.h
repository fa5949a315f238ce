// The checks of pattern arguments.
#pragma once

#include "arguments.h"

namespace sparse_attn {

/// Fills params.pattern (and what it points to) from the arguments of an op of this kind.
void fill_pattern(const std::string& op, PatternKind kind, const CallArguments& args,
                  CheckedCall* call);

}  // namespace sparse_attn

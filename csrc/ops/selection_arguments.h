// The checks of what chooses blocks: `block_topk` and `select_blocks`.
#pragma once

#include "arguments.h"

namespace sparse_attn {

/// Fills blocks, selector, budget and forced blocks of a selection.
void fill_selection(const std::string& op, const CallArguments& args, CheckedSelection* selection);

}  // namespace sparse_attn

// What says which sequences a call has: lengths, offsets, origins, and the table of pages.
#pragma once

#include "arguments.h"

namespace sparse_attn {

/// Makes (batch, heads, length, head_dim) views of packed tensors (their batch is 1) and of caches
/// (their batch is the pages), so that all that follows reads one layout.
void view_sequences(const std::string& op, Holding holding, CallArguments* args);

/// A packed output or its lse as such a view; others as they are.
Tensor view_of_output(bool packed, const Tensor& output);

/// Sizes of the call; lengths are upper bounds where the device alone knows them.
Problem problem_of(const std::string& op, const CallArguments& args);

/// Checks what places queries and keys; `offsets` keeps those that have to be made.
Sequences check_sequences(const std::string& op, const Problem& problem, const CallArguments& args,
                          MaybeTensor* offsets);

/// Checks the table of pages and the scales of keys of 8 bits, and fills all of `keys`; a selection
/// has no values.
KeySource check_keys(const std::string& op, const Problem& problem, const CallArguments& args);

}  // namespace sparse_attn

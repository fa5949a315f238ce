// What the host can see of lengths and tables, which is their contents where they lie on the CPU.
// On a GPU nothing is looked at: Sequences and KeySource cut what only the device knows.
#pragma once

#include "arguments.h"

namespace sparse_attn {

/// Checks starts and lengths of packed and paged sequences, of the right shapes, on the CPU.
void check_lengths_on_host(const std::string& op, const Problem& problem,
                           const Sequences& sequences, const CallArguments& args);

/// Checks that a layout has the blocks of the longest sequence, on the CPU: rows past it would see
/// no key.
void check_blocks_on_host(const std::string& op, const Problem& problem, const Sequences& sequences,
                          const BlockList& list, const CallArguments& args);

/// Checks the table's entries of the pages that sequences use, on the CPU.
void check_pages_on_host(const std::string& op, const Problem& problem, const KeySource& keys,
                         const CallArguments& args);

/// Checks that scales of keys, values or caches are above 0 and finite, on the CPU.
void check_scales_on_host(const std::string& op, const char* name, const Tensor& scale);

/// The scale of a cache (pages, page_size, heads, head_dim) of 8 bits, or of each of its heads;
/// `like` is what sentences call a tensor of its device.
ScaleView check_cache_scale(const std::string& op, const char* name, const MaybeTensor& scale,
                            const Tensor& cache, const char* like);

}  // namespace sparse_attn

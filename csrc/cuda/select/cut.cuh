// Where a list ends that is chosen by number alone; read by choose_count.cu and choose_step.cu.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda {

constexpr uint32_t kFirst = ~0u;  // of forced blocks, above the key of every score

/// Kept are the keys above `key`, and the first `equal` ones of those equal to it.
struct Cut {
  uint32_t key = 0, equal = 0;
};

}  // namespace sparse_attn::cuda

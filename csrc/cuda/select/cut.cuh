// Where a list ends that is chosen by number alone; read by choose_count.cu and choose_step.cu.
#pragma once

#include <cstdint>

namespace sparse_attn::cuda {

/// Kept are the keys above `key`, and the first `equal` ones of those equal to it.
struct Cut {
  uint32_t key = 0, equal = 0;
};

}  // namespace sparse_attn::cuda

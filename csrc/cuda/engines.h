// The CUDA engines and tools, for ops/ to choose from. Each is defined in the folder of its name.
#pragma once

#include "../engine.h"

namespace sparse_attn::cuda {

extern const Engine kNaive;
extern const Engine kPortable;
extern const Engine kDecode;
extern const Engine kSmall;
extern const Engine kHopper;
extern const Tools kTools;

}  // namespace sparse_attn::cuda

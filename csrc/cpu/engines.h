// The CPU engines and tools that ops/ picks from by name.
#pragma once

#include "engine.h"

namespace sparse_attn::cpu {

extern const Engine kNaive;
extern const Engine kTiled;
extern const Tools kTools;

}  // namespace sparse_attn::cpu

// Which engine serves a case, and why faster ones stand aside. The one rule for ops/ (which obeys
// it) and info/ (which tells it to Python); knows neither torch nor CUDA.
#pragma once

#include <string>
#include <vector>

#include "params.h"

namespace sparse_attn {

/// What a choice of engine depends on.
struct Case {
  bool cuda = false;
  int32_t sm = 0;  // compute capability, 90 for 9.0; 0 on the CPU
  Dtype dtype = Dtype::kFloat32;
  int32_t head_dim = 0, seq_q = 0, seq_kv = 0;
  bool aligned = true;             // pointers and strides of q, k, v, out are multiples of 16 bytes
  bool dense_mask = false;         // attn_mask given
  bool scattered_globals = false;  // global tokens given as an index tensor
  bool topk = false;
  bool key_bounds = false;
  float scale = 1.0f, softcap = 0.0f;
  int32_t block_q = 0, block_kv = 0;  // of a block list; 0 without
};

/// The engine's name, empty when none serves the case; one sentence for each that stood aside, and
/// one for what slows the engine down.
struct Choice {
  std::string engine;
  std::vector<std::string> reasons;
};

/// Names of the device's engines, fastest first.
const std::vector<std::string>& engine_names(bool cuda);

/// The fastest engine that serves the case, or the requested one ("auto" asks for the fastest).
Choice choose_engine(const Case& c, const std::string& requested);

}  // namespace sparse_attn

// Which engine serves a call, and why faster ones are skipped. The one rule for the ops, which obey
// it and tell it to Python; knows neither torch nor CUDA.
#pragma once

#include <string>
#include <vector>

#include "params.h"

namespace sparse_attn {

/// Queries that the decode engine takes at most, and that may have a list each.
constexpr int32_t kFewQueries = 16;

/// What a choice of engine depends on.
struct Case {
  bool cuda = false;
  int32_t sm = 0;  // compute capability, 90 for 9.0; 0 on the CPU
  Problem problem;
  Features features;
  int32_t block_q = 0;      // of a block list; 0 without
  int32_t topk = 0;         // keys that token top-k keeps; 0 without
  int32_t packed_keys = 0;  // of all sequences, where they are packed
  bool may_split = false;   // some sequence may be one that hopper would split (key_split.h)
  bool cut_small = false;   // hopper would lay out keys in many small sections (sections.h)
};

/// The engine's name, empty when none serves the case; one sentence for each that was skipped, and
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

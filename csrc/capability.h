// What each engine accepts, and the sentence for what it does not. Knows neither torch nor CUDA.
#pragma once

#include <string>
#include <vector>

#include "params.h"

namespace sparse_attn {

/// Queries that the decode engine takes at most, and that may have a list each.
constexpr int32_t kFewQueries = 16;

/// What it depends on whether an engine serves a call.
struct Case {
  bool cuda = false;
  int32_t sm = 0;  // compute capability, 90 for 9.0; 0 on the CPU
  Problem problem;
  Features features;
  int32_t block_q = 0;      // of a block list; 0 without
  int32_t topk = 0;         // keys that token top-k keeps; 0 without
  int32_t packed_keys = 0;  // length of key: of all sequences, where they are packed
  bool may_split = false;   // some sequence may be one that hopper would split (key_split.h)
  bool cut_small = false;   // hopper would lay out keys in many small sections (sections.h)
};

/// Whether two calls are alike to all engines.
bool operator==(const Case& a, const Case& b);

/// Names of the device's engines, fastest first.
const std::vector<std::string>& engine_names(bool cuda);

/// The first feature that is not listed, as the words that follow "takes no"; empty when all are.
std::string unlisted(Features features, Features listed);

/// Why the engine of that name does not serve the case, a sentence; empty when it does.
std::string refusal(const std::string& name, const Case& c);

/// A compute capability as people write it: 9.0 for 90.
std::string capability_of(int32_t sm);

}  // namespace sparse_attn

// Which engine serves a call, and why faster ones are skipped. The one rule for the ops, which obey
// it and tell it to Python.
#pragma once

#include <string>
#include <vector>

#include "capability.h"

namespace sparse_attn {

/// The engine's name, empty when none serves the case; one sentence for each that was skipped, and
/// one for what slows the engine down.
struct Choice {
  std::string engine;
  std::vector<std::string> reasons;
};

/// The fastest engine that serves the case, or the requested one ("auto" asks for the fastest).
Choice choose_engine(const Case& c, const std::string& requested);

}  // namespace sparse_attn

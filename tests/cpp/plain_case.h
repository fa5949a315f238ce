// A plain call, and the engine that serves it: for the tests of capability.h and choice.h.
#pragma once

#include "capability.cpp"
#include "choice.cpp"

namespace sparse_attn {

inline Case plain_case(int32_t sm, int32_t head_dim, Dtype dtype = Dtype::kBFloat16) {
  Case c;
  c.cuda = sm > 0;
  c.sm = sm;
  c.problem.batch = c.problem.heads_q = c.problem.heads_kv = 1;
  c.problem.seq_q = c.problem.seq_kv = 300;
  c.problem.head_dim = c.problem.value_dim = head_dim;
  c.problem.dtype = dtype;
  c.features.add(Feature::kFloat32, dtype == Dtype::kFloat32);
  return c;
}

inline std::string engine_of(const Case& c, const char* requested = "auto") {
  return choose_engine(c, requested).engine;
}

}  // namespace sparse_attn

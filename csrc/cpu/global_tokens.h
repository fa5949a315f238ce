// Scattered global tokens: from an index tensor in any order, with repeats and entries that name no
// key, to a bit per key and the ascending list of distinct keys. Built once per call.
#pragma once

#include <cstdint>
#include <cstring>

#include "params.h"

namespace sparse_attn::cpu {

struct GlobalTokens {
  uint32_t* bits = nullptr;  // [ceil(Skv / 32)]
  int32_t* list = nullptr;   // [min(num_global_tokens, Skv)]
  int32_t* count = nullptr;  // [1]

  static int64_t words(const AttentionParams& params) { return (params.problem.seq_kv + 31) / 32; }

  void build(const AttentionParams& params) {
    std::memset(bits, 0, words(params) * sizeof(uint32_t));
    for (int32_t i = 0; i < params.num_global_tokens; ++i) {
      int32_t j = params.global_tokens[i];
      if (j >= 0 && j < params.problem.seq_kv) bits[j >> 5] |= 1u << (j & 31);
    }
    *count = 0;
    for (int64_t word = 0; word < words(params); ++word) {
      for (uint32_t rest = bits[word]; rest != 0; rest &= rest - 1) {
        list[(*count)++] = static_cast<int32_t>(word * 32 + __builtin_ctz(rest));
      }
    }
  }

  /// `pattern` with these tokens, listed as tiles of one key.
  Pattern attach(Pattern pattern) const {
    pattern.global_bits = bits;
    pattern.global_tiles = list;
    pattern.num_global_tiles = count;
    return pattern;
  }
};

}  // namespace sparse_attn::cpu

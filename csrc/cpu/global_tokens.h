// Scattered global tokens: from an index tensor in any order, with repeats and entries that name no
// key, to a bit per key and the ascending list of distinct keys. Built once per call.
#pragma once

#include <cstdint>
#include <cstring>

#include "arena.h"
#include "params.h"

namespace sparse_attn::cpu {

class GlobalTokens {
 public:
  /// Takes the room for a call's tokens, none for a call without.
  void take(const AttentionParams& params, Arena* arena) {
    if (params.global_tokens == nullptr) return;
    bits_ = arena->take<uint32_t>(words(params));
    list_ = arena->take<int32_t>(imin(params.num_global_tokens, params.problem.seq_kv));
    count_ = arena->take<int32_t>(1);
  }

  /// The call's pattern, its tokens sorted and listed as tiles of one key.
  Pattern marked_pattern(const AttentionParams& params) {
    Pattern pattern = params.pattern;
    if (params.global_tokens == nullptr) return pattern;
    sort(params);
    pattern.global_bits = bits_;
    pattern.global_tiles = list_;
    pattern.num_global_tiles = count_;
    return pattern;
  }

 private:
  static int64_t words(const AttentionParams& params) { return (params.problem.seq_kv + 31) / 32; }

  void sort(const AttentionParams& params) {
    std::memset(bits_, 0, words(params) * sizeof(uint32_t));
    for (int32_t i = 0; i < params.num_global_tokens; ++i) {
      int32_t j = params.global_tokens[i];
      if (j >= 0 && j < params.problem.seq_kv) bits_[j >> 5] |= 1u << (j & 31);
    }
    *count_ = 0;
    for (int64_t word = 0; word < words(params); ++word) {
      for (uint32_t rest = bits_[word]; rest != 0; rest &= rest - 1) {
        list_[(*count_)++] = static_cast<int32_t>(word * 32 + __builtin_ctz(rest));
      }
    }
  }

  uint32_t* bits_ = nullptr;  // [ceil(Skv / 32)]
  int32_t* list_ = nullptr;   // [min(num_global_tokens, Skv)]
  int32_t* count_ = nullptr;  // [1]
};

}  // namespace sparse_attn::cpu

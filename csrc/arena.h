// A workspace as consecutive pieces. One function of a call's parameters takes them: without a base
// it tells the size that ops/ allocates, with one it lays the pieces out.
#pragma once

#include <cstdint>

#include "interval.h"

namespace sparse_attn {

/// Hands out consecutive pieces of memory at multiples of kAlignment; counts without a base.
class Arena {
 public:
  static constexpr int64_t kAlignment = 256;  // bytes

  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += rounded(count * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }
  /// What a piece of so many bytes takes.
  static constexpr int64_t rounded(int64_t bytes) { return round_up(bytes, kAlignment); }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace sparse_attn

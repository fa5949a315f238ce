// Arguments of a cache write: rows of new keys and values, and the slot of the cache that takes
// each. Slot s is row s % page_size of page s / page_size. Slots outside the cache take nothing.
#pragma once

#include "params.h"

namespace sparse_attn {

/// The keys or the values of a write; the last dimensions are contiguous.
struct CacheRows {
  const void* rows = nullptr;  // [tokens, heads, head_dim]
  int64_t row_stride_t = 0, row_stride_h = 0;
  void* cache = nullptr;  // [pages, page_size, heads, head_dim]
  int64_t stride_page = 0, stride_slot = 0, stride_h = 0;
  int32_t head_dim = 0;
  ScaleView scale;  // of float8, [heads]: a row holds rows / scale
};

struct AppendParams {
  CacheRows key, value;
  const int64_t* slots = nullptr;  // [tokens]
  int64_t tokens = 0, pages = 0;
  int32_t page_size = 0, heads = 0;
  Dtype dtype = Dtype::kFloat32;  // of the rows, and of the cache unless it is float8
  bool float8 = false;
  void* stream = nullptr;
  int32_t device = 0;

  /// Row `head` of a token in the cache, in elements from its first; negative where it takes none.
  SPARSE_ATTN_HD int64_t place(const CacheRows& part, int64_t token, int32_t head) const {
    int64_t slot = slots[token];
    if (slot < 0 || slot >= pages * page_size) return -1;
    return slot / page_size * part.stride_page + slot % page_size * part.stride_slot +
           head * part.stride_h;
  }
};

}  // namespace sparse_attn

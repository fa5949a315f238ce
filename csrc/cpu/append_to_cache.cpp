// append_to_cache on the CPU: rows are copied to their slots, or divided by their scale and rounded
// to float8.
#include "append_to_cache.h"

#include <cstring>

#include "cpu/tensor_rows.h"
#include "cpu/vector/vector_math.h"
#include "float8.h"
#include "rows.h"

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kPiece = 256;  // elements of a row converted at a time

void quantize(const VectorMath& math, Element element, const char* row, float scale,
              int32_t head_dim, uint8_t* target) {
  float piece[kPiece];
  for (int32_t start = 0; start < head_dim; start += kPiece) {
    int32_t size = imin(kPiece, head_dim - start);
    math.to_float(element, row + start * bytes_of(element), piece, size);
    for (int32_t d = 0; d < size; ++d) target[start + d] = float8_from_float(piece[d] / scale);
  }
}

void write_row(const AppendParams& params, const CacheRows& part, int64_t token, int32_t head) {
  int64_t place = params.place(part, token, head);
  if (place < 0) return;
  int64_t from = token * part.row_stride_t + head * part.row_stride_h;
  int64_t size = size_of(params.dtype);
  const char* row = static_cast<const char*>(part.rows) + from * size;
  if (!params.float8) {
    std::memcpy(static_cast<char*>(part.cache) + place * size, row, part.head_dim * size);
    return;
  }
  float scale = part.scale.at(0, head);
  quantize(vector_math(), static_cast<Element>(params.dtype), row, scale, part.head_dim,
           static_cast<uint8_t*>(part.cache) + place);
}

}  // namespace

Status append_to_cache(const AppendParams& params) {
  return for_each_row(params.tokens, [&](int64_t token) {
    for (int32_t head = 0; head < params.heads; ++head) {
      write_row(params, params.key, token, head);
      write_row(params, params.value, token, head);
    }
  });
}

}  // namespace sparse_attn::cpu

// Candidates above a threshold that rises to the k-th highest score so far whenever they are many:
// what it shuts out is not above k candidates that came before it.
#include "cpu/topk/select_topk.h"

#include <algorithm>

namespace sparse_attn::cpu {
namespace {

constexpr int32_t kVector = 16;  // entries that a write may run over

}  // namespace

TopkRoom::TopkRoom(int32_t k, int64_t columns, int32_t chunk) : k(k) {
  int64_t many = int64_t{k} + std::max(k, 256);
  limit = static_cast<int32_t>(std::min(many, columns));
  most = k + (limit - k) / 4;
  // A line more than whole lines keeps rows out of the same cache sets.
  stride = (std::min(many + chunk, columns) + 2 * kVector - 1) / kVector * kVector + kVector;
}

void TopkRow::add(const VectorMath& math, const TopkRoom& room, const float* chunk, int32_t n,
                  int32_t first) {
  count += math.collect(chunk, n, threshold, first, scores + count, columns + count);
  if (count > room.limit) {
    count = math.keep_highest(scores, columns, count, room.k, room.most, &threshold);
  }
}

void TopkRow::finish(const VectorMath& math, const TopkRoom& room) {
  if (count <= room.k) return;
  count = math.keep_highest(scores, columns, count, room.k, room.k, &threshold);
}

}  // namespace sparse_attn::cpu

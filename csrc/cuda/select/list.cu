// list_from_mask: the true entries of each row of a block mask as an ascending list, in one pass, a
// warp a row: its lanes vote, and the votes before a lane are its place in the list.
#include "../common/launch.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kListWarps = 4;

/// Writes the entries 0 .. num for which listed(entry) holds, then zeros, and how many they are.
/// All lanes of a warp call it.
template <typename Listed>
__device__ __forceinline__ void write_list_row(int32_t num, const Listed& listed, int32_t* indices,
                                               int32_t* count) {
  const int lane = threadIdx.x % 32;
  int32_t written = 0;
  for (int32_t begin = 0; begin < num; begin += 32) {
    int32_t entry = begin + lane;
    uint32_t found = __ballot_sync(~0u, entry < num && listed(entry));
    if (found >> lane & 1) indices[written + __popc(found & ((1u << lane) - 1))] = entry;
    written += __popc(found);
  }
  for (int32_t entry = written + lane; entry < num; entry += 32) indices[entry] = 0;
  if (lane == 0) *count = written;
}

__global__ void __launch_bounds__(kListWarps * 32) list_rows(const ListParams params) {
  int64_t row = blockIdx.x * int64_t{kListWarps} + threadIdx.x / 32;
  if (row >= params.rows) return;
  const uint8_t* mask = params.mask + row * params.num_kv;
  write_list_row(
      params.num_kv, [&](int32_t j) { return mask[j] != 0; }, params.indices + row * params.num_kv,
      params.counts + row);
}

}  // namespace

Status list_from_mask(const ListParams& params) {
  int64_t blocks = ceil_div64(params.rows, kListWarps);
  list_rows<<<static_cast<uint32_t>(blocks), kListWarps * 32, 0, to_stream(params.stream)>>>(
      params);
  return launched();
}

}  // namespace sparse_attn::cuda

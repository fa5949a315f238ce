// list_from_mask: the true entries of each row of a block mask as an ascending list, in one pass. A
// warp takes a row; the lanes vote, and the bits before a lane are its place in the list.
#include "../common/launch.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(kWarps * 32) list_rows(const ListParams params) {
  int lane = threadIdx.x % 32;
  int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (row >= params.rows) return;
  const uint8_t* mask = params.mask + row * params.num_kv;
  int32_t* indices = params.indices + row * params.num_kv;
  int32_t count = 0;
  for (int32_t begin = 0; begin < params.num_kv; begin += 32) {
    int32_t j = begin + lane;
    uint32_t listed = __ballot_sync(~0u, j < params.num_kv && mask[j] != 0);
    if (listed >> lane & 1) indices[count + __popc(listed & ((1u << lane) - 1))] = j;
    count += __popc(listed);
  }
  for (int32_t entry = count + lane; entry < params.num_kv; entry += 32) indices[entry] = 0;
  if (lane == 0) params.counts[row] = count;
}

}  // namespace

Status list_from_mask(const ListParams& params) {
  int64_t blocks = ceil_div64(params.rows, kWarps);
  list_rows<<<static_cast<uint32_t>(blocks), kWarps * 32, 0, to_stream(params.stream)>>>(params);
  return launched();
}

}  // namespace sparse_attn::cuda

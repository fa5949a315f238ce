// list_from_mask: the true entries of each row of a block mask as an ascending list, in one pass, a
// warp a row.
#include "../common/launch.cuh"
#include "tools.h"
#include "warp_list.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int kListWarps = 4;

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

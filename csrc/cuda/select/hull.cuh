// From the first to the last key that some rows may see, found by a thread block.
#pragma once

#include "../../select_params.h"

namespace sparse_attn::cuda {

/// Shared memory of it.
struct HullStorage {
  int32_t first_key, end_key;
};

/// For the rows of `heads` heads from `head` on; all threads call it.
__device__ inline Interval hull_of_rows(const SelectParams& params, int64_t batch, int64_t head,
                                        int32_t heads, Interval rows, HullStorage& storage) {
  if (rows.empty()) return {};
  __syncthreads();
  if (threadIdx.x == 0) storage = {params.problem.seq_kv, 0};
  __syncthreads();
  const int32_t first = params.rows_grow() ? rows.end - 1 : rows.begin;
  for (int32_t at = threadIdx.x; at < heads * (rows.end - first); at += blockDim.x) {
    Interval keys = params.keys_of_row(batch, head + at % heads, first + at / heads);
    if (keys.empty()) continue;
    atomicMin(&storage.first_key, keys.begin);
    atomicMax(&storage.end_key, keys.end);
  }
  __syncthreads();
  return {storage.first_key, storage.end_key};
}

}  // namespace sparse_attn::cuda

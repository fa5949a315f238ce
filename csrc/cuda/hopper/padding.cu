// A thread block reads the mask of a (batch entry, head): its first and last allowed key, and
// whether keys between them are not.
#include "../common/launch.cuh"
#include "padding.h"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int kBoundsThreads = 256;

__global__ void __launch_bounds__(kBoundsThreads)
    find_bounds(const MaskView mask, int32_t heads, int32_t keys, int32_t* entries) {
  __shared__ int32_t begin, end, count;
  if (threadIdx.x == 0) {
    begin = keys;
    end = count = 0;
  }
  __syncthreads();
  const int64_t batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const auto* allowed =
      static_cast<const uint8_t*>(mask.data) + batch * mask.stride_b + head * mask.stride_h;
  int32_t own_begin = keys, own_end = 0, own_count = 0;
  for (int32_t j = static_cast<int32_t>(threadIdx.x); j < keys; j += kBoundsThreads) {
    if (allowed[j * mask.stride_k] == 0) continue;
    own_begin = imin(own_begin, j);
    own_end = j + 1;
    ++own_count;
  }
  if (own_count > 0) {
    atomicMin(&begin, own_begin);
    atomicMax(&end, own_end);
    atomicAdd(&count, own_count);
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  int32_t* entry = entries + blockIdx.x * kPaddingEntries;
  entry[kPaddingBegin] = count > 0 ? begin : 0;
  entry[kPaddingEnd] = end;
  entry[kPaddingWhole] = count == 0 || count == end - begin;
}

/// Heads that differ in the mask.
int32_t mask_heads(const AttentionParams& params) {
  return params.scores.mask.stride_h == 0 ? 1 : params.problem.heads_q;
}
int32_t mask_batches(const AttentionParams& params) {
  return params.scores.mask.stride_b == 0 ? 1 : params.problem.batch;
}

}  // namespace

int64_t padding_entries(const AttentionParams& params) {
  return int64_t{mask_batches(params)} * mask_heads(params) * kPaddingEntries;
}

Status find_padding(AttentionParams* params, int32_t* entries) {
  const int32_t batches = mask_batches(*params), heads = mask_heads(*params);
  find_bounds<<<batches * heads, kBoundsThreads, 0, to_stream(params->stream)>>>(
      params->scores.mask, heads, params->problem.seq_kv, entries);
  params->scores.bounds = {entries, batches > 1 ? int64_t{heads} * kPaddingEntries : 0,
                           heads > 1 ? kPaddingEntries : 0, 0, 1};
  return launched();
}

}  // namespace sparse_attn::cuda::hopper

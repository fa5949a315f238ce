// A bit per key and a list of key tiles from an index tensor, in two small launches.
#include "../common/launch.cuh"
#include "global_tokens.h"
#include "warp_list.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int kMarkThreads = 256;
constexpr int kWordBits = 32;

__global__ void set_bits(const int32_t* tokens, int32_t count, int32_t keys, uint32_t* bits) {
  for (int64_t t = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; t < count;
       t += int64_t{gridDim.x} * blockDim.x) {
    int32_t j = tokens[t];
    if (j >= 0 && j < keys) atomicOr(&bits[j / kWordBits], 1u << (j % kWordBits));
  }
}

/// Whether a bit is set among keys [begin, end).
__device__ bool any_bit(const uint32_t* bits, int32_t begin, int32_t end) {
  for (int32_t word = begin / kWordBits; word * kWordBits < end; ++word) {
    uint32_t inside = bits[word];
    if (word * kWordBits < begin) inside &= ~0u << (begin - word * kWordBits);
    if ((word + 1) * kWordBits > end) inside &= ~0u >> ((word + 1) * kWordBits - end);
    if (inside != 0) return true;
  }
  return false;
}

/// One warp writes the tiles of `block` keys that hold a bit, ascending.
__global__ void list_tiles(const uint32_t* bits, int32_t keys, int32_t block, int32_t* tiles,
                           int32_t* count) {
  auto holds_token = [&](int32_t tile) {
    return any_bit(bits, tile * block, imin((tile + 1) * block, keys));
  };
  int32_t written = write_list(ceil_div(keys, block), holds_token, tiles);
  if (threadIdx.x == 0) *count = written;
}

int64_t bit_bytes(const AttentionParams& params) {
  return aligned_bytes(ceil_div64(params.problem.seq_kv, kWordBits) * sizeof(uint32_t));
}

}  // namespace

int64_t global_token_bytes(const AttentionParams& params, int32_t block) {
  if (params.global_tokens == nullptr) return 0;
  int64_t list = (1 + ceil_div64(params.problem.seq_kv, block)) * sizeof(int32_t);
  return bit_bytes(params) + aligned_bytes(list);
}

Status mark_global_tokens(AttentionParams* params, int32_t block, void* memory) {
  if (params->global_tokens == nullptr) return {};
  cudaStream_t stream = to_stream(params->stream);
  uint32_t* bits = static_cast<uint32_t*>(memory);
  int32_t* count = reinterpret_cast<int32_t*>(static_cast<char*>(memory) + bit_bytes(*params));
  int32_t* tiles = count + 1;
  cudaError_t error = cudaMemsetAsync(bits, 0, bit_bytes(*params), stream);
  if (error != cudaSuccess) return to_status(error);
  if (params->num_global_tokens > 0) {
    set_bits<<<grid_for(params->num_global_tokens, kMarkThreads), kMarkThreads, 0, stream>>>(
        params->global_tokens, params->num_global_tokens, params->problem.seq_kv, bits);
  }
  list_tiles<<<1, 32, 0, stream>>>(bits, params->problem.seq_kv, block, tiles, count);
  params->pattern.global_bits = bits;
  params->pattern.global_tiles = tiles;
  params->pattern.num_global_tiles = count;
  return launched();
}

}  // namespace sparse_attn::cuda

// A bit per key and a list of key tiles from an index tensor, by one thread block: the list is
// short and its kernel is one of several of a call.
#include "../../arena.h"
#include "../common/block_sums.cuh"
#include "../common/launch.cuh"
#include "global_tokens.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kMarkThreads = 1024;
constexpr int kWordBits = 32;

struct Marks {
  uint32_t* bits;      // [ceil(Skv / 32)]
  int32_t* tiles;      // [tiles of Skv keys]
  int32_t* num_tiles;  // [1]
};

/// Calls `found(tile)`, ascending, for each of `tiles`, of `block` keys, that holds a bit.
template <typename Found>
__device__ __forceinline__ void each_tile(const uint32_t* bits, int32_t keys, int32_t block,
                                          Interval tiles, const Found& found) {
  const int32_t begin = tiles.begin * block, end = imin(tiles.end * block, keys);
  int32_t last = -1;
  for (int32_t word = begin / kWordBits; word * kWordBits < end; ++word) {
    const int32_t first = word * kWordBits;
    uint32_t rest = bits[word];
    if (first < begin) rest &= ~0u << (begin - first);
    if (first + kWordBits > end) rest &= ~0u >> (first + kWordBits - end);
    for (; rest != 0; rest &= rest - 1) {
      const int32_t tile = (first + __ffs(static_cast<int>(rest)) - 1) / block;
      if (tile != last) found(tile);
      last = tile;
    }
  }
}

/// Threads list the tiles of a stretch each, after those of the threads before. The first `sinks`
/// keys have bits too.
__global__ void __launch_bounds__(kMarkThreads)
    mark_kernel(const int32_t* tokens, int32_t num_tokens, int32_t sinks, int32_t keys,
                int32_t block, Marks to) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t word = thread; word < ceil_div(keys, kWordBits); word += kMarkThreads) {
    const int32_t of_sinks = sinks - word * kWordBits;
    to.bits[word] = of_sinks <= 0 ? 0 : ~0u >> (kWordBits - imin(of_sinks, kWordBits));
  }
  __syncthreads();
  for (int32_t t = thread; t < num_tokens; t += kMarkThreads) {
    const int32_t j = tokens[t];
    if (j >= 0 && j < keys) atomicOr(&to.bits[j / kWordBits], 1u << (j % kWordBits));
  }
  __syncthreads();
  const int32_t all = ceil_div(keys, block), each = ceil_div(all, kMarkThreads);
  const Interval own = {imin(thread * each, all), imin((thread + 1) * each, all)};
  int32_t count = 0;
  each_tile(to.bits, keys, block, own, [&](int32_t) { ++count; });
  const Sums sums = sums_of_block<kMarkThreads>(count);
  if (thread == 0) *to.num_tiles = sums.all;
  int32_t at = sums.before;
  each_tile(to.bits, keys, block, own, [&](int32_t tile) { to.tiles[at++] = tile; });
}

int64_t bit_bytes(const AttentionParams& params) {
  return Arena::rounded(ceil_div64(params.problem.seq_kv, kWordBits) * sizeof(uint32_t));
}

Marks marks_at(const AttentionParams& params, void* memory) {
  auto* count = reinterpret_cast<int32_t*>(static_cast<char*>(memory) + bit_bytes(params));
  return {static_cast<uint32_t*>(memory), count + 1, count};
}

}  // namespace

int64_t global_token_bytes(const AttentionParams& params, int32_t block) {
  if (params.global_tokens == nullptr) return 0;
  int64_t list = (1 + ceil_div64(params.problem.seq_kv, block)) * sizeof(int32_t);
  return bit_bytes(params) + Arena::rounded(list);
}

void attach_global_tokens(const AttentionParams& params, void* memory, Pattern* pattern) {
  const Marks marks = marks_at(params, memory);
  pattern->global_bits = marks.bits;
  pattern->global_tiles = marks.tiles;
  pattern->num_global_tiles = marks.num_tiles;
}

Status mark_global_tokens(AttentionParams* params, int32_t block, void* memory, int32_t sinks) {
  if (params->global_tokens == nullptr) return {};
  attach_global_tokens(*params, memory, &params->pattern);
  mark_kernel<<<1, kMarkThreads, 0, to_stream(params->stream)>>>(
      params->global_tokens, params->num_global_tokens, sinks, params->problem.seq_kv, block,
      marks_at(*params, memory));
  return launched();
}

}  // namespace sparse_attn::cuda

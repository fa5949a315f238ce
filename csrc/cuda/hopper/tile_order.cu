// Sorts query tiles by the lengths of their lists, coarsely, so that tiles of one head stay
// together: class c holds lists of up to 1 / 2^c of the longest that may be. Sequences that differ
// in length are sorted by their keys in the same way. One thread block; each thread counts the
// classes in its stretch of items, a prefix sum over (class, thread) says where its items go.
#include "../common/launch.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/sum_before.cuh"
#include "deal.h"
#include "tile_order.h"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int kThreads = 1024;
constexpr int kClasses = 8;

/// The class of a length, where `longest` bounds them all.
__device__ __forceinline__ int32_t length_class(int32_t length, int32_t longest) {
  int32_t c = 0;
  while (c < kClasses - 1 && length <= longest >> (c + 1)) ++c;
  return c;
}

__device__ __forceinline__ int32_t class_of(const Arguments& args, int32_t block_q, int32_t tile) {
  const AttentionParams& params = args.params;
  const BlockList& list = params.pattern.list;
  const TilePlace place = place_of(args.grid, args.last_first, tile);
  const int32_t count =
      list.runs(place.problem / params.problem.heads_q, place.problem % params.problem.heads_q,
                place.row_block * block_q / list.block_q, list.block_kv)
          .count;
  return length_class(count, list.max_count);
}

/// Replaces the thread's `kClasses` entries of an array of the block's by the sums of all before.
__device__ __forceinline__ void prefix_sums(int32_t* entries) {
  int32_t* own = entries + threadIdx.x * kClasses;
  int32_t sum = 0;
  for (int i = 0; i < kClasses; ++i) sum += own[i];
  int32_t before = sum_before<kThreads>(sum);
  for (int i = 0; i < kClasses; ++i) {
    const int32_t entry = own[i];
    own[i] = before;
    before += entry;
  }
}

/// The part of `items` that the thread looks after.
__device__ __forceinline__ Interval stretch_of(Interval items) {
  const int32_t size = ceil_div(items.size(), kThreads);
  const int32_t begin = items.begin + static_cast<int32_t>(threadIdx.x) * size;
  return {begin, imin(begin + size, items.end)};
}

/// Writes the items to `sorted` by their classes, within a class in their order.
template <typename ClassOf>
__device__ __forceinline__ void sort_by_class(Interval items, int32_t* sorted,
                                              const ClassOf& class_of) {
  __shared__ int32_t next[kClasses * kThreads];  // [class, thread]
  const Interval own_items = stretch_of(items);
  int32_t* own = next + threadIdx.x;
  for (int c = 0; c < kClasses; ++c) own[c * kThreads] = 0;
  for (int32_t i = own_items.begin; i < own_items.end; ++i) ++own[class_of(i) * kThreads];
  __syncthreads();
  prefix_sums(next);
  __syncthreads();
  for (int32_t i = own_items.begin; i < own_items.end; ++i) {
    sorted[own[class_of(i) * kThreads]++] = i;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    order_kernel(const __grid_constant__ Arguments args, int32_t block_q, int32_t dealt) {
  ptx::launch_dependents();
  if (threadIdx.x == 0) *args.counter = 0;
  sort_by_class({dealt, args.num_tiles}, args.order,
                [&](int32_t tile) { return class_of(args, block_q, tile); });
}

/// Sums over the threads of a block, all of which call it.
struct SumsOfBlock {
  __device__ __forceinline__ Sums operator()(int32_t value) const {
    __shared__ int32_t all;
    __syncthreads();
    const int32_t before = sum_before<kThreads>(value);
    if (threadIdx.x == kThreads - 1) all = before + value;
    __syncthreads();
    return {before, all};
  }
};

/// Sorts the sequences and writes their tile rows; or, of few, the pieces of a deal.
template <bool kDeals>
__global__ void __launch_bounds__(kThreads)
    sequences_kernel(const __grid_constant__ Arguments args, KernelTile tile) {
  ptx::launch_dependents();
  __shared__ int32_t longest, some_split;
  __shared__ unsigned long long visited;  // key tiles of all query tiles
  const AttentionParams& params = args.params;
  const int32_t batch = params.problem.batch;
  const int32_t problems = params.problem.heads_q * args.classes;  // of a sequence
  const int32_t sections = problems / args.grid.section;
  auto row_blocks = [&](int32_t i) {
    const int32_t rows = params.sequences.of(args.sequences[i]).rows;
    return ceil_div(ceil_div(rows, args.classes), tile.block_q);
  };
  if (threadIdx.x == 0) *args.counter = longest = some_split = visited = 0;
  __syncthreads();
  const Interval own = stretch_of({0, batch});
  for (int32_t b = own.begin; b < own.end; ++b) {
    atomicMax(&longest, params.sequences.of(b).keys);
  }
  __syncthreads();
  sort_by_class({0, batch}, args.sequences,
                [&](int32_t b) { return length_class(params.sequences.of(b).keys, longest); });
  int32_t sum = 0;
  for (int32_t i = own.begin; i < own.end; ++i) sum += row_blocks(i) * sections;
  int32_t end = sum_before<kThreads>(sum);
  if (threadIdx.x == 0) args.sequence_ends[0] = 0;
  for (int32_t i = own.begin; i < own.end; ++i) {
    args.sequence_ends[i + 1] = end += row_blocks(i) * sections;
  }
  __syncthreads();
  // Malformed sequences may overlap, and have more rows than there is room for.
  const int32_t all = imin(args.sequence_ends[batch], args.most_tile_rows);
  for (int32_t at = threadIdx.x; at < all; at += kThreads) {
    int32_t i = 0;  // the sequence that has the row: the first one that ends past it
    for (int32_t step = 1 << 30; step > 0; step /= 2) {
      if (step <= batch - i && args.sequence_ends[i + step] <= at) i += step;
    }
    const int32_t in_sequence = at - args.sequence_ends[i];
    const int32_t section = in_sequence / row_blocks(i);
    const int32_t row_block = in_sequence - section * row_blocks(i);
    TileRow row = {args.sequences[i] * problems + section * args.grid.section,
                   args.last_first ? row_blocks(i) - 1 - row_block : row_block};
    if constexpr (kDeals) {
      const Sequence sequence = params.sequences.of(args.sequences[i]);
      const Piece whole = whole_tile(params, sequence, row.problem, row.row_block, tile);
      args.deal.tiles[at] = whole;
      atomicAdd(&visited,
                static_cast<unsigned long long>(whole.visited) * args.deal.by_width.divisor);
      continue;
    }
    if (args.folds) {
      const Sequence sequence = params.sequences.of(args.sequences[i]);
      const KeySplit split = split_of_sequence(
          params.pattern, sequence, has_placed_globals(params.sequences), row.row_block, tile);
      if (split.chunks > 0) {
        row.chunks = split.chunks;
        row.least = split.least;
        some_split = 1;
      }
    }
    args.tile_rows[at] = row;
  }
  __syncthreads();
  if constexpr (kDeals) {
    const DealRule rule = DealRule::of(static_cast<int64_t>(visited), args.multiprocessors);
    const Dealt dealt = deal_pieces(args.deal, rule, all, stretch_of({0, all}), SumsOfBlock());
    if (threadIdx.x == 0) {
      args.deal.counts[0] = dealt.pieces;
      args.deal.counts[1] = dealt.merged;
    }
  } else {
    if (threadIdx.x == 0) args.sequence_ends[batch + 1] = some_split;
  }
}

__global__ void zero_kernel(int32_t* counter) {
  ptx::launch_dependents();
  *counter = 0;
}

}  // namespace

Status order_tiles(const Arguments& args, KernelTile tile, int32_t dealt) {
  cudaStream_t stream = to_stream(args.params.stream);
  if (args.deal.pieces != nullptr) {
    sequences_kernel<true><<<1, kThreads, 0, stream>>>(args, tile);
  } else if (args.tile_rows != nullptr) {
    sequences_kernel<false><<<1, kThreads, 0, stream>>>(args, tile);
  } else if (args.order != nullptr) {
    order_kernel<<<1, kThreads, 0, stream>>>(args, tile.block_q, dealt);
  } else {
    zero_kernel<<<1, 1, 0, stream>>>(args.counter);
  }
  return launched();
}

}  // namespace sparse_attn::cuda::hopper

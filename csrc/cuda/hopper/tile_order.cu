// Sorts query tiles by the lengths of their lists, coarsely, so that tiles of one head stay
// together: class c holds lists of up to 1 / 2^c of the longest that may be. Sequences that differ
// in length are sorted by their keys in the same way. One thread block; each warp counts the
// classes in its stretch of items, a prefix sum over (class, warp) says where its items go. The
// kernel after it waits, so what counts is how often threads wait for memory, for each other and
// for code, which every call fetches again: loops of a few turns are not unrolled.
#include "../common/block_sums.cuh"
#include "../common/launch.cuh"
#include "../common/ptx/grid.cuh"
#include "deal.h"
#include "tile_order.h"

namespace sparse_attn::cuda::hopper {
namespace {

constexpr int kTileThreads = 1024;     // that sort tiles
constexpr int kSequenceThreads = 512;  // that deal, for which each needs more registers
constexpr int kClasses = 8;
constexpr int kFewSequences = 512;    // whose numbers shared memory holds
constexpr int kFewSectionRows = 256;  // the same of a deal's

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

/// The thread's part of `items`.
template <int kThreads>
__device__ __forceinline__ Interval stretch_of(Interval items) {
  const int32_t size = ceil_div(items.size(), kThreads);
  const int32_t begin = items.begin + static_cast<int32_t>(threadIdx.x) * size;
  return {begin, imin(begin + size, items.end)};
}

/// Writes the items to `sorted` by their classes, within a class in their order.
template <int kThreads, typename ClassOf>
__device__ __forceinline__ void sort_by_class(Interval items, int32_t* sorted,
                                              const ClassOf& class_of) {
  constexpr int kLanes = 32, kWarps = kThreads / kLanes, kEntries = kClasses * kWarps;
  static_assert(kEntries <= kThreads, "a thread sums one entry");
  __shared__ int32_t next[kEntries];  // [class, warp]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const int32_t size = ceil_div(ceil_div(items.size(), kLanes), kWarps) * kLanes;
  const int32_t begin = items.begin + thread / kLanes * size;
  const int32_t end = imin(begin + size, items.end);
  // Calls f(item, where it goes), 32 items at a time, and counts them.
  auto each = [&](const auto& f) {
#pragma unroll 1
    for (int32_t first = begin; first < end; first += kLanes) {
      const int32_t i = first + lane, c = i < end ? class_of(i) : kClasses;
      const uint32_t alike = __match_any_sync(~0u, c);
      int32_t* own = next + c * kWarps + thread / kLanes;
      const int32_t at = c < kClasses ? *own + __popc(alike & ((1u << lane) - 1)) : 0;
      __syncwarp();
      if (c < kClasses && lane == 31 - __clz(static_cast<int>(alike))) *own = at + 1;
      __syncwarp();
      if (c < kClasses) f(i, at);
    }
  };
  if (thread < kEntries) next[thread] = 0;
  __syncthreads();
  each([](int32_t, int32_t) {});
  __syncthreads();
  const int32_t before = sums_of_block<kThreads>(thread < kEntries ? next[thread] : 0).before;
  if (thread < kEntries) next[thread] = before;
  __syncthreads();
  each([&](int32_t i, int32_t at) { sorted[at] = i; });
  __syncthreads();
}

__global__ void __launch_bounds__(kTileThreads)
    order_kernel(const __grid_constant__ Arguments args, int32_t block_q, int32_t dealt) {
  ptx::launch_dependents();
  if (threadIdx.x == 0) *args.counter = 0;
  sort_by_class<kTileThreads>({dealt, args.num_tiles}, args.order,
                              [&](int32_t tile) { return class_of(args, block_q, tile); });
}

/// Sums over the threads of a block, all of which call it.
struct SumsOfBlock {
  __device__ __noinline__ Sums operator()(int32_t value) const {
    __syncthreads();
    return sums_of_block<kSequenceThreads>(value);
  }
};

/// Adds to a sum of the block's what the threads of a warp have, all of which call it.
__device__ __forceinline__ void add_of_warp(unsigned long long* sum, unsigned long long value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0 && value > 0) atomicAdd(sum, value);
}

/// The sequences of a call, the longest first, as the threads of the kernel share them.
struct SortedSequences {
  const Arguments& args;
  int32_t block_q;
  Sequence* of_few;  // in shared memory; null: they are many, and read where they lie
  int32_t* sorted;   // [batch]
  int32_t* ends;     // [batch + 1], section rows of those before each one
  int32_t batch, problems, sections;  // problems and sections of a sequence

  __device__ __forceinline__ Sequence at(int32_t b) const {
    return of_few != nullptr ? of_few[b] : args.params.sequences.of(b);
  }
  /// Query tiles of a slice of the sequence that was sorted to place `i`.
  __device__ __forceinline__ int32_t row_blocks(int32_t i) const {
    return ceil_div(ceil_div(at(sorted[i]).rows, args.classes), block_q);
  }

  /// Sorts them; `longest` is shared, and 0.
  __device__ __forceinline__ void sort(Interval own, int32_t* longest) const {
#pragma unroll 1
    for (int32_t b = own.begin; b < own.end; ++b) {
      const Sequence sequence = args.params.sequences.of(b);
      if (of_few != nullptr) of_few[b] = sequence;
      atomicMax(longest, sequence.keys);
    }
    __syncthreads();
    sort_by_class<kSequenceThreads>({0, batch}, sorted,
                                    [&](int32_t b) { return length_class(at(b).keys, *longest); });
  }

  __device__ __forceinline__ void find_ends(Interval own) const {
    int32_t sum = 0;
#pragma unroll 1
    for (int32_t i = own.begin; i < own.end; ++i) sum += row_blocks(i) * sections;
    int32_t end = sums_of_block<kSequenceThreads>(sum).before;
    if (threadIdx.x == 0) ends[0] = 0;
#pragma unroll 1
    for (int32_t i = own.begin; i < own.end; ++i) {
      ends[i + 1] = end += row_blocks(i) * sections;
      if (of_few != nullptr && i + 1 == batch) args.sequence_ends[batch] = end;
    }
    __syncthreads();
  }

  /// The section row at a place of the order, and its sequence.
  __device__ __forceinline__ SectionRow section_row(int32_t place, Sequence* sequence) const {
    int32_t i = 0;  // the sequence that has it: the first one that ends past it
#pragma unroll 1
    for (int32_t step = 1 << (31 - __clz(batch)); step > 0; step /= 2) {
      if (step <= batch - i && ends[i + step] <= place) i += step;
    }
    const int32_t in_sequence = place - ends[i];
    const int32_t own_blocks = row_blocks(i), section = in_sequence / own_blocks;
    const int32_t row_block = in_sequence - section * own_blocks;
    *sequence = at(sorted[i]);
    return {sorted[i] * problems + section * args.grid.section,
            args.last_first ? own_blocks - 1 - row_block : row_block};
  }
};

/// Sorts the sequences and writes their section rows; or, of few, the pieces of a deal.
template <bool kDeals>
__global__ void __launch_bounds__(kSequenceThreads)
    sequences_kernel(const __grid_constant__ Arguments args, KernelTile tile) {
  ptx::launch_dependents();
  // Sequences have a constructor.
  __shared__ alignas(Sequence) unsigned char bytes[kFewSequences * sizeof(Sequence)];
  __shared__ int32_t few_sorted[kFewSequences], few_ends[kFewSequences + 1];
  __shared__ int32_t longest, some_split;
  __shared__ unsigned long long visited;  // key tiles of all query tiles
  const AttentionParams& params = args.params;
  const int32_t batch = params.problem.batch;
  const bool few = batch <= kFewSequences;
  const int32_t problems = params.problem.heads_q * args.classes;
  const SortedSequences sequences = {args,
                                     tile.block_q,
                                     few ? reinterpret_cast<Sequence*>(bytes) : nullptr,
                                     few ? few_sorted : args.sequences,
                                     few ? few_ends : args.sequence_ends,
                                     batch,
                                     problems,
                                     problems / args.grid.section};
  if (threadIdx.x == 0) *args.counter = longest = some_split = visited = 0;
  __syncthreads();
  const Interval own = stretch_of<kSequenceThreads>({0, batch});
  sequences.sort(own, &longest);
  sequences.find_ends(own);
  // Malformed sequences may overlap, and have more rows than there is room for.
  const int32_t all = imin(sequences.ends[batch], args.most_section_rows);
  __shared__ Piece few_tiles[kDeals ? kFewSectionRows : 1];
  Deal deal = args.deal;
  if (kDeals && all <= kFewSectionRows) deal.tiles = few_tiles;
  unsigned long long own_visited = 0;
#pragma unroll 1
  for (int32_t at = threadIdx.x; at < all; at += kSequenceThreads) {
    Sequence sequence;
    SectionRow row = sequences.section_row(at, &sequence);
    if constexpr (kDeals) {
      const Piece whole = whole_tile(params, sequence, row.problem, row.row_block, tile);
      deal.tiles[at] = whole;
      own_visited += static_cast<unsigned long long>(whole.visited) * args.deal.by_width.divisor;
      continue;
    }
    if (args.folds != Fold::kNone) {
      const KeySplit split =
          split_of_sequence(params.pattern, params.features, sequence,
                            has_placed_globals(params.sequences), row.row_block, tile);
      if (split.chunks > 0) {
        row.chunks = split.chunks;
        row.least = split.least;
        some_split = 1;
      }
    }
    args.section_rows[at] = row;
  }
  if constexpr (kDeals) add_of_warp(&visited, own_visited);
  __syncthreads();
  if constexpr (kDeals) {
    const DealRule rule =
        DealRule::of(static_cast<int64_t>(visited), tile.head_dim, args.multiprocessors);
    const Dealt dealt =
        deal_pieces(deal, rule, all, stretch_of<kSequenceThreads>({0, all}), SumsOfBlock());
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
    sequences_kernel<true><<<1, kSequenceThreads, 0, stream>>>(args, tile);
  } else if (args.section_rows != nullptr) {
    sequences_kernel<false><<<1, kSequenceThreads, 0, stream>>>(args, tile);
  } else if (args.order != nullptr) {
    order_kernel<<<1, kTileThreads, 0, stream>>>(args, tile.block_q, dealt);
  } else {
    zero_kernel<<<1, 1, 0, stream>>>(args.counter);
  }
  return launched();
}

}  // namespace sparse_attn::cuda::hopper

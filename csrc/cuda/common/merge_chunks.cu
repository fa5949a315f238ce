// The merge of chunks, a thread a column or, of many rows, four of them. Launched as a dependent of
// the kernel that wrote the chunks, which hides its launch under that one's end.
#include "merge_row.cuh"
#include "ptx/grid.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int kMostThreads = 256;  // the largest head dim
// A thread has several columns where there are so many rows, which fill a device so too, ...
constexpr int kManyRows = 1024;
// ... or some rows of few chunks, which it goes through in one turn or two.
constexpr int kSomeRows = 128, kFewChunks = 16;

template <typename T, int kColumns, bool kGaps, bool kSmall>
__global__ void __launch_bounds__(kMostThreads)
    merge_kernel(const __grid_constant__ AttentionParams params, const PartialRows partials) {
  const int32_t threads = threads_of_row<kColumns>(params);
  const uint32_t row = blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads;
  if (row >= static_cast<uint32_t>(partials.heads) * partials.rows) return;
  const uint32_t head_index = row / partials.rows;
  const int64_t batch = head_index / params.problem.heads_q;
  const int64_t head = head_index % params.problem.heads_q;
  ptx::wait_for_primary();
  // The next call may begin beside few thread blocks; many would leave it uneven places.
  constexpr uint32_t kFewBlocks = 256;
  if (gridDim.x <= kFewBlocks) ptx::launch_dependents();
  const Sequence sequence = params.sequences.of(batch);
  const int64_t query = row - head_index * partials.rows;
  if (query >= sequence.rows) return;
  merge_row<T, kColumns, kGaps, kSmall>(params, partials, sequence,
                                        {batch, head, query, row, partials.chunks[row]},
                                        static_cast<int32_t>(threadIdx.x) % threads);
}

template <typename T>
auto kernel_for(bool wide, bool gaps, bool small_groups) {
  if (small_groups) {
    return wide ? merge_kernel<T, kWideColumns, true, true> : merge_kernel<T, 1, true, true>;
  }
  if (gaps) {
    return wide ? merge_kernel<T, kWideColumns, true, false> : merge_kernel<T, 1, true, false>;
  }
  return wide ? merge_kernel<T, kWideColumns, false, false> : merge_kernel<T, 1, false, false>;
}

}  // namespace

Status merge_chunks(const AttentionParams& params, const PartialRows& partials) {
  const int64_t rows = int64_t{partials.heads} * partials.rows;
  const bool wide = rows >= kManyRows || (rows >= kSomeRows && partials.max_chunks <= kFewChunks);
  const int32_t threads = wide ? threads_of_row<kWideColumns>(params) : threads_of_row<1>(params);
  const int32_t rows_a_block = wide ? kMostThreads / 2 / threads : 1;
  const bool half = params.problem.dtype == Dtype::kFloat16;
  const bool small_groups = partials.group <= kSmallGroup;
  auto kernel = half ? kernel_for<__half>(wide, partials.gaps, small_groups)
                     : kernel_for<__nv_bfloat16>(wide, partials.gaps, small_groups);
  const LaunchShape shape = {static_cast<uint32_t>(ceil_div64(rows, rows_a_block)),
                             static_cast<uint32_t>(threads * rows_a_block), 0,
                             to_stream(params.stream)};
  return launch_dependent(kernel, shape, params, partials);
}

}  // namespace sparse_attn::cuda

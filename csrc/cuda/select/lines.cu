// Shares by lines (vertical_slash): the probabilities of the last rows, summed by column and by
// diagonal, carried to every pair of blocks. Sums are integers in units of 2^-32, so that atomics
// change no bit; a probability that is no number poisons its head.
#include "../common/launch.cuh"
#include "../common/mask.cuh"
#include "../common/tile_product.cuh"
#include "../common/types.cuh"
#include "tools.h"

namespace sparse_attn::cuda {
namespace {

static_assert(kLastRows == kProductTile, "the last rows are one tile");
constexpr float kUnit = 4294967296.0f;
constexpr int kLineThreads = 256;

/// How many of the rows there are, and the first of them.
__device__ int32_t first_row(const SelectParams& params) {
  return imax(0, params.seq_q - kLastRows);
}

/// Where block sums, diagonal sums and the poison of a head lie.
struct LineSums {
  unsigned long long* columns;    // [num_kv]
  unsigned long long* diagonals;  // by row - key, from below: [Skv + kLastRows]
  __device__ LineSums(const SelectParams& params, const LineWorkspace& lines, int64_t head)
      : columns(lines.sums + head * (int64_t{params.num_kv} + params.seq_kv + kLastRows)),
        diagonals(columns + params.num_kv) {}
};

/// The scores of the last rows and one tile of keys, -inf where a row does not see the key; the
/// first pass takes each row's maximum and sum, the second adds probabilities to the lines.
template <typename T, bool kSums>
__global__ void __launch_bounds__(kProductThreads)
    walk_lines(const SelectParams params, const LineWorkspace lines) {
  const int32_t tiles = ceil_div(params.seq_kv, kProductTile);
  const int64_t index = blockIdx.x / tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % tiles);
  const int64_t batch = index / params.heads_q, head = index % params.heads_q;
  const T* query = static_cast<const T*>(params.query.data) + batch * params.query.stride_b +
                   head * params.query.stride_h;
  const T* key = static_cast<const T*>(params.key.data) + batch * params.key.stride_b +
                 head / params.group() * params.key.stride_h;
  const int32_t first = first_row(params), j0 = tile * kProductTile, depth = params.head_dim;
  float acc[kProductRows][kProductRows];
  tile_product(
      depth,
      [&](int row, int d) {
        const int64_t i = first + row;
        return i < params.seq_q && d < depth ? to_float(query[i * params.query.stride_s + d])
                                             : 0.0f;
      },
      [&](int d, int column) {
        const int64_t j = j0 + column;
        return j < params.seq_kv && d < depth ? to_float(key[j * params.key.stride_s + d]) : 0.0f;
      },
      acc);
  const LineSums sums(params, lines, index);
  for (int r = 0; r < kProductRows; ++r) {
    const int row = product_row(r);
    const int32_t i = first + row;
    const Interval keys = i < params.seq_q ? params.keys_of_row(batch, head, i) : Interval{};
    float scores[kProductRows];
    float highest = -INFINITY;
    for (int c = 0; c < kProductRows; ++c) {
      scores[c] = capped(params.scale * acc[r][c], params.softcap);
      if (keys.contains(j0 + product_column(c))) highest = fmaxf(highest, scores[c]);
    }
    if constexpr (!kSums) {
      for (int step = 8; step > 0; step /= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
      }
      float sum = 0.0f;
      for (int c = 0; c < kProductRows; ++c) {
        if (keys.contains(j0 + product_column(c))) sum += expf(scores[c] - highest);
      }
      for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (threadIdx.x % 16 == 0) {
        lines.partial[(index * tiles + tile) * kLastRows + row] = {highest, sum};
      }
    } else {
      const float lse = lines.lse[index * kLastRows + row];
      for (int c = 0; c < kProductRows; ++c) {
        const int32_t j = j0 + product_column(c);
        if (!keys.contains(j)) continue;
        const float probability = expf(scores[c] - lse);
        if (isnan(probability)) {
          lines.lse[index * kLastRows + row] = NAN;  // all of the row are; poisons the head
          continue;
        }
        const unsigned long long weight = __float2ull_rn(probability * kUnit);
        if (weight == 0) continue;
        atomicAdd(sums.columns + j / params.block_kv, weight);
        atomicAdd(sums.diagonals + row - j + params.seq_kv - 1, weight);
      }
    }
  }
}

/// Each row's lse, from its tiles in their order; a warp a row.
__global__ void __launch_bounds__(32)
    merge_last_rows(const SelectParams params, const LineWorkspace lines) {
  const int32_t tiles = ceil_div(params.seq_kv, kProductTile);
  const int64_t index = blockIdx.x / kLastRows;
  const float2* partial = lines.partial + index * tiles * kLastRows + blockIdx.x % kLastRows;
  float highest = -INFINITY, sum = 0.0f;
  for (int32_t t = threadIdx.x; t < tiles; t += 32) {
    highest = fmaxf(highest, partial[int64_t{t} * kLastRows].x);
  }
  for (int step = 16; step > 0; step /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  }
  for (int32_t t = threadIdx.x; t < tiles; t += 32) {
    const float2 part = partial[int64_t{t} * kLastRows];
    if (part.y != 0.0f) sum += part.y * expf(part.x - highest);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x == 0) lines.lse[blockIdx.x] = highest + logf(sum);
}

/// The share of the blocks of rows and keys whose first ones differ by each difference: the pairs
/// of whole blocks on every diagonal.
__global__ void __launch_bounds__(kLineThreads)
    sum_diagonals(const SelectParams params, const LineWorkspace lines, int32_t step,
                  int64_t num_slashes) {
  const int64_t heads = int64_t{params.batch} * params.heads_q;
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < heads * num_slashes;
       at += int64_t{gridDim.x} * blockDim.x) {
    const LineSums sums(params, lines, at / num_slashes);
    const int64_t difference = at % num_slashes * step - int64_t{params.num_kv} * params.block_kv;
    float sum = 0.0f;
    for (int32_t t = 1 - params.block_kv; t < params.block_q; ++t) {
      const int64_t entry = difference + t - first_row(params) + params.seq_kv - 1;
      if (entry < 0 || entry >= int64_t{params.seq_kv} + kLastRows) continue;
      const int32_t pairs = imin(params.block_q, params.block_kv + t) - imax(t, 0);
      sum += static_cast<float>(pairs) * static_cast<float>(sums.diagonals[entry]);
    }
    lines.slashes[at] = sum;
  }
}

/// Half by columns, half by diagonals, each divided by its sum over the blocks that are visible.
__global__ void __launch_bounds__(kLineThreads)
    share_lines(const SelectParams params, const LineWorkspace lines, int32_t step,
                int64_t num_slashes, float* shares) {
  __shared__ float warps[2][kLineThreads / 32];
  __shared__ int32_t first_key, end_key;
  __shared__ bool poisoned;
  const int64_t index = blockIdx.x / params.num_q;
  const int32_t query_block = static_cast<int32_t>(blockIdx.x % params.num_q);
  const int64_t batch = index / params.heads_q, head = index % params.heads_q;
  const LineSums sums(params, lines, index);
  const Interval rows = params.rows_of_block(query_block);
  if (threadIdx.x == 0) {
    first_key = params.seq_kv;
    end_key = 0;
    poisoned = false;
  }
  __syncthreads();
  for (int32_t i = rows.begin + threadIdx.x; i < rows.end; i += kLineThreads) {
    Interval keys = params.keys_of_row(batch, head, i);
    if (keys.empty()) continue;
    atomicMin(&first_key, keys.begin);
    atomicMax(&end_key, keys.end);
  }
  if (threadIdx.x < kLastRows && isnan(lines.lse[index * kLastRows + threadIdx.x])) {
    poisoned = true;
  }
  __syncthreads();
  const Interval visible = SelectParams::blocks_of({first_key, end_key}, params.block_kv);
  auto column = [&](int32_t j) { return static_cast<float>(sums.columns[j]); };
  auto slash = [&](int32_t j) {
    const int64_t keys = int64_t{params.num_kv - j} * params.block_kv;
    const int64_t at = (int64_t{query_block} * params.block_q + keys) / step;
    return lines.slashes[index * num_slashes + at];
  };
  float totals[2] = {};
  for (int32_t j = visible.begin + threadIdx.x; j < visible.end; j += kLineThreads) {
    totals[0] += column(j);
    totals[1] += slash(j);
  }
  for (int side = 0; side < 2; ++side) {
    for (int lane = 16; lane > 0; lane /= 2) {
      totals[side] += __shfl_xor_sync(~0u, totals[side], lane);
    }
    if (threadIdx.x % 32 == 0) warps[side][threadIdx.x / 32] = totals[side];
  }
  __syncthreads();
  for (int side = 0; side < 2; ++side) {
    totals[side] = 0.0f;
    for (int warp = 0; warp < kLineThreads / 32; ++warp) totals[side] += warps[side][warp];
  }
  for (int32_t j = threadIdx.x; j < params.num_kv; j += kLineThreads) {
    float share = totals[0] > 0.0f ? column(j) / totals[0] : 0.0f;
    if (totals[1] > 0.0f) share += slash(j) / totals[1];
    shares[int64_t{blockIdx.x} * params.num_kv + j] = poisoned ? NAN : share;
  }
}

}  // namespace

Status launch_lines(const SelectParams& params, const SelectWorkspace& workspace) {
  cudaStream_t stream = to_stream(params.stream);
  const LineWorkspace& lines = workspace.lines;
  const int64_t heads = int64_t{params.batch} * params.heads_q;
  const int64_t bytes =
      heads * (int64_t{params.num_kv} + params.seq_kv + kLastRows) * sizeof(unsigned long long);
  cudaError_t error = cudaMemsetAsync(lines.sums, 0, bytes, stream);
  if (error != cudaSuccess) return to_status(error);
  const auto tiles = static_cast<uint32_t>(heads * ceil_div(params.seq_kv, kProductTile));
  const int32_t step = slash_step(params);
  const int64_t slashes = num_slashes(params);
  Status status = with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    walk_lines<T, false><<<tiles, kProductThreads, 0, stream>>>(params, lines);
    merge_last_rows<<<static_cast<uint32_t>(heads * kLastRows), 32, 0, stream>>>(params, lines);
    walk_lines<T, true><<<tiles, kProductThreads, 0, stream>>>(params, lines);
    return launched();
  });
  if (!status.ok()) return status;
  sum_diagonals<<<grid_for(heads * slashes, kLineThreads), kLineThreads, 0, stream>>>(
      params, lines, step, slashes);
  share_lines<<<static_cast<uint32_t>(heads * params.num_q), kLineThreads, 0, stream>>>(
      params, lines, step, slashes, workspace.scores);
  return launched();
}

}  // namespace sparse_attn::cuda

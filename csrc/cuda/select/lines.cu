// Shares by lines (vertical_slash): the probabilities of the last rows, summed by column and by
// diagonal, carried to every pair of blocks. Sums are integers in units of 2^-32, so that atomics
// change no bit; a probability of NaN spoils its head.
#include "../common/launch.cuh"
#include "../common/mask.cuh"
#include "hull.cuh"
#include "vector_product.cuh"

namespace sparse_attn::cuda {
namespace {

static_assert(kLastRows == kVectorTile, "the last rows are one tile");
constexpr float kUnit = 4294967296.0f;
constexpr int kLineThreads = 256;

/// The first of a batch entry's last rows.
__device__ int32_t first_row(const SelectParams& params, int64_t batch) {
  return imax(0, params.rows(batch) - kLastRows);
}

/// Where the block sums and the diagonal sums of a head lie.
struct LineSums {
  unsigned long long* columns;    // [num_kv]
  unsigned long long* diagonals;  // by row - key, from below: [Skv + kLastRows]
  __device__ LineSums(const SelectParams& params, const LineWorkspace& lines, int64_t head)
      : columns(lines.sums + head * (int64_t{params.num_kv} + params.problem.seq_kv + kLastRows)),
        diagonals(columns + params.num_kv) {}
};

/// The last rows of a head against a tile of keys, whose products lie in shared memory.
struct LineTile {
  const SelectParams& params;
  const LineWorkspace& lines;
  float* products;       // [kLastRows, kProductPitch]
  const Interval* keys;  // [kLastRows], that a row sees
  int64_t index;
  int32_t tile;
  float factor;  // from a product to its score

  /// The keys of a row, counted from the tile's first.
  __device__ Interval keys_of(int row) const {
    const int32_t j0 = tile * kVectorTile;
    return {keys[row].begin - j0, keys[row].end - j0};
  }
  __device__ float score(int row, int column) const {
    return factor * products[row * kProductPitch + column];
  }

  /// Puts capped scores in the products' places: apart, since the code of tanh, which few calls
  /// need, would crowd the loops out of the instruction cache.
  __device__ void cap() {
    if (params.scores.softcap == 0.0f) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < kLastRows * kVectorTile; i += blockDim.x) {
      float& product = products[i / kVectorTile * kProductPitch + i % kVectorTile];
      product = capped(factor * product, params.scores.softcap);
    }
    factor = 1.0f;
    __syncthreads();
  }

  /// Puts each probability in its product's place, as an integer.
  __device__ void weigh() const {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int row = threadIdx.x / 32; row < kLastRows; row += blockDim.x / 32) {
      const Interval keys = keys_of(row);
      const float lse = lines.lse[index * kLastRows + row];
      for (int c = lane; c < kVectorTile; c += 32) {
        const float probability = keys.contains(c) ? __expf(score(row, c) - lse) : 0.0f;
        // All of the row's are no numbers then; it poisons the head.
        if (isnan(probability)) lines.lse[index * kLastRows + row] = NAN;
        products[row * kProductPitch + c] = __uint_as_float(__float2uint_rn(probability * kUnit));
      }
    }
  }
  __device__ unsigned long long weight(int row, int column) const {
    return __float_as_uint(products[row * kProductPitch + column]);
  }
  __device__ static void add(unsigned long long* to, unsigned long long sum) {
    if (sum != 0) atomicAdd(to, sum);
  }

  /// Adds the weights up by column and by diagonal; a thread a line.
  __device__ void add_lines() const {
    const LineSums sums(params, lines, index);
    const int32_t j0 = tile * kVectorTile;
    for (int line = threadIdx.x; line < 3 * kVectorTile - 1; line += blockDim.x) {
      unsigned long long sum = 0;
      if (line < kVectorTile) {
        for (int row = 0; row < kLastRows; ++row) sum += weight(row, line);
        add(sums.columns + (j0 + line) / params.block_kv, sum);
        continue;
      }
      const int difference = line - 2 * kVectorTile + 1;  // of row and column
      for (int row = imax(difference, 0); row < imin(kLastRows, kVectorTile + difference); ++row) {
        sum += weight(row, row - difference);
      }
      add(sums.diagonals + difference - j0 + params.problem.seq_kv - 1, sum);
    }
  }
};

/// What the lanes of a warp have of its rows: the maximum and the sum of exponentials.
template <int kWarps>
struct RowTotals {
  static constexpr int kRows = kLastRows / kWarps;
  float highest[kRows], sum[kRows];

  __device__ static int row(int i) { return threadIdx.x / 32 + i * kWarps; }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      highest[i] = -INFINITY;
      sum[i] = 0.0f;
    }
  }
  __device__ void add(const LineTile& tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Interval keys = tile.keys_of(row(i));
      float x[kVectorTile / 32], top = highest[i];
#pragma unroll
      for (int part = 0; part < kVectorTile / 32; ++part) {
        const int column = part * 32 + lane;
        x[part] = keys.contains(column) ? tile.score(row(i), column) : -INFINITY;
        top = fmaxf(top, x[part]);
      }
      const float base = top == -INFINITY ? 0.0f : top;
      sum[i] *= __expf(highest[i] - base);
#pragma unroll
      for (float score : x) sum[i] += __expf(score - base);
      highest[i] = top;
    }
  }
  __device__ void write(float2* partial) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float top = highest[i];
      for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      float all = sum[i] * (highest[i] == -INFINITY ? 0.0f : expf(highest[i] - top));
      if (isnan(sum[i])) all = sum[i];
      for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
      if (threadIdx.x % 32 == 0) partial[row(i)] = {top, all};
    }
  }
};

/// The last rows against some tiles of keys: the first pass takes each row's maximum and sum, the
/// second adds probabilities to the lines.
template <typename Product, bool kSums>
__global__ void __launch_bounds__(Product::kThreads)
    walk_lines(const SelectParams params, const LineWorkspace lines, bool aligned) {
  if (!Product::kIsLaunched) return;
  using T = typename Product::T;
  extern __shared__ __align__(128) char smem[];
  __shared__ float products[kLastRows * kProductPitch];
  __shared__ Interval keys[kLastRows];
  const int32_t tiles = ceil_div(params.problem.seq_kv, kVectorTile);
  const int32_t spans = ceil_div(params.problem.seq_kv, kLineKeys);
  const int64_t index = blockIdx.x / spans;
  const int32_t span = static_cast<int32_t>(blockIdx.x % spans);
  const int64_t batch = index / params.problem.heads_q, head = index % params.problem.heads_q;
  const Estimate rows = {Vectors::kRows, params.query, params.keys.key};
  VectorTile<T> tile = {params,
                        rows,
                        nullptr,
                        static_cast<const T*>(params.query.data) + batch * params.query.stride_b +
                            head * params.query.stride_h,
                        static_cast<const T*>(params.keys.key.data) +
                            batch * params.keys.key.stride_b +
                            head / params.problem.group() * params.keys.key.stride_h,
                        batch,
                        {first_row(params, batch), params.rows(batch)},
                        {}};
  const Product product = {ptx::shared_address(smem), aligned};
  product.start(tile);
  if (threadIdx.x < kLastRows) {
    const int32_t i = tile.query_vectors.begin + threadIdx.x;
    keys[threadIdx.x] =
        i < tile.query_vectors.end ? params.keys_of_row(batch, head, i) : Interval{};
  }
  RowTotals<Product::kThreads / 32> totals;
  totals.clear();
  constexpr int32_t kTiles = kLineKeys / kVectorTile;
  for (int32_t t = span * kTiles; t < imin((span + 1) * kTiles, tiles); ++t) {
    tile.key_vectors = {t * kVectorTile, imin((t + 1) * kVectorTile, params.problem.seq_kv)};
    product.compute(tile, products);
    __syncthreads();
    LineTile work = {params, lines, products, keys, index, t, params.scores.scale};
    work.cap();
    if constexpr (kSums) {
      work.weigh();
      __syncthreads();
      work.add_lines();
    } else {
      totals.add(work);
    }
    __syncthreads();
  }
  if constexpr (!kSums) totals.write(lines.partial + int64_t{blockIdx.x} * kLastRows);
}

/// Each row's lse, from its spans of keys in their order; a warp a row.
__global__ void __launch_bounds__(32)
    merge_last_rows(const SelectParams params, const LineWorkspace lines) {
  const int32_t spans = ceil_div(params.problem.seq_kv, kLineKeys);
  const int64_t index = blockIdx.x / kLastRows;
  const float2* partial = lines.partial + index * spans * kLastRows + blockIdx.x % kLastRows;
  float highest = -INFINITY, sum = 0.0f;
  for (int32_t t = threadIdx.x; t < spans; t += 32) {
    highest = fmaxf(highest, partial[int64_t{t} * kLastRows].x);
  }
  for (int step = 16; step > 0; step /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  }
  for (int32_t t = threadIdx.x; t < spans; t += 32) {
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
  const int64_t heads = int64_t{params.problem.batch} * params.problem.heads_q;
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < heads * num_slashes;
       at += int64_t{gridDim.x} * blockDim.x) {
    const LineSums sums(params, lines, at / num_slashes);
    const int32_t first = first_row(params, at / num_slashes / params.problem.heads_q);
    const int64_t difference = at % num_slashes * step - int64_t{params.num_kv} * params.block_kv;
    const int64_t none = first - difference - (params.problem.seq_kv - 1);  // t of entry 0
    const int64_t entries = int64_t{params.problem.seq_kv} + kLastRows;
    float sum = 0.0f;
    int64_t t = 1 - params.block_kv;
    for (t = t < none ? none : t; t < params.block_q && t < none + entries; ++t) {
      const auto past = static_cast<int32_t>(t);
      const int32_t pairs = imin(params.block_q, params.block_kv + past) - imax(past, 0);
      sum += static_cast<float>(pairs) * static_cast<float>(sums.diagonals[t - none]);
    }
    lines.slashes[at] = sum;
  }
}

/// Half by columns, half by diagonals, each divided by its sum over the blocks that are visible.
__global__ void __launch_bounds__(kLineThreads)
    share_lines(const SelectParams params, const LineWorkspace lines, int32_t step,
                int64_t num_slashes, float* shares) {
  __shared__ float warps[2][kLineThreads / 32];
  __shared__ HullStorage hull;
  const int64_t index = blockIdx.x / params.num_q;
  const int32_t query_block = static_cast<int32_t>(blockIdx.x % params.num_q);
  const int64_t batch = index / params.problem.heads_q, head = index % params.problem.heads_q;
  const LineSums sums(params, lines, index);
  const Interval keys =
      hull_of_rows(params, batch, head, 1, params.rows_of_block(batch, query_block), hull);
  const Interval visible = SelectParams::blocks_of(keys, params.block_kv);
  const bool is_nan = threadIdx.x < kLastRows && isnan(lines.lse[index * kLastRows + threadIdx.x]);
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
  const bool poisoned = __syncthreads_or(is_nan);
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

template <typename Product>
Status launch_walks(const SelectParams& params, const LineWorkspace& lines) {
  cudaStream_t stream = to_stream(params.stream);
  const int64_t heads = int64_t{params.problem.batch} * params.problem.heads_q;
  const auto spans = static_cast<uint32_t>(heads * ceil_div(params.problem.seq_kv, kLineKeys));
  const bool aligned = begins_at_16_bytes(params.query, size_of(params.problem.dtype)) &&
                       begins_at_16_bytes(params.keys.key, size_of(params.problem.dtype));
  constexpr int kBytes = Product::kSharedBytes;
  Status status = allow_shared_bytes(walk_lines<Product, false>, kBytes);
  if (status.ok()) status = allow_shared_bytes(walk_lines<Product, true>, kBytes);
  if (!status.ok()) return status;
  walk_lines<Product, false><<<spans, Product::kThreads, kBytes, stream>>>(params, lines, aligned);
  merge_last_rows<<<static_cast<uint32_t>(heads * kLastRows), 32, 0, stream>>>(params, lines);
  walk_lines<Product, true><<<spans, Product::kThreads, kBytes, stream>>>(params, lines, aligned);
  return launched();
}

}  // namespace

Status launch_lines(const SelectParams& params, const SelectWorkspace& workspace) {
  cudaStream_t stream = to_stream(params.stream);
  const LineWorkspace& lines = workspace.lines;
  const int64_t heads = int64_t{params.problem.batch} * params.problem.heads_q;
  const int64_t bytes = heads * (int64_t{params.num_kv} + params.problem.seq_kv + kLastRows) *
                        sizeof(unsigned long long);
  cudaError_t error = cudaMemsetAsync(lines.sums, 0, bytes, stream);
  if (error != cudaSuccess) return to_status(error);
  const int32_t step = slash_step(params);
  const int64_t slashes = num_slashes(params);
  Status status = with_vector_product(
      params, [&](auto tag) { return launch_walks<typename decltype(tag)::Type>(params, lines); });
  if (!status.ok()) return status;
  sum_diagonals<<<grid_for(heads * slashes, kLineThreads), kLineThreads, 0, stream>>>(
      params, lines, step, slashes);
  share_lines<<<static_cast<uint32_t>(heads * params.num_q), kLineThreads, 0, stream>>>(
      params, lines, step, slashes, workspace.scores);
  return launched();
}

}  // namespace sparse_attn::cuda

// Shares by products of vectors: a softmax over key vectors for each query vector, summed by key
// block and by query block, in one walk over the products. A thread block owns whole query blocks;
// for each of its query vectors it keeps the logarithm of the mass of every key block, takes them
// relative to their sum once the walk has ended, and adds up the vectors of each query block in
// their order. So nothing of the size of the products is stored, and no order depends on timing.
#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/mask.cuh"
#include "estimate_hopper.h"
#include "extremes_hopper.h"
#include "slices_hopper.h"
#include "vector_product.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int kMaxOwners = kVectorTile;  // query blocks of a tile

/// Shared memory beside the products' tiles.
struct EstimateStorage {
  float products[kVectorTile * kProductPitch];
  Interval seen[kVectorTile];        // key vectors that a query vector sees
  uint32_t query_bits[kVectorTile];  // antidiagonal: rows of the square that exist
  uint32_t key_bits[kVectorTile];    // the same of keys; else all or none
  float lse[kVectorTile];
  float highest[256], sum[256];  // of a thread's masses
  int32_t live[kMaxOwners];      // query vectors that see a key
  int32_t begin, end;            // of any vector's seen
};

/// A query vector's masses as they come: log2 of their sum.
struct RunningMass {
  float highest = -INFINITY, sum = 0.0f;

  /// Takes in 2^mass; NaN stays.
  __device__ void add(float mass) {
    if (mass > highest) {
      sum = sum * exp2f(highest - mass) + 1.0f;
      highest = mass;
    } else if (mass != -INFINITY) {
      sum += exp2f(mass - highest);
    }
  }
  __device__ void add(const RunningMass& other) {
    if (other.sum == 0.0f) return;
    float top = fmaxf(highest, other.highest);
    sum = sum * (highest == -INFINITY ? 0.0f : exp2f(highest - top)) +
          other.sum * (other.highest == -INFINITY ? 1.0f : exp2f(other.highest - top));
    highest = top;
  }
  __device__ float log() const { return highest + log2f(sum); }
};

/// log2(2^a + 2^b)
__device__ float log_add(float a, float b) {
  RunningMass mass;
  mass.add(a);
  mass.add(b);
  return mass.sum == 0.0f ? -INFINITY : mass.log();
}

template <typename Product>
struct BlockEstimate {
  using T = typename Product::T;
  static constexpr int kThreads = Product::kThreads;

  const SelectParams& params;
  const Estimate& estimate;
  const int32_t* marks;
  EstimateStorage& storage;
  Product product;
  float* masses;  // [num_kv, kVectorTile]
  int64_t batch, head;
  Interval blocks;  // query blocks

  /// Whether a thread must look at which keys of a vector exist.
  __device__ bool has_holes() const {
    return estimate.kind == Vectors::kAntidiagonal ||
           (marks != nullptr && estimate.kind != Vectors::kRows);
  }
  __device__ uint32_t existing_keys(int32_t vector) const {
    uint32_t bits = 0;
    for (int32_t s = 0; s < estimate.keys; ++s) {
      const bool exists = key_exists(params, marks, batch, vector * estimate.keys + s);
      if (exists && estimate.kind != Vectors::kAntidiagonal) return ~0u;
      if (exists) bits |= 1u << (estimate.keys - 1 - s);
    }
    return bits;
  }
  __device__ Interval seen_by(int32_t vector) const {
    return estimate.seen(params, batch, head, vector);
  }
  __device__ int32_t owner(int32_t vector) const {
    return estimate.queries(params, batch, vector).begin / params.block_q - blocks.begin;
  }

  /// Counts the vectors of each query block that see a key.
  __device__ void count_live(Interval vectors) const {
    for (int i = threadIdx.x; i < kMaxOwners; i += kThreads) storage.live[i] = 0;
    __syncthreads();
    for (int32_t v = vectors.begin + threadIdx.x; v < vectors.end; v += kThreads) {
      if (!seen_by(v).empty()) atomicAdd(&storage.live[owner(v)], 1);
    }
    __syncthreads();
  }

  __device__ void find_rows(Interval vectors) const {
    if (threadIdx.x == 0) {
      storage.begin = kUnlimited;
      storage.end = 0;
    }
    __syncthreads();
    if (threadIdx.x < kVectorTile) {
      const int32_t vector = vectors.begin + threadIdx.x;
      Interval seen = {};
      uint32_t bits = ~0u;
      if (vector < vectors.end) {
        seen = seen_by(vector);
        if (estimate.kind == Vectors::kAntidiagonal) {
          bits = (1u << estimate.queries(params, batch, vector).size()) - 1;
        }
      }
      storage.seen[threadIdx.x] = seen;
      storage.query_bits[threadIdx.x] = bits;
      if (!seen.empty()) {
        atomicMin(&storage.begin, seen.begin);
        atomicMax(&storage.end, seen.end);
      }
    }
    __syncthreads();
  }

  /// The score of a product in units of log2.
  __device__ float score(float x, int pairs, float scale) const {
    if (estimate.kind == Vectors::kAntidiagonal) x /= static_cast<float>(pairs);
    return kLog2e * capped(scale * x, params.scores.softcap);
  }

  /// log2 of the mass of the columns that the row sees.
  __device__ float mass_of(int row, Interval columns, int32_t first, bool holes,
                           float scale) const {
    const float* products = storage.products + row * kProductPitch;
    const Interval seen = storage.seen[row];
    columns = intersect(columns, {seen.begin - first, seen.end - first});
    const uint32_t query_bits = storage.query_bits[row];
    float highest = -INFINITY, sum = 0.0f;
    for (int c = columns.begin; c < columns.end; ++c) {
      const uint32_t pairs = holes ? query_bits & storage.key_bits[c] : 1u;
      if (pairs != 0) highest = fmaxf(highest, score(products[c], __popc(pairs), scale));
    }
    if (highest == -INFINITY) highest = 0.0f;
    for (int c = columns.begin; c < columns.end; ++c) {
      const uint32_t pairs = holes ? query_bits & storage.key_bits[c] : 1u;
      if (pairs != 0) sum += exp2f(score(products[c], __popc(pairs), scale) - highest);
    }
    return highest + log2f(sum);
  }

  /// Walks over the key vectors that some row sees; writes the masses and each row's lse.
  __device__ void walk(VectorTile<T>& tile) const {
    const int32_t per_block = estimate.per_block;
    const bool pieces = per_block > kVectorTile;  // of a key block, else whole blocks
    const int32_t segment = imin(per_block, kVectorTile);
    const int32_t width = kVectorTile / segment * segment;
    const bool holes = has_holes();
    const int32_t end = storage.end;
    const int row = threadIdx.x % kVectorTile;
    RunningMass running;
    product.start(tile);
    int32_t first = end == 0 ? 0 : storage.begin / per_block * per_block;
    while (first < end) {
      int32_t next = first + width;
      if (pieces) next = imin(next, (first / per_block + 1) * per_block);
      tile.key_vectors = {first, imin(next, end)};
      if (holes && threadIdx.x < kVectorTile) {
        const int32_t vector = first + threadIdx.x;
        storage.key_bits[threadIdx.x] = vector < end ? existing_keys(vector) : 0;
      }
      product.compute(tile, storage.products);
      __syncthreads();
      for (int s = threadIdx.x / kVectorTile; s * segment < next - first;
           s += kThreads / kVectorTile) {
        const int32_t block = first / per_block + s;
        if (block >= params.num_kv) break;
        const Interval columns = {s * segment, imin((s + 1) * segment, next - first)};
        float mass = mass_of(row, columns, first, holes, tile.scale());
        running.add(mass);
        float& place = masses[int64_t{block} * kVectorTile + row];
        if (pieces && first % per_block != 0) mass = log_add(place, mass);
        place = mass;
      }
      __syncthreads();
      first = next;
    }
    storage.highest[threadIdx.x] = running.highest;
    storage.sum[threadIdx.x] = running.sum;
    __syncthreads();
    if (threadIdx.x < kVectorTile) {
      for (int other = row + kVectorTile; other < kThreads; other += kVectorTile) {
        running.add(RunningMass{storage.highest[other], storage.sum[other]});
      }
      storage.lse[row] = running.log();
    }
    __syncthreads();
  }

  /// Adds the vectors' shares to their query blocks'; `again` where earlier vectors are in them.
  __device__ void write(Interval vectors, bool again, float* shares) const {
    const Interval there = storage.end == 0 ? Interval{}
                                            : Interval{storage.begin / estimate.per_block,
                                                       ceil_div(storage.end, estimate.per_block)};
    for (int32_t j0 = 0; j0 < params.num_kv; j0 += kVectorTile) {
      for (int i = threadIdx.x; i < kVectorTile * kVectorTile; i += kThreads) {
        const int row = i % kVectorTile, column = i / kVectorTile;
        float share = 0.0f;
        if (there.contains(j0 + column) && !storage.seen[row].empty()) {
          const float mass = masses[int64_t{j0 + column} * kVectorTile + row];
          if (mass != -INFINITY) share = exp2f(mass - storage.lse[row]);
        }
        storage.products[column * kProductPitch + row] = share;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kVectorTile * blocks.size(); i += kThreads) {
        const int column = i % kVectorTile, block = i / kVectorTile;
        if (j0 + column >= params.num_kv) continue;
        const int32_t index = blocks.begin + block;
        const Interval own =
            intersect(vectors, estimate.vectors(params, batch, {index, index + 1}));
        float sum = 0.0f;
        for (int32_t v = own.begin; v < own.end; ++v) {
          sum += storage.products[column * kProductPitch + v - vectors.begin];
        }
        if (storage.live[block] > 0) sum /= static_cast<float>(storage.live[block]);
        float& share = shares[int64_t{index} * params.num_kv + j0 + column];
        share = again || estimate.adds ? share + sum : sum;
      }
      __syncthreads();
    }
  }

  __device__ void run(VectorTile<T> tile, float* shares) const {
    const Interval all = estimate.vectors(params, batch, blocks);
    count_live(all);
    for (int32_t first = all.begin; first == all.begin || first < all.end; first += kVectorTile) {
      tile.query_vectors = {first, imin(first + kVectorTile, all.end)};
      find_rows(tile.query_vectors);
      walk(tile);
      write(tile.query_vectors, first > all.begin, shares);
    }
  }
};

template <typename Product>
__global__ void __launch_bounds__(Product::kThreads)
    estimate_blocks(const SelectParams params, const Estimate estimate, const int32_t* marks,
                    int32_t blocks_at_once, bool aligned, float* masses, float* shares) {
  if (!Product::kIsLaunched) return;
  using T = typename Product::T;
  extern __shared__ __align__(128) char smem[];
  __shared__ EstimateStorage storage;
  const int32_t units = ceil_div(params.num_q, blocks_at_once);
  const int64_t heads = int64_t{params.problem.batch} * params.problem.heads_q;
  masses += int64_t{blockIdx.x} * params.num_kv * kVectorTile;
  for (int64_t item = blockIdx.x; item < heads * units; item += gridDim.x) {
    const int32_t unit = units - 1 - static_cast<int32_t>(item / heads);  // the longest first
    const int64_t index = item % heads;
    const int64_t batch = index / params.problem.heads_q, head = index % params.problem.heads_q;
    const Interval blocks = {unit * blocks_at_once,
                             imin((unit + 1) * blocks_at_once, params.num_q)};
    const TensorView& query = estimate.query;
    const TensorView& key = estimate.key;
    const VectorTile<T> tile = {
        params,
        estimate,
        marks,
        static_cast<const T*>(query.data) + batch * query.stride_b + head * query.stride_h,
        static_cast<const T*>(key.data) + batch * key.stride_b +
            head / params.problem.group() * key.stride_h,
        batch,
        {},
        {}};
    const BlockEstimate<Product> work = {
        params, estimate, marks, storage, {ptx::shared_address(smem), aligned},
        masses, batch,    head,  blocks};
    work.run(tile, shares + index * params.num_q * params.num_kv);
    __syncthreads();
  }
}

template <typename Product>
Status launch(const SelectParams& params, const Estimate& estimate,
              const SelectWorkspace& workspace) {
  auto* kernel = estimate_blocks<Product>;
  Status status = allow_shared_bytes(kernel, Product::kSharedBytes);
  if (!status.ok()) return status;
  const int32_t of_block = ceil_div(params.block_q, estimate.rows);
  const int32_t at_once = imax(1, kVectorTile / of_block);
  const int64_t items =
      ceil_div64(params.num_q, at_once) * params.problem.batch * params.problem.heads_q;
  const bool aligned = begins_at_16_bytes(estimate.query, size_of(params.problem.dtype)) &&
                       begins_at_16_bytes(estimate.key, size_of(params.problem.dtype));
  const uint32_t grid = static_cast<uint32_t>(items < workspace.walks ? items : workspace.walks);
  kernel<<<grid, Product::kThreads, Product::kSharedBytes, to_stream(params.stream)>>>(
      params, estimate, workspace.key_marks, at_once, aligned, workspace.masses, workspace.scores);
  return launched();
}

Status launch_estimate(const SelectParams& params, const Estimate& estimate,
                       const SelectWorkspace& workspace) {
  if (serves_estimate_hopper(params, estimate)) {
    return launch_estimate_hopper(params, estimate, workspace);
  }
  if (serves_slices_hopper(params, estimate)) {
    return launch_slices_hopper(params, estimate, workspace);
  }
  return with_vector_product(params, [&](auto tag) {
    return launch<typename decltype(tag)::Type>(params, estimate, workspace);
  });
}

/// Vectors of a workspace, [B, heads, count, head_dim].
TensorView packed(void* data, const SelectParams& params, int32_t heads, int64_t count) {
  const int64_t head = count * params.problem.head_dim;
  return {data, heads * head, head, params.problem.head_dim};
}

}  // namespace

Status launch_products(const SelectParams& params, const SelectWorkspace& workspace) {
  Estimate estimate = {Vectors::kAntidiagonal, params.query, params.keys.key};
  if (params.selector == Selector::kAntidiagonal) {
    estimate.rows = estimate.keys = estimate.slices = params.stride;
    estimate.per_block = params.block_kv / params.stride;
    return launch_estimate(params, estimate, workspace);
  }
  if (params.selector == Selector::kMinMax) {
    const bool by_wgmma = serves_extremes_hopper(params);
    Status status = launch_extremes(params, by_wgmma, workspace);
    if (!status.ok()) return status;
    estimate.kind = Vectors::kExtremes;
    estimate.key =
        packed(workspace.key_vectors, params, params.problem.heads_kv, 2ll * params.num_kv);
    if (by_wgmma) {
      estimate.key.stride_s *= 2;
      status = launch_extremes_hopper(params, estimate.key, workspace);
    } else {
      estimate.keys = params.block_kv;
      estimate.slices = 2;
      status = launch_estimate(params, estimate, workspace);
    }
    return status.ok() ? launch_not_held(params, workspace) : status;
  }
  Status status = launch_group_means(params, workspace);
  if (!status.ok()) return status;
  const int64_t groups = params.groups;
  Estimate means = {
      Vectors::kGroups,
      packed(workspace.query_vectors, params, params.problem.heads_q, params.num_q * groups),
      packed(workspace.key_vectors, params, params.problem.heads_kv, params.num_kv * groups)};
  means.rows = params.block_q / params.groups;
  means.keys = params.block_kv / params.groups;
  means.per_block = params.groups;
  status = launch_estimate(params, means, workspace);
  if (!status.ok() || params.row_step > params.problem.seq_q) return status;
  estimate.kind = Vectors::kRows;
  estimate.rows = params.row_step;
  estimate.per_block = params.block_kv;
  estimate.adds = true;
  return launch_estimate(params, estimate, workspace);
}

}  // namespace sparse_attn::cuda

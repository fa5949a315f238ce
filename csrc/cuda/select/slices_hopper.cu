// The walk of estimate.cu by wgmma, for estimates of several slices: `antidiagonal`. Its products
// are as deep as the slices together, so that a tile's run much longer than its exponentials; what
// counts is that few bytes come from L2. A thread block is a warp that loads and two warpgroups
// with 64 query vectors each, on tiles of 256 key vectors; slices of both come in stages of 64
// columns. One launch writes the masses of key blocks by query vector, the next one shares.
#include "../common/launch.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/tensor_map.h"
#include "roles.cuh"
#include "slices_consumer.cuh"

namespace sparse_attn::cuda {
namespace slices {
namespace {

__device__ void load(const Arguments& args, Storage& storage) {
  const Estimate& estimate = args.estimate;
  const int slabs = ceil_div(args.params.problem.head_dim, kSlabColumns);
  int stage = 0;
  uint32_t parity = 0;
  TileOrder order(args);
  for (int turn = 0;; ++turn) {
    const Tile tile = order.take();
    const int slot = turn % kItems;
    ptx::mbarrier_wait(ptx::shared_address(&storage.item_empty[slot]), turn / kItems % 2 ^ 1);
    storage.item[slot] = tile;
    ptx::mbarrier_arrive(ptx::shared_address(&storage.item_full[slot]));
    if (tile.head < 0) return;
    const int32_t batch = args.batch(tile.head), head = args.head_q(tile.head);
    const int32_t key_head = head / args.params.problem.group();
    for (int slab = 0; slab < slabs; ++slab) {
      for (int slice = 0; slice < estimate.slices; ++slice) {
        const int key_slice = estimate.slices - 1 - slice;
        ptx::mbarrier_wait(ptx::shared_address(&storage.empty[stage]), parity ^ 1);
        const uint32_t full = ptx::shared_address(&storage.full[stage]);
        ptx::mbarrier_arrive_expect(full, kQueryBytes + kKeyBytes);
        ptx::tma_load(
            ptx::shared_address(storage.query[stage]), &args.query[slice >= args.last_query],
            {slab * kSlabColumns, slice, tile.row * kTileRows, head, batch}, full, ptx::kEvictLast);
        ptx::tma_load(ptx::shared_address(storage.key[stage]),
                      &args.key[key_slice >= args.last_key],
                      {slab * kSlabColumns, key_slice, tile.column * kSliceKeys, key_head, batch},
                      full, ptx::kEvictLast);
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }
}

template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_slices(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char memory[];
  auto& storage = *reinterpret_cast<Storage*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage.item_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.item_empty[i]), kConsumers * kWarpgroup);
    }
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.empty[i]), kWarps);
    }
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  auto consume = [&](int consumer) { Consumer<kDtype>{args, storage, consumer}.run(); };
  split_roles<kLoaderRegisters, kConsumerRegisters>([&] { load(args, storage); }, consume);
}

constexpr int kShareThreads = 256;
constexpr int32_t kMostVectors = 256;  // of a query block

/// The shares of a query block of a head, from the masses of its vectors.
__global__ void __launch_bounds__(kShareThreads)
    share_masses(const __grid_constant__ Arguments args) {
  __shared__ float lse[kMostVectors];
  __shared__ int32_t ends[kMostVectors];  // of the key blocks that a vector sees
  const SelectParams& params = args.params;
  const int32_t head = static_cast<int32_t>(blockIdx.x / params.num_q);
  const int32_t block = static_cast<int32_t>(blockIdx.x % params.num_q);
  const Interval own = args.estimate.vectors(params, args.batch(head), {block, block + 1});
  const float* masses = args.masses + (int64_t{head} * args.num_queries + own.begin) * args.pitch;
  for (int v = threadIdx.x / 32; v < own.size(); v += kShareThreads / 32) {
    const float* of_row = masses + int64_t{v} * args.pitch;
    const int32_t end = ceil_div(args.seen(head, own.begin + v), args.estimate.per_block);
    float highest = -INFINITY, sum = 0.0f;
    for (int32_t j = threadIdx.x % 32; j < end; j += 32) highest = fmaxf(highest, of_row[j]);
    for (int step = 16; step > 0; step /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
    }
    if (highest == -INFINITY) highest = 0.0f;
    for (int32_t j = threadIdx.x % 32; j < end; j += 32) {
      sum += ptx::exp2_approx(of_row[j] - highest);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) {
      lse[v] = sum == 0.0f ? INFINITY : highest + __log2f(sum);
      ends[v] = end;
    }
  }
  __syncthreads();
  // Later vectors see as much as the ones before, or more.
  const int32_t visible = own.empty() ? 0 : ends[own.size() - 1];
  float* shares =
      args.shares + (int64_t{args.first_head + head} * params.num_q + block) * params.num_kv;
  for (int32_t j = threadIdx.x; j < imin(visible, params.num_kv); j += kShareThreads) {
    float share = 0.0f;
    for (int v = 0; v < own.size(); ++v) {
      if (j < ends[v]) share += ptx::exp2_approx(masses[int64_t{v} * args.pitch + j] - lse[v]);
    }
    shares[j] = share;
  }
}

/// Rows of a tensor as slices of vectors: (column, slice, vector, head, batch), where the last
/// vector may lack some. `step` rows are from a vector to the next.
Status encode(const SelectParams& params, const TensorView& view, int32_t slices, int64_t step,
              int64_t vectors, int32_t heads, int32_t rows, CUtensorMap* map) {
  return encode_tensor_map(params.problem.dtype, view.data,
                           {{params.problem.head_dim, slices, vectors, heads, params.problem.batch},
                            {view.stride_s, step * view.stride_s, view.stride_h, view.stride_b},
                            {kSlabColumns, 1, rows, 1, 1}},
                           map);
}

template <Dtype kDtype>
Status launch_passes(const Arguments& args) {
  auto* kernel = multiply_slices<kDtype>;
  Status status = allow_shared_bytes(kernel, sizeof(Storage));
  if (!status.ok()) return status;
  int32_t multiprocessors = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, args.params.device);
  if (error != cudaSuccess) return to_status(error);
  const int64_t tiles =
      ceil_div64(args.num_queries, kTileRows) * ceil_div64(args.num_keys, kSliceKeys) * args.heads;
  const auto blocks = static_cast<uint32_t>(tiles < multiprocessors ? tiles : multiprocessors);
  kernel<<<blocks, kThreads, sizeof(Storage), to_stream(args.params.stream)>>>(args);
  status = launched();
  if (!status.ok()) return status;
  const auto lists = static_cast<uint32_t>(args.heads * args.params.num_q);
  share_masses<<<lists, kShareThreads, 0, to_stream(args.params.stream)>>>(args);
  return launched();
}

}  // namespace
}  // namespace slices

using namespace slices;

bool serves_slices_hopper(const SelectParams& params, const Estimate& estimate) {
  if (!has_wgmma(params.device) || !features_of(params).within(kScoredByWgmma) ||
      !begins_at_16_bytes(estimate.query, 2) || !begins_at_16_bytes(estimate.key, 2)) {
    return false;
  }
  const int32_t per_block = estimate.per_block;
  return estimate.kind == Vectors::kAntidiagonal && per_block >= 4 &&
         kFragmentColumns % per_block == 0 &&
         ceil_div(params.block_q, estimate.slices) <= kMostVectors;
}

Status launch_slices_hopper(const SelectParams& params, const Estimate& estimate,
                            const SelectWorkspace& workspace) {
  Arguments args = {};
  args.params = params;
  args.estimate = estimate;
  args.pitch = static_cast<int32_t>(slice_masses(params));
  args.masses = workspace.masses;
  args.shares = workspace.scores;
  const int32_t slices = estimate.slices, query_slices = estimate.rows;
  // What was gathered has whole vectors; of other keys the host knows how many exist, since calls
  // with offsets on the device are gathered.
  const bool gathered = params.used_rows != nullptr;
  const int32_t num_keys = gathered ? params.problem.seq_kv : params.num_keys(0);
  const Count queries = Count::of(params.problem.seq_q, query_slices);
  const Count keys = Count::of(num_keys, slices);
  args.num_queries = queries.vectors;
  args.num_keys = keys.vectors;
  args.last_query = gathered ? query_slices : queries.last;
  args.last_key = gathered ? slices : keys.last;
  for (int whole = 0; whole < 2; ++whole) {
    Status status =
        encode(params, estimate.query, query_slices, query_slices, queries.vectors - whole,
               params.problem.heads_q, kTileRows, &args.query[whole]);
    if (status.ok()) {
      status = encode(params, estimate.key, slices, slices, keys.vectors - whole,
                      params.problem.heads_kv, kSliceKeys, &args.key[whole]);
    }
    if (!status.ok()) return status;
  }
  const int32_t heads = params.problem.batch * params.problem.heads_q;
  for (int32_t head = 0; head < heads; head += workspace.mass_heads) {
    args.first_head = head;
    args.heads = imin(workspace.mass_heads, heads - head);
    Status status = params.problem.dtype == Dtype::kFloat16 ? launch_passes<Dtype::kFloat16>(args)
                                                            : launch_passes<Dtype::kBFloat16>(args);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace sparse_attn::cuda

// The walk of estimate.cu by wgmma, for estimates of one slice in half precision without bounds:
// the two halves of `mixed`. A thread block is a warp that loads and three warpgroups, each with 64
// query vectors of its own; all read the same tiles of 128 key vectors. The products of one run
// under the exponentials of the others.
//
//   masses of a warpgroup, in the workspace    [num_kv, 64], log2 of a key block's mass for a
//   vector shares of its query blocks                 2^(mass - lse), summed over a block's vectors
//
// Where there are few items, as of a chunk of a prompt, a cluster shares the keys of each: its
// thread blocks walk over segments of their own, and exchange their sums.
#include "../common/launch.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/tensor_map.h"
#include "estimate_consumer.cuh"
#include "estimate_hopper.h"
#include "roles.cuh"

namespace sparse_attn::cuda {
namespace estimates {
namespace {

template <typename C>
__device__ void load(const Arguments& args, Storage<C>& storage) {
  int stage = 0;
  uint32_t parity = 0;
  int64_t item = blockIdx.x / args.parts;
  for (int turn = 0;; ++turn) {
    ptx::mbarrier_wait(ptx::shared_address(&storage.item_empty), turn % 2 ^ 1);
    const uint32_t item_full = ptx::shared_address(&storage.item_full);
    storage.item = item < args.items ? item : -1;
    if (item >= args.items) return ptx::mbarrier_arrive(item_full);
    ptx::mbarrier_arrive_expect(item_full, kConsumers * C::kQueryBytes);
    int32_t tiles = 0;
    Unit unit(args, item, 0);
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      unit = Unit(args, item, consumer);
      tiles = imax(tiles, unit.tiles(args));
      for (int slab = 0; slab < C::kSlabs; ++slab) {
        ptx::tma_load(
            ptx::shared_address(storage.query[consumer]) + slab * kVectors * kSlabRowBytes,
            &args.query, {slab * kSlabColumns, unit.vectors.begin, 0, unit.head, unit.batch},
            item_full, ptx::kEvictFirst);
      }
    }
    const int32_t key_head = unit.head / args.params.problem.group();
    const Interval segments = own_segments(args);
    const int32_t length = unit.segment_tiles(args);
    const int32_t end = imin(tiles, segments.end * length);
    for (int32_t tile = segments.begin * length; tile < end; ++tile) {
      ptx::mbarrier_wait(ptx::shared_address(&storage.key_empty[stage]), parity ^ 1);
      const uint32_t key_full = ptx::shared_address(&storage.key_full[stage]);
      ptx::mbarrier_arrive_expect(key_full, C::kKeyBytes);
      for (int slab = 0; slab < C::kSlabs; ++slab) {
        ptx::tma_load(ptx::shared_address(storage.key[stage]) + slab * kKeys * kSlabRowBytes,
                      &args.key, {slab * kSlabColumns, tile * kKeys, 0, key_head, unit.batch},
                      key_full, ptx::kEvictLast);
      }
      if (++stage == C::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    item = args.counter == nullptr ? args.items : gridDim.x + atomicAdd(args.counter, 1);
  }
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    estimate_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char memory[];
  auto& storage = *reinterpret_cast<Storage<C>*>(memory);
  ptx::wait_for_primary();
  if (threadIdx.x == 0) {
    constexpr int kWarps = kConsumers * kWarpgroup / 32;
    ptx::mbarrier_init(ptx::shared_address(&storage.item_full), 1);
    ptx::mbarrier_init(ptx::shared_address(&storage.item_empty), kConsumers * kWarpgroup);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage.key_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.key_empty[i]), kWarps);
    }
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  auto consume = [&](int consumer) {
    const int64_t cluster = blockIdx.x / args.parts;
    float* masses = args.masses + (cluster * kConsumers + consumer) * args.params.num_kv * kVectors;
    Consumer<C>{args, storage, consumer, masses}.run();
  };
  split_roles<kLoaderRegisters, kConsumerRegisters>([&] { load<C>(args, storage); }, consume);
}

/// The vectors of a tensor as a map: (column, 1, vector, head, batch), box rows `rows`.
Status encode(const SelectParams& params, const TensorView& view, int64_t first, int64_t step,
              int64_t vectors, int32_t heads, int32_t rows, CUtensorMap* map) {
  const auto* data = static_cast<const uint16_t*>(view.data) + first * view.stride_s;
  return encode_tensor_map(params.problem.dtype, data,
                           {{params.problem.head_dim, vectors, 1, heads, params.problem.batch},
                            {step * view.stride_s, 0, view.stride_h, view.stride_b},
                            {kSlabColumns, rows, 1, 1, 1}},
                           map);
}

/// Thread blocks that share an item of so many tiles: as many as the device has left.
int32_t parts_of(int64_t items, int32_t tiles, int32_t multiprocessors) {
  constexpr int32_t kLeastTiles = 4;  // of a part
  constexpr int32_t kUnpaired = 4;    // multiprocessors that may be left over by clusters
  int32_t parts = 1;
  while (parts < kSegments && items * parts * 2 <= multiprocessors - kUnpaired &&
         tiles >= kLeastTiles * parts * 2) {
    parts *= 2;
  }
  return parts;
}

template <typename C>
Status launch(Arguments& args, int32_t most, int32_t multiprocessors) {
  constexpr int kBytes = sizeof(Storage<C>);
  auto* kernel = estimate_kernel<C>;
  const Status status = allow_shared_bytes(kernel, kBytes);
  if (!status.ok()) return status;
  cudaStream_t stream = to_stream(args.params.stream);
  args.parts = 1;
  if (args.items > most) {
    const cudaError_t error = cudaMemsetAsync(args.counter, 0, sizeof(int32_t), stream);
    if (error != cudaSuccess) return to_status(error);
    kernel<<<most, kThreads, kBytes, stream>>>(args);
    return launched();
  }
  args.counter = nullptr;
  const int32_t vectors = ceil_div(args.params.problem.seq_kv, args.estimate.keys);
  args.parts = parts_of(args.items, ceil_div(vectors, kKeys), multiprocessors);
  const LaunchShape shape = {static_cast<uint32_t>(args.items * args.parts),
                             kThreads,
                             kBytes,
                             stream,
                             static_cast<uint32_t>(args.parts),
                             true};
  return launch_dependent(kernel, shape, args);
}

template <Dtype kDtype>
Status launch_head_dim(Arguments& args, int32_t most, int32_t multiprocessors) {
  if (args.params.problem.head_dim <= 64) {
    return launch<Config<kDtype, 64>>(args, most, multiprocessors);
  }
  return launch<Config<kDtype, 128>>(args, most, multiprocessors);
}

}  // namespace
}  // namespace estimates

using namespace estimates;

bool serves_estimate_hopper(const SelectParams& params, const Estimate& estimate) {
  const int32_t per_block = estimate.per_block;
  const bool whole = per_block >= 8 && per_block <= kKeys && kKeys % per_block == 0;
  return has_wgmma(params.device) && params.problem.head_dim <= 128 && whole &&
         estimate.slices == 1 && features_of(params).within(kScaledByWgmma) &&
         ceil_div(params.block_q, estimate.rows) <= kVectors &&
         begins_at_16_bytes(estimate.query, 2) && begins_at_16_bytes(estimate.key, 2);
}

Status launch_estimate_hopper(const SelectParams& params, const Estimate& estimate,
                              const SelectWorkspace& workspace) {
  Arguments args = {};
  args.params = params;
  args.estimate = estimate;
  const bool rows = estimate.kind == Vectors::kRows;
  const int32_t step = rows ? estimate.rows : 1;
  const int64_t queries =
      rows ? params.problem.seq_q / step : ceil_div(params.problem.seq_q, estimate.rows);
  const int64_t keys = ceil_div(params.problem.seq_kv, estimate.keys);
  Status status = encode(params, estimate.query, step - 1, step, queries, params.problem.heads_q,
                         kVectors, &args.query);
  if (!status.ok()) return status;
  status = encode(params, estimate.key, 0, 1, keys, params.problem.heads_kv, kKeys, &args.key);
  if (!status.ok()) return status;
  args.blocks_at_once = imax(1, kVectors / ceil_div(params.block_q, estimate.rows));
  const int64_t units =
      int64_t{ceil_div(params.num_q, args.blocks_at_once)} * params.problem.group();
  args.teams = static_cast<int32_t>(ceil_div64(units, kConsumers));
  args.items = int64_t{args.teams} * params.problem.batch * params.problem.heads_kv;
  args.counter = workspace.counter;
  args.masses = workspace.masses;
  args.shares = workspace.scores;
  int32_t multiprocessors = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  if (error != cudaSuccess) return to_status(error);
  const int32_t most = imin(multiprocessors, workspace.walks / kConsumers);
  return params.problem.dtype == Dtype::kFloat16
             ? launch_head_dim<Dtype::kFloat16>(args, most, multiprocessors)
             : launch_head_dim<Dtype::kBFloat16>(args, most, multiprocessors);
}

}  // namespace sparse_attn::cuda

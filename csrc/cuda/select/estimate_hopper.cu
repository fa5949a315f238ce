// The walk of estimate.cu by wgmma, for estimates of one slice in half precision without bounds:
// the two halves of `mixed`. A thread block is a warp that loads and three warpgroups, each with 64
// query vectors of its own; all read the same tiles of 128 key vectors. The products of one run
// under the exponentials of the others.
//
//   masses of a warpgroup, in the workspace    [num_kv, 64], log2 of a key block's mass for a
//   vector shares of its query blocks                 2^(mass - lse), summed over a block's vectors
#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/tensor_map.h"
#include "estimate_consumer.cuh"
#include "estimate_hopper.h"

namespace sparse_attn::cuda {
namespace estimates {
namespace {

template <typename C>
__device__ void load(const Arguments& args, Storage<C>& storage) {
  int stage = 0;
  uint32_t parity = 0;
  int64_t item = blockIdx.x;
  for (int turn = 0;; ++turn) {
    ptx::mbarrier_wait(ptx::smem_address(&storage.item_empty), turn % 2 ^ 1);
    const uint32_t item_full = ptx::smem_address(&storage.item_full);
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
        ptx::tma_load(ptx::smem_address(storage.query[consumer]) + slab * kVectors * kRowBytes,
                      &args.query,
                      {slab * kSlabColumns, unit.vectors.begin, 0, unit.head, unit.batch},
                      item_full, ptx::kEvictFirst);
      }
    }
    const int32_t key_head = unit.head / args.params.problem.group();
    for (int32_t tile = 0; tile < tiles; ++tile) {
      ptx::mbarrier_wait(ptx::smem_address(&storage.key_empty[stage]), parity ^ 1);
      const uint32_t key_full = ptx::smem_address(&storage.key_full[stage]);
      ptx::mbarrier_arrive_expect(key_full, C::kKeyBytes);
      for (int slab = 0; slab < C::kSlabs; ++slab) {
        ptx::tma_load(ptx::smem_address(storage.key[stage]) + slab * kKeys * kRowBytes, &args.key,
                      {slab * kSlabColumns, tile * kKeys, 0, key_head, unit.batch}, key_full,
                      ptx::kEvictLast);
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
  if (threadIdx.x == 0) {
    constexpr int kWarps = kConsumers * kWarpgroup / 32;
    ptx::mbarrier_init(ptx::smem_address(&storage.item_full), 1);
    ptx::mbarrier_init(ptx::smem_address(&storage.item_empty), kWarps);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(ptx::smem_address(&storage.key_full[i]), 1);
      ptx::mbarrier_init(ptx::smem_address(&storage.key_empty[i]), kWarps);
    }
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers_back<kLoaderRegisters>();
    if (threadIdx.x == 0) load<C>(args, storage);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0) - 1;
    float* masses =
        args.masses + (int64_t{blockIdx.x} * kConsumers + consumer) * args.params.num_kv * kVectors;
    Consumer<C>{args, storage, consumer, masses}.run();
  }
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

template <typename C>
Status launch(Arguments& args, int32_t most) {
  constexpr int kBytes = sizeof(Storage<C>);
  auto* kernel = estimate_kernel<C>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return to_status(error);
  cudaStream_t stream = to_stream(args.params.stream);
  const uint32_t blocks = static_cast<uint32_t>(args.items < most ? args.items : most);
  if (blocks == args.items) args.counter = nullptr;
  if (args.counter != nullptr) {
    error = cudaMemsetAsync(args.counter, 0, sizeof(int32_t), stream);
    if (error != cudaSuccess) return to_status(error);
  }
  kernel<<<blocks, kThreads, kBytes, stream>>>(args);
  return launched();
}

template <Dtype kDtype>
Status launch_head_dim(Arguments& args, int32_t most) {
  if (args.params.problem.head_dim <= 64) return launch<Config<kDtype, 64>>(args, most);
  return launch<Config<kDtype, 128>>(args, most);
}

}  // namespace
}  // namespace estimates

using namespace estimates;

bool serves_estimate_hopper(const SelectParams& params, const Estimate& estimate) {
  int32_t major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, params.device);
  const bool halves = params.problem.dtype != Dtype::kFloat32 && params.problem.head_dim <= 128;
  const int32_t per_block = estimate.per_block;
  const bool whole = per_block >= 8 && per_block <= kKeys && kKeys % per_block == 0;
  return major == 9 && halves && whole && estimate.slices == 1 &&
         params.scores.bounds.data == nullptr && is_common_scale(params.scores.scale) &&
         params.scores.softcap == 0 && ceil_div(params.block_q, estimate.rows) <= kVectors &&
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
  args.teams = ceil_div(params.num_q, kConsumers * args.blocks_at_once);
  args.items = int64_t{args.teams} * params.problem.batch * params.problem.heads_q;
  args.counter = workspace.counter;
  args.masses = workspace.masses;
  args.shares = workspace.scores;
  int32_t multiprocessors = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  if (error != cudaSuccess) return to_status(error);
  const int32_t most = imin(multiprocessors, workspace.walks / kConsumers);
  return params.problem.dtype == Dtype::kFloat16 ? launch_head_dim<Dtype::kFloat16>(args, most)
                                                 : launch_head_dim<Dtype::kBFloat16>(args, most);
}

}  // namespace sparse_attn::cuda

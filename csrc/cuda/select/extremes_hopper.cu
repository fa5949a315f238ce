// The shares of `minmax` by wgmma. A thread block is four warpgroups, two above 128 columns, and a
// warpgroup that loads. The rows of a tile stay in shared memory, and the places of their signs in
// registers, while the extremes of all key blocks that they see stream past, twice: once for the
// rows' masses, which stay in registers too, and once for their shares. Scores are made twice, as
// storing them would move more bytes.
#include "../common/launch.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/tensor_map.h"
#include "extremes_consumer.cuh"
#include "extremes_hopper.h"

namespace sparse_attn::cuda {
namespace extremes {
namespace {

/// The threads that load, of different warps.
template <typename C>
struct Loader {
  const Arguments& args;
  Storage<C>& storage;

  __device__ void load_queries() const {
    uint32_t parity = 1;
    for_each_tile<C>(args, [&](const Tile& tile) {
      for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
        ptx::mbarrier_wait(ptx::shared_address(&storage.query_empty[consumer]), parity);
        const uint32_t full = ptx::shared_address(&storage.query_full[consumer]);
        ptx::mbarrier_arrive_expect(full, C::kQueryBytes);
        for (int slab = 0; slab < C::HEAD_DIM / kSlabColumns; ++slab) {
          ptx::tma_load(
              ptx::shared_address(storage.query[consumer]) + slab * kRows * kSlabRowBytes,
              &args.query,
              {slab * kSlabColumns, tile.first + consumer * kRows, 0, tile.head, tile.batch}, full,
              ptx::kEvictFirst);
        }
      }
      parity ^= 1;
    });
  }
  __device__ void load_keys() const {
    int stage = 0;
    uint32_t parity = 1;
    for_each_tile<C>(args, [&](const Tile& tile) {
      const int32_t head = tile.head / args.params.problem.group();
      for (int turn = 0; turn < 2 * tile.chunks; ++turn) {
        const int chunk = turn < tile.chunks ? turn : turn - tile.chunks;
        ptx::mbarrier_wait(ptx::shared_address(&storage.key_empty[stage]), parity);
        const uint32_t full = ptx::shared_address(&storage.key_full[stage]);
        ptx::mbarrier_arrive_expect(full, C::kKeyBytes);
        for (int slab = 0; slab < C::HEAD_DIM / kKeySlab; ++slab) {
          ptx::tma_load(ptx::shared_address(storage.key[stage]) + slab * C::kChunk * kSlabRowBytes,
                        &args.key, {slab * kSlabColumns, chunk * C::kChunk, 0, head, tile.batch},
                        full, ptx::kEvictLast);
        }
        stage = stage + 1 == C::kStages ? 0 : stage + 1;
        parity ^= stage == 0;
      }
    });
  }
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    multiply_extremes(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char memory[];
  auto& storage = *reinterpret_cast<Storage<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
      ptx::mbarrier_init(ptx::shared_address(&storage.query_full[consumer]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.query_empty[consumer]), kWarps);
    }
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&storage.key_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.key_empty[stage]), C::kConsumers * kWarps);
    }
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < kWarps) {
    ptx::give_registers_back<C::kLoaderRegisters>();
    const Loader<C> loader = {args, storage};
    if (threadIdx.x == 0) loader.load_keys();
    if (threadIdx.x == 32) loader.load_queries();
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    Consumer<C>{args, storage, warp / kWarps - 1}.run();
  }
}

template <typename C>
Status launch(Arguments& args, const TensorView& key) {
  const SelectParams& params = args.params;
  const Problem& problem = params.problem;
  Status status =
      encode_tensor_map(problem.dtype, params.query.data,
                        {{problem.head_dim, problem.seq_q, 1, problem.heads_q, problem.batch},
                         {params.query.stride_s, 0, params.query.stride_h, params.query.stride_b},
                         {kSlabColumns, kRows, 1, 1, 1}},
                        &args.query);
  if (!status.ok()) return status;
  status =
      encode_tensor_map(problem.dtype, key.data,
                        {{2 * problem.head_dim, params.num_kv, 1, problem.heads_kv, problem.batch},
                         {key.stride_s, 0, key.stride_h, key.stride_b},
                         {kSlabColumns, C::kChunk, 1, 1, 1}},
                        &args.key);
  if (!status.ok()) return status;
  int32_t multiprocessors = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  if (error != cudaSuccess) return to_status(error);
  auto* kernel = multiply_extremes<C>;
  status = allow_shared_bytes(kernel, sizeof(Storage<C>));
  if (!status.ok()) return status;
  const int64_t tiles = num_tiles<C>(problem);
  const auto blocks = static_cast<uint32_t>(tiles < multiprocessors ? tiles : multiprocessors);
  kernel<<<blocks, C::kThreads, sizeof(Storage<C>), to_stream(params.stream)>>>(args);
  return launched();
}

template <Dtype kDtype>
Status launch_head_dim(Arguments& args, const TensorView& key) {
  const int32_t head_dim = args.params.problem.head_dim;
  if (head_dim <= 64) return launch<Config<kDtype, 64>>(args, key);
  if (head_dim <= 128) return launch<Config<kDtype, 128>>(args, key);
  return launch<Config<kDtype, 256>>(args, key);
}

}  // namespace
}  // namespace extremes

using namespace extremes;

bool serves_extremes_hopper(const SelectParams& params) {
  return has_wgmma(params.device) && params.selector == Selector::kMinMax &&
         features_of(params).within(kScoredByWgmma) && params.problem.head_dim <= 256 &&
         begins_at_16_bytes(params.query, 2) && 2 * kRows % params.block_q == 0;
}

Status launch_extremes_hopper(const SelectParams& params, const TensorView& key,
                              const SelectWorkspace& workspace) {
  Arguments args = {};
  args.params = params;
  args.block_kv = Divisor(params.block_kv);
  args.shares = workspace.scores;
  return params.problem.dtype == Dtype::kFloat16 ? launch_head_dim<Dtype::kFloat16>(args, key)
                                                 : launch_head_dim<Dtype::kBFloat16>(args, key);
}

}  // namespace sparse_attn::cuda

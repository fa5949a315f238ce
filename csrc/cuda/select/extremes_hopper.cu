// The shares of `minmax` by wgmma. A thread block is four warpgroups, two above 128 columns, and a
// warp that loads for each. The extremes of a tile of key blocks stay in shared memory while the
// rows that see some of them stream past, 64 at a time. Scores are made twice, as storing them
// would move more bytes: one launch writes every row's mass in each tile, the next one joins them,
// the last one sums shares.
#include "../common/launch.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/tensor_map.h"
#include "extremes_consumer.cuh"

namespace sparse_attn::cuda {
namespace extremes {
namespace {

/// A thread that loads, one for each warpgroup; all walk over the thread block's tiles and take
/// them in turn. A head's tiles are shared out evenly among the thread blocks, so that its queries
/// meet all key blocks while L2 holds them, and most thread blocks keep their extremes from head to
/// head.
template <typename C>
struct Loader {
  const Arguments& args;
  Storage<C>& storage;
  const int consumer;
  int turn = 0;                                   // whose the next tile is
  int32_t items = 0;                              // that the warpgroup was given
  uint32_t some = 0, odd = 0;                     // halves of tiles of each warpgroup: a bit
  int32_t fills = 0, key_head = -1, column = -1;  // extremes that are there

  __device__ void give(const Item& item) {
    const int slot = items % kItems;
    ptx::mbarrier_wait(ptx::smem_address(&storage.item_empty[consumer][slot]),
                       items / kItems % 2 ^ 1);
    storage.item[consumer][slot] = item;
    ptx::mbarrier_arrive(ptx::smem_address(&storage.item_full[consumer][slot]));
    ++items;
  }
  /// Waits until a warpgroup has multiplied all halves of tiles that it was given.
  __device__ void wait_read(int of) const {
    if (some >> of & 1) {
      ptx::mbarrier_wait(ptx::smem_address(&storage.query_empty[of]), (odd >> of & 1) ^ 1);
    }
  }
  /// Loads other extremes, once all that was given has been multiplied by those that are there. All
  /// of the threads wait for them, so that none is two fills behind.
  __device__ void fill(int32_t batch, int32_t head, int32_t to_column) {
    const uint32_t wanted = ptx::smem_address(&storage.key_wanted);
    const uint32_t full = ptx::smem_address(&storage.key_full);
    ptx::mbarrier_arrive(wanted);
    if (consumer == 0) {
      ptx::mbarrier_wait(wanted, fills % 2);
      for (int other = 0; other < C::kConsumers; ++other) wait_read(other);
      ptx::mbarrier_arrive_expect(full, C::kKeyBytes);
      for (int slab = 0; slab < C::HEAD_DIM / kKeySlab; ++slab) {
        ptx::tma_load(ptx::smem_address(storage.key) + slab * C::kColumns * kRowBytes, &args.key,
                      {slab * 2 * kKeySlab, to_column * C::kColumns, 0, head, batch}, full,
                      ptx::kEvictLast);
      }
    }
    ptx::mbarrier_wait(full, fills % 2);
    ++fills;
  }
  __device__ void load(Item item, int32_t to_column, int32_t row) {
    const int32_t batch = args.batch(item.head), head = args.head_q(item.head);
    const int32_t group = args.params.problem.group();
    const int32_t of_all = (args.first_head + item.head) / group;
    if (of_all != key_head || to_column != column) {
      key_head = of_all;
      column = to_column;
      fill(batch, head / group, column);
    }
    item.row = row;
    item.column = column;
    item.halves = item.rows - row * kTileRows > kRows ? 2 : 1;
    item.fill = fills;
    const int to = turn;
    turn = to + 1 == C::kConsumers ? 0 : to + 1;
    if (to == consumer) give(item);
    for (int half = 0; half < item.halves; ++half) {
      if (to == consumer) {
        wait_read(to);
        const uint32_t full = ptx::smem_address(&storage.query_full[to]);
        ptx::mbarrier_arrive_expect(full, C::kQueryBytes);
        for (int slab = 0; slab < C::HEAD_DIM / kQuerySlab; ++slab) {
          ptx::tma_load(ptx::smem_address(storage.query[to]) + slab * kRows * kRowBytes,
                        &args.query,
                        {slab * kQuerySlab, row * kTileRows + half * kRows, 0, head, batch}, full,
                        ptx::kEvictLast);
        }
      }
      some |= 1u << to;
      odd ^= 1u << to;
    }
  }
  __device__ void run() {
    const int64_t blocks = gridDim.x;
    for (int32_t head = 0; head < args.heads; ++head) {
      const HeadTiles<C> tiles(args, head);
      const int64_t length = tiles.length();
      // What a division leaves over goes to other thread blocks for each head.
      const int64_t shift = head * blocks / args.heads;
      tiles.for_each((blockIdx.x * length + shift) / blocks,
                     ((blockIdx.x + 1) * length + shift) / blocks,
                     [&](int32_t to_column, int32_t row) { load(tiles.item, to_column, row); });
    }
    give({-1});
  }
};

template <typename C, Pass kPass>
__global__ void __launch_bounds__(C::kThreads, 1)
    multiply_extremes(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char memory[];
  auto& storage = *reinterpret_cast<Storage<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
      for (int i = 0; i < kItems; ++i) {
        ptx::mbarrier_init(ptx::smem_address(&storage.item_full[consumer][i]), 1);
        ptx::mbarrier_init(ptx::smem_address(&storage.item_empty[consumer][i]), kWarps);
      }
      ptx::mbarrier_init(ptx::smem_address(&storage.query_full[consumer]), 1);
      ptx::mbarrier_init(ptx::smem_address(&storage.query_empty[consumer]), kWarps);
    }
    ptx::mbarrier_init(ptx::smem_address(&storage.key_wanted), C::kConsumers);
    ptx::mbarrier_init(ptx::smem_address(&storage.key_full), 1);
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < kWarps) {
    ptx::give_registers_back<C::kLoaderRegisters>();
    if (warp < C::kConsumers && threadIdx.x % 32 == 0) Loader<C>{args, storage, warp}.run();
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    Consumer<C, kPass>{args, storage, warp / kWarps - 1}.run();
  }
}

constexpr int kJoinThreads = 256;

/// Writes what a row's shares are relative to in the place of its first tile's mass.
__global__ void __launch_bounds__(kJoinThreads)
    join_tiles(const __grid_constant__ Arguments args, int32_t columns) {
  const int64_t at = blockIdx.x * int64_t{kJoinThreads} + threadIdx.x;
  if (at >= int64_t{args.heads} * args.params.problem.seq_q) return;
  const int32_t head = static_cast<int32_t>(at / args.params.problem.seq_q);
  const int32_t i = static_cast<int32_t>(at % args.params.problem.seq_q);
  const int32_t batch = args.batch(head);
  Item item = {};
  item.rows = args.params.rows(batch);
  item.keys = args.params.entry_keys(batch);
  item.offset = args.params.offset(batch);
  if (i >= item.rows) return;
  const int32_t tiles = ceil_div(args.seen(item, i), columns);
  float* masses = args.masses_of(head, i);
  float highest = -INFINITY, sum = 0.0f;
  for (int32_t t = 0; t < tiles; ++t) highest = fmaxf(highest, masses[t]);
  if (highest == -INFINITY) highest = 0.0f;
  for (int32_t t = 0; t < tiles; ++t) sum += ptx::exp2_approx(masses[t] - highest);
  if (tiles > 0) masses[0] = highest + __log2f(sum);
}

template <typename C, Pass kPass>
Status launch_pass(const Arguments& args, int32_t multiprocessors) {
  auto* kernel = multiply_extremes<C, kPass>;
  Status status = allow_shared_bytes(kernel, sizeof(Storage<C>));
  if (!status.ok()) return status;
  const int64_t tiles = ceil_div64(args.params.problem.seq_q, kTileRows) *
                        ceil_div64(args.params.num_kv, C::kColumns) * args.heads;
  const auto blocks = static_cast<uint32_t>(tiles < multiprocessors ? tiles : multiprocessors);
  kernel<<<blocks, C::kThreads, sizeof(Storage<C>), to_stream(args.params.stream)>>>(args);
  return launched();
}

template <typename C>
Status launch_passes(const Arguments& args, int32_t multiprocessors) {
  Status status = launch_pass<C, Pass::kTotals>(args, multiprocessors);
  if (!status.ok()) return status;
  const int64_t rows = int64_t{args.heads} * args.params.problem.seq_q;
  join_tiles<<<static_cast<uint32_t>(ceil_div64(rows, kJoinThreads)), kJoinThreads, 0,
               to_stream(args.params.stream)>>>(args, C::kColumns);
  return launch_pass<C, Pass::kShares>(args, multiprocessors);
}

template <typename C>
Status launch(Arguments& args, const TensorView& key, const SelectWorkspace& workspace) {
  const SelectParams& params = args.params;
  const Problem& problem = params.problem;
  Status status =
      encode_tensor_map(problem.dtype, params.query.data,
                        {{problem.head_dim, problem.seq_q, 1, problem.heads_q, problem.batch},
                         {params.query.stride_s, 0, params.query.stride_h, params.query.stride_b},
                         {kQuerySlab, kRows, 1, 1, 1}},
                        &args.query);
  if (!status.ok()) return status;
  status =
      encode_tensor_map(problem.dtype, key.data,
                        {{2 * problem.head_dim, params.num_kv, 1, problem.heads_kv, problem.batch},
                         {key.stride_s, 0, key.stride_h, key.stride_b},
                         {2 * kKeySlab, C::kColumns, 1, 1, 1}},
                        &args.key);
  if (!status.ok()) return status;
  int32_t multiprocessors = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  if (error != cudaSuccess) return to_status(error);
  const int32_t heads = problem.batch * problem.heads_q;
  for (int32_t head = 0; head < heads; head += workspace.mass_heads) {
    args.first_head = head;
    args.heads = imin(workspace.mass_heads, heads - head);
    status = launch_passes<C>(args, multiprocessors);
    if (!status.ok()) return status;
  }
  return {};
}

template <Dtype kDtype>
Status launch_head_dim(Arguments& args, const TensorView& key, const SelectWorkspace& workspace) {
  const int32_t head_dim = args.params.problem.head_dim;
  if (head_dim <= 64) return launch<Config<kDtype, 64>>(args, key, workspace);
  if (head_dim <= 128) return launch<Config<kDtype, 128>>(args, key, workspace);
  return launch<Config<kDtype, 256>>(args, key, workspace);
}

}  // namespace
}  // namespace extremes

using namespace extremes;

bool serves_extremes_hopper(const SelectParams& params) {
  int32_t major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, params.device);
  return major == 9 && params.selector == Selector::kMinMax &&
         params.problem.dtype != Dtype::kFloat32 && params.problem.head_dim <= 256 &&
         params.scores.bounds.data == nullptr && begins_at_16_bytes(params.query, 2) &&
         kTileRows % params.block_q == 0;
}

Status launch_extremes_hopper(const SelectParams& params, const TensorView& key,
                              const SelectWorkspace& workspace) {
  Arguments args = {};
  args.params = params;
  args.block_kv = Divisor(params.block_kv);
  args.pitch = static_cast<int32_t>(extreme_masses(params));
  args.masses = workspace.masses;
  args.shares = workspace.scores;
  return params.problem.dtype == Dtype::kFloat16
             ? launch_head_dim<Dtype::kFloat16>(args, key, workspace)
             : launch_head_dim<Dtype::kBFloat16>(args, key, workspace);
}

}  // namespace sparse_attn::cuda

// Launches the kernel of one configuration.
#pragma once

#include "../common/launch.cuh"
#include "arrange.h"
#include "kernel.cuh"
#include "launch.h"
#include "tensor_maps.h"
#include "tile_order.h"

namespace sparse_attn::cuda::hopper {

/// Whether a call is so short that its start may overlap what is in front of it in the stream. Of
/// longer ones some gained 5 to 7 % and some lost 3 to 7 %.
inline bool is_short(const Arguments& args, KernelTile tile) {
  constexpr int64_t kSteps = 64;  // key tiles of a multiprocessor
  const AttentionParams& params = args.params;
  const int64_t tiles = args.split.all ? args.num_tiles / args.parts() : args.num_tiles;
  return tiles * most_visited(params.pattern, params.problem.seq_kv, tile) <=
         kSteps * args.multiprocessors;
}

/// Launches the kernel on the tiles of `args`, and the merge of their chunks.
template <class C>
Status launch_tiles(const TensorMaps& maps, Arguments args) {
  const AttentionParams& params = args.params;
  const int32_t blocks = imin(args.multiprocessors * C::kBlocksPerSm, args.num_tiles);
  if (blocks == args.num_tiles && params.sequences.same_lengths()) {
    args.counter = args.order = nullptr;  // one each
  }
  cudaStream_t stream = to_stream(params.stream);
  constexpr size_t kSharedBytes = sizeof(SharedStorage<C>);
  Status status;
  if (args.counter != nullptr) status = order_tiles(args, C::kTile, blocks);
  if (!status.ok()) return status;
  if (args.counter != nullptr || is_short(args, C::kTile)) {
    LaunchShape shape = {static_cast<uint32_t>(blocks), C::kThreads, kSharedBytes, stream};
    shape.knows_all = true;
    status = launch_dependent(attention<C>, shape, maps, args);
  } else {
    attention<C><<<blocks, C::kThreads, kSharedBytes, stream>>>(maps, args);
    status = launched();
  }
  if (status.ok() && args.deal.most_merged > 0) {
    return merge_pieces(params, args.partials, args.deal, args.packing, args.multiprocessors);
  }
  const bool merges = args.split.chunks > 0 && args.folds != Fold::kWhole;
  return status.ok() && merges ? merge_chunks(params, args.partials) : status;
}

template <class C>
Status launch(Arguments args) {
  static_assert((sizeof(SharedStorage<C>) + kReservedBytes) * C::kBlocksPerSm <= kSharedBytesOfSm,
                "shared memory of an SM");
  const AttentionParams& params = args.params;
  TensorMaps maps;
  const bool few_leads = C::kNarrows && params.pattern.lead.length <= kNarrowKeys;
  args.lead_rows = few_leads ? kNarrowKeys : C::BLOCK_KV;
  BoxShape box = {C::kSlabColumns, C::kColumns,    imin(args.packing.rows, kConsumerRows),
                  kWarpRows,       args.copy_rows, args.lead_rows,
                  C::BLOCK_KV};
  Status status = make_tensor_maps(params, box, &maps, &args.at);
  if (status.ok() && C::kCopiesMask && args.copies_mask) {
    status = make_mask_map(params, C::BLOCK_Q, &maps.mask);
  }
  if (!status.ok()) return status;
  status = allow_shared_bytes(attention<C>, sizeof(SharedStorage<C>));
  if (!status.ok()) return status;
  do {
    status = launch_tiles<C>(maps, args);
  } while (status.ok() && next_section(&args));
  return status;
}

}  // namespace sparse_attn::cuda::hopper

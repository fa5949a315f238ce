// Defines launch_tiles for both element types of one configuration.
#pragma once

#include "launch.cuh"

namespace sparse_attn::cuda::hopper {

template <Dtype kDtype, int HEAD_DIM, int BLOCK_KV, int kConsumers>
Status launch_tiles(const Arguments& args) {
  constexpr bool kListsAlone = BLOCK_KV == 64 || kConsumers == 1;
  constexpr bool kNoLists = !kListsAlone && (BLOCK_KV < 128 || kConsumers == 3);  // see engine.cu
  if constexpr (!kListsAlone) {
    if (args.plain) {
      return launch<Config<kDtype, HEAD_DIM, BLOCK_KV, kConsumers, KernelKind::kPlain>>(args);
    }
    if (kNoLists || !args.params.pattern.list.present()) {
      return launch<Config<kDtype, HEAD_DIM, BLOCK_KV, kConsumers, KernelKind::kGeneral>>(args);
    }
  }
  if constexpr (!kNoLists) {
    return launch<Config<kDtype, HEAD_DIM, BLOCK_KV, kConsumers, KernelKind::kListed>>(args);
  }
}

#define SPARSE_ATTN_HOPPER_TILES(HEAD_DIM, BLOCK_KV, kConsumers)                                   \
  template Status launch_tiles<Dtype::kFloat16, HEAD_DIM, BLOCK_KV, kConsumers>(const Arguments&); \
  template Status launch_tiles<Dtype::kBFloat16, HEAD_DIM, BLOCK_KV, kConsumers>(const Arguments&)

}  // namespace sparse_attn::cuda::hopper

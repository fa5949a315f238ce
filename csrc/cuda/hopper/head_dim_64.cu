// Kernels for head dim 64.
#include "instantiate.cuh"

namespace sparse_attn::cuda::hopper {

SPARSE_ATTN_HOPPER_TILES(64, 128, 3);
SPARSE_ATTN_HOPPER_TILES(64, 128, 2);
SPARSE_ATTN_HOPPER_TILES(64, 128, 1);

}  // namespace sparse_attn::cuda::hopper

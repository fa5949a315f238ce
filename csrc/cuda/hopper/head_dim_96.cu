// Kernels for head dim 96.
#include "instantiate.cuh"

namespace sparse_attn::cuda::hopper {

SPARSE_ATTN_HOPPER_TILES(96, 96, 3);
SPARSE_ATTN_HOPPER_TILES(96, 128, 2);
SPARSE_ATTN_HOPPER_TILES(96, 128, 1);

}  // namespace sparse_attn::cuda::hopper

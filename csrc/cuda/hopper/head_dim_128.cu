// Kernels for head dim 128.
#include "instantiate.cuh"

namespace sparse_attn::cuda::hopper {

SPARSE_ATTN_HOPPER_TILES(128, 128, 2);
SPARSE_ATTN_HOPPER_TILES(128, 128, 1);

}  // namespace sparse_attn::cuda::hopper

// Kernels for head dim 256.
#include "instantiate.cuh"

namespace sparse_attn::cuda::hopper {

SPARSE_ATTN_HOPPER_TILES(256, 80, 2);
SPARSE_ATTN_HOPPER_TILES(256, 64, 2);

}  // namespace sparse_attn::cuda::hopper

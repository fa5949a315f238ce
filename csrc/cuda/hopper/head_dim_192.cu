// Kernels for head dim 192.
#include "instantiate.cuh"

namespace sparse_attn::cuda::hopper {

SPARSE_ATTN_HOPPER_TILES(192, 112, 2);
SPARSE_ATTN_HOPPER_TILES(192, 64, 2);

}  // namespace sparse_attn::cuda::hopper

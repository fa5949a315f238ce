// Kernels for head dims 192 and 256.
#include "instantiate.cuh"

namespace sparse_attn::cuda::hopper {

SPARSE_ATTN_HOPPER_KERNEL(192, 112, 2, KernelKind::kPlain);
SPARSE_ATTN_HOPPER_KERNEL(192, 112, 2, KernelKind::kGeneral);
SPARSE_ATTN_HOPPER_KERNEL(192, 64, 2, KernelKind::kListed);
SPARSE_ATTN_HOPPER_KERNEL(256, 80, 2, KernelKind::kPlain);
SPARSE_ATTN_HOPPER_KERNEL(256, 80, 2, KernelKind::kGeneral);
SPARSE_ATTN_HOPPER_KERNEL(256, 64, 2, KernelKind::kListed);

}  // namespace sparse_attn::cuda::hopper

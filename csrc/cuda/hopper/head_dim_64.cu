// Kernels for head dim 64.
#include "instantiate.cuh"

namespace sparse_attn::cuda::hopper {

SPARSE_ATTN_HOPPER_KERNEL(64, 128, 3, KernelKind::kPlain);
SPARSE_ATTN_HOPPER_KERNEL(64, 128, 2, KernelKind::kPlain);
SPARSE_ATTN_HOPPER_KERNEL(64, 128, 2, KernelKind::kGeneral);
SPARSE_ATTN_HOPPER_KERNEL(64, 128, 2, KernelKind::kListed);
SPARSE_ATTN_HOPPER_KERNEL(64, 128, 1, KernelKind::kListed);

}  // namespace sparse_attn::cuda::hopper

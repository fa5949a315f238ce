// Token top-k for head dim 64.
#include "topk_launch.cuh"

namespace sparse_attn::cuda::hopper {

template Status launch_topk<Dtype::kFloat16, 64>(const Arguments&, Threshold*);
template Status launch_topk<Dtype::kBFloat16, 64>(const Arguments&, Threshold*);

}  // namespace sparse_attn::cuda::hopper

// The split kernels of head dim 64.
#include "launch.cuh"

namespace sparse_attn::cuda::decode {

bool has_clusters() {
  return knows_clusters(split_kernel<Config<__half, 64, kFragmentRows>, Kind::kPlain>);
}

template Status launch<__half, 64>(const AttentionParams&, const LaunchPlan&);
template Status launch<__nv_bfloat16, 64>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode

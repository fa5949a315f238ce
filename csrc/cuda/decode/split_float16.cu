// The split kernels of float16, by the head dims that are compiled.
#include "launch.cuh"

namespace sparse_attn::cuda::decode {

bool has_clusters() {
  return knows_clusters(split_kernel<Config<__half, 64, kFragmentRows>, Kind::kPlain>);
}

template Status launch<__half, 64>(const AttentionParams&, const LaunchPlan&);
template Status launch<__half, 128>(const AttentionParams&, const LaunchPlan&);
template Status launch<__half, 256>(const AttentionParams&, const LaunchPlan&);

}  // namespace sparse_attn::cuda::decode

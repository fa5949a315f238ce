// Lists of low query blocks at head dims compiled at 64.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch_low<64>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable

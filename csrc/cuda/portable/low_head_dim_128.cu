// Lists of low query blocks at head dims compiled at 128.
#include "launch.cuh"

namespace sparse_attn::cuda::portable {

template Status launch_low<128>(const AttentionParams&, const LaunchChoice&);

}  // namespace sparse_attn::cuda::portable

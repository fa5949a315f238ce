// The kernels of one head dim; included by the files that CMake writes, one for each
// (head_dim.cu.in).
#pragma once

#include "launch.cuh"

namespace sparse_attn::cuda::hopper {

template <Dtype kDtype, int HEAD_DIM, Tiling kTiling>
Status launch_tiling(const Arguments& args) {
  constexpr TilingShape kShape = shape_of(kTiling);
  constexpr int32_t kKeys = kernels_of(HEAD_DIM).keys_of(kTiling);
  if constexpr (kKeys == 0) {
    return {cudaErrorNotSupported, "the hopper engine has no such kernel for this head dim"};
  } else if constexpr (kTiling == Tiling::kTop) {
    return launch_topk<kDtype, HEAD_DIM>(args);
  } else {
    return launch<Config<kDtype, HEAD_DIM, kKeys, kShape.consumers, kShape.kind>>(args);
  }
}

template <Dtype kDtype, int HEAD_DIM>
Status launch_head_dim(Tiling tiling, const Arguments& args) {
  switch (tiling) {
    case Tiling::kWidePlain:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kWidePlain>(args);
    case Tiling::kPlain:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kPlain>(args);
    case Tiling::kGeneral:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kGeneral>(args);
    case Tiling::kListed:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kListed>(args);
    case Tiling::kHalfListed:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kHalfListed>(args);
    case Tiling::kTop:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kTop>(args);
    case Tiling::kBiased:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kBiased>(args);
    case Tiling::kRagged:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kRagged>(args);
    case Tiling::kRaggedListed:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kRaggedListed>(args);
    case Tiling::kFew:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kFew>(args);
    case Tiling::kRange:
      return launch_tiling<kDtype, HEAD_DIM, Tiling::kRange>(args);
  }
  return {};
}

}  // namespace sparse_attn::cuda::hopper

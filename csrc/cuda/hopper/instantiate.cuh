// Instantiates kernels of one configuration for both element types.
#pragma once

#include "launch.cuh"

#define SPARSE_ATTN_HOPPER_KERNEL(HEAD_DIM, BLOCK_KV, kConsumers, kKind)                  \
  template Status launch<Config<Dtype::kFloat16, HEAD_DIM, BLOCK_KV, kConsumers, kKind>>( \
      Arguments);                                                                         \
  template Status launch<Config<Dtype::kBFloat16, HEAD_DIM, BLOCK_KV, kConsumers, kKind>>(Arguments)

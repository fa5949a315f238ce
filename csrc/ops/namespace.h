// Where the ops are registered: torch.ops.<SPARSE_ATTN_NAMESPACE>. Builds that share a process have
// a name each; sparse_attn/_ops.py says it to Python.
#pragma once

#include <torch/csrc/stable/library.h>

#ifndef SPARSE_ATTN_NAMESPACE
#define SPARSE_ATTN_NAMESPACE sparse_attn
#endif

// Torch's macros paste the name as it stands; one call between them and us expands it.
#define SPARSE_ATTN_EXPANDED(name, library) STABLE_TORCH_LIBRARY(name, library)

/// Defines the schemas of the ops.
#define SPARSE_ATTN_OPS(library) SPARSE_ATTN_EXPANDED(SPARSE_ATTN_NAMESPACE, library)

/// Registers the kernels of a device.
#define SPARSE_ATTN_KERNELS(device, library) \
  STABLE_TORCH_LIBRARY_IMPL(SPARSE_ATTN_NAMESPACE, device, library)

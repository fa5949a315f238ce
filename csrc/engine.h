// What an engine is to ops/: a name and two functions that know no framework. ops/ picks one with
// choice.h, allocates workspace_bytes, and calls run.
#pragma once

#include <cstdint>

#include "cache_params.h"
#include "select_params.h"

namespace sparse_attn {

/// An attention engine: pure functions of the parameters.
struct Engine {
  const char* name;
  int64_t (*workspace_bytes)(const AttentionParams&);
  Status (*run)(const AttentionParams&);
};

/// The non-attention kernels of a device: block selection, list building, merging, cache
/// writes.
struct Tools {
  int64_t (*select_workspace_bytes)(const SelectParams&);
  Status (*select_blocks)(const SelectParams&);
  Status (*list_from_mask)(const ListParams&);
  Status (*merge_states)(const MergeParams&);
  Status (*append_to_cache)(const AppendParams&);
  Status (*append_to_sketch)(const SketchAppendParams&);
  Status (*sketch_pages)(const SketchPagesParams&);
};

}  // namespace sparse_attn

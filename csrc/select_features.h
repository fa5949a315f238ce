// What a selection asks for, as a set, and what is served of it.
#pragma once

#include "call_features.h"
#include "select_params.h"

namespace sparse_attn {

/// Where keys that are not read lie does not count.
inline Features features_of(const SelectParams& params) {
  const KeySource keys = params.reads_keys() ? params.keys : KeySource();
  Features features = features_of(params.problem, params.sequences, keys, params.scores);
  features.add(Feature::kKeyOrigins, params.sequences.key_origins != nullptr);
  return features;
}

/// What selections serve, on both devices. Each walk of a device lists what it takes of these.
constexpr Features kSelections =
    Features::of(Feature::kFloat32, Feature::kKeyBounds, Feature::kQueryOffsets,
                 Feature::kKeyOrigins, Feature::kSoftcap, Feature::kOddScale, Feature::kPacked,
                 Feature::kUsedKeys, Feature::kPaged, Feature::kFloat8Keys);

}  // namespace sparse_attn

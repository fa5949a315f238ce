// Calls whose sequences differ in length, lie packed or in pages, or have keys of 8 bits: on the
// CPU each becomes a plain call of its own, so that its bits are those of that call.
#pragma once

#include "engine.h"

namespace sparse_attn::cpu {

/// What an engine does with calls of plain tensors of query's dtype.
struct PlainEngine {
  int64_t (*workspace_bytes)(const AttentionParams&);
  Status (*run)(const AttentionParams&);
};

/// Whether each batch entry has the lengths of the call, and its keys lie there in query's dtype.
bool is_plain(const AttentionParams& params);
/// Whether keys and values have to be copied, from pages or from 8 bits.
bool is_gathered(const AttentionParams& params);
/// Sequence b as a call of its own, without gathered keys.
AttentionParams alone(const AttentionParams& params, const Sequence& sequence, int64_t b);
/// Makes room for the gathered keys of a sequence as [Hkv, keys, head_dim] of query's dtype, and
/// its values; returns the bytes that they take.
int64_t place_keys(void* workspace, AttentionParams* one);
/// Copies them to the room that `one` has for them: numbers of 8 bits exactly, without their
/// scales, or the keys `scaled` and rounded.
Status gather(const AttentionParams& params, const Sequence& sequence, int64_t b,
              const AttentionParams& one, bool scaled = false);

int64_t sequences_workspace_bytes(const PlainEngine& engine, const AttentionParams& params);
Status run_sequences(const PlainEngine& engine, const AttentionParams& params);

/// The engine that gives each sequence of a call to `kPlain`.
template <const PlainEngine& kPlain>
constexpr Engine engine_of_sequences(const char* name) {
  return {name,
          [](const AttentionParams& params) { return sequences_workspace_bytes(kPlain, params); },
          [](const AttentionParams& params) { return run_sequences(kPlain, params); }};
}

}  // namespace sparse_attn::cpu

// What a kernel of scores is compiled for, and how it reads codes.
#pragma once

#include "../common/types.cuh"
#include "sketch.h"

namespace sparse_attn::cuda {

constexpr int kColumns = 8;                         // of mma
constexpr int kTiles = kSketchGroup / kSketchTile;  // of a group
constexpr int kLift = 4;       // the scaled queries' exponent, between the smallest and largest
constexpr int kCodeUnit = 24;  // a code at bit 0 is a multiple of 2^-24

/// One kernel's sizes: CHUNKS x 64 channels, codes of BITS, GROUPS of them at a time.
template <typename T_, int CHUNKS, int BITS, int GROUPS>
struct SketchConfig {
  using T = T_;
  static constexpr int kGroups = GROUPS;
  static constexpr int kRows = kColumns / GROUPS;  // queries of a tile
  static constexpr int kBits = BITS;
  static constexpr int kChannels = 16 * CHUNKS;  // of a lane
  static constexpr int kPairs = kChannels / 2;
  // Queries of 16 bits meet the least elements on tensor cores.
  static constexpr bool kPlainPairs = sizeof(T) == 2;
  static constexpr int kPlainWords = kPlainPairs ? kPairs : kChannels;
  static constexpr int kWords = kChannels * BITS / 32;  // of a lane and key
  static constexpr int kPairsOfWord = 16 / BITS;
  // As registers allow.
  static constexpr int kBlocksPerSm = CHUNKS == 1 ? 4 : CHUNKS == 2 && BITS == 2 ? 3 : 2;
  // A slot of a warp's ring: codes of all its groups, then their ranges.
  static constexpr int kRowBytes = 16 * kWords;
  static constexpr int kCodeBytes = kSketchGroup * kRowBytes;
  static constexpr int kRangeBytes = 2 * 64 * CHUNKS * static_cast<int>(sizeof(T));
  static constexpr int kSlotBytes = GROUPS * (kCodeBytes + kRangeBytes);
  static constexpr int kSmemLimit = 64 << 10;  // that every device has
  static constexpr int kWarps = kSlotBytes <= 8 << 10 ? 4 : 2;
  static constexpr int kSmemOfSm = 192 << 10;  // as far as rings take it
  static constexpr int kSlots =
      3 * kWarps * kSlotBytes <= kSmemLimit && 3 * kWarps * kSlotBytes * kBlocksPerSm <= kSmemOfSm
          ? 3
          : 2;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSmemBytes = kWarps * kSlots * kSlotBytes;
  static_assert(kSmemBytes <= kSmemLimit, "fits every device");
  static constexpr uint32_t kLevels = (1u << BITS) - 1;
  /// The bit of its half at which pair e of a word lies once it is in the low byte.
  SPARSE_ATTN_HD static constexpr int shift(int e) { return e * BITS % 8; }
};

/// The pair e of a word as two 16-bit floats, c 2^shift 2^-24 each.
template <typename Config>
__device__ __forceinline__ uint32_t codes_of(uint32_t word, int e) {
  const uint32_t mask = (Config::kLevels << Config::shift(e)) * 0x00010001u;
  return (e * Config::kBits < 8 ? word : word >> 8) & mask;
}

template <int N>
__device__ __forceinline__ void load_words(const char* from, uint32_t (&to)[N]) {
  constexpr int kVector = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
  struct alignas(kVector * 4) Words {
    uint32_t word[kVector];
  };
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i % kVector > 0) continue;
    const Words words = reinterpret_cast<const Words*>(from)[i / kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) to[i + k] = words.word[k];
  }
}

}  // namespace sparse_attn::cuda

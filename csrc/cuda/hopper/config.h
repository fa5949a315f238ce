// One kernel's tile shape and schedule, and its plan of shared memory. A block is one warpgroup of
// producers, of which one warp plans, two load and one may write masks or load Q, and kConsumers
// warpgroups of 64 query rows each. Which configurations exist, and which calls each serves, stands
// in table.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../params.h"
#include "../../visited_tiles.h"
#include "../common/slab.h"
#include "key_split.h"

namespace sparse_attn::cuda::hopper {

constexpr int kWarp = 32;
constexpr int kWarpRows = 16;             // of a consumer's, that one of its warps holds
constexpr int kSharedBytesOfSm = 233472;  // of sm_90, of which the system takes ...
constexpr int kReservedBytes = 1024;      // ... from each block
constexpr int kOtherBytes = 4096;         // of a half block: barriers, steps, the system's
constexpr int kMinBoxRows = 16;           // least keys that one copy of a list tile brings
constexpr int kNarrowKeys = 16;           // of a step of few leading keys
constexpr int kMaskColumns = 32;          // of a slab of attn_mask, in swizzled rows of 64 bytes

template <Dtype kDtype_, int HEAD_DIM_, int kKernel>
struct Config {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int HEAD_DIM = HEAD_DIM_;

  // What table.h says of the kernel.
  static constexpr Kernel kOwn = kKernels[kKernel];
  static constexpr KernelTile kTile = tile_of({kKernel, HEAD_DIM});
  static constexpr int BLOCK_KV = kTile.block_kv;
  static constexpr int kConsumers = kOwn.consumers;
  static constexpr bool kTop = kOwn.is_top();
  static constexpr bool kPlain = kOwn.is_plain();
  static constexpr bool kRagged = kOwn.is_ragged();  // sequences of any length, keys in pages
  static constexpr bool kListed = kOwn.is_listed();
  static constexpr bool kPartial = kOwn.accepts.has(Feature::kPartialBlocks);
  static constexpr bool kHalf = kConsumers == 1;  // half tiles, for lists of low query blocks
  static constexpr bool kPacks = kTile.packs;     // several heads a tile
  static constexpr bool kSplits = kTile.splits;   // takes chunks of keys
  static constexpr bool kDeals = kOwn.deals();    // that are dealt on the device
  // The kernel of few queries: its start is much of its time, so Q has a loader of its own.
  static constexpr bool kFewQueries = kPacks && kPlain;
  static constexpr bool kFolds = kTile.folds;                  // sums the chunks of a tile itself
  static constexpr bool kRawValues = kOwn.takes_raw_values();  // V has rows past the keys
  static constexpr bool kBiased = kOwn.is_biased();
  static constexpr bool kBounds = kOwn.accepts.has(Feature::kKeyBounds);
  static constexpr bool kCaps = kOwn.accepts.has(Feature::kSoftcap);
  static constexpr bool kTransforms = kOwn.accepts.has(Feature::kOddScale);  // or caps, or biases
  static constexpr bool kScaled = kOwn.accepts.has(Feature::kFloat8Keys);    // keys, by head
  // Small scores under softcap have a way of their own, where there are registers for it.
  static constexpr bool kSmallCaps = kCaps && !kBiased && !kListed && HEAD_DIM <= 128;
  static constexpr bool kLeads = kOwn.accepts.has(Feature::kLead);            // lead views,
  static constexpr bool kStridedLeads = kOwn.accepts.has(Feature::kColumns);  // strided ones,
  static constexpr bool kGlobalRows = kOwn.accepts.has(Feature::kGlobalRows);
  static constexpr bool kLeadKeys =
      kOwn.accepts.has(Feature::kGlobalIndices);  // and ones of listed keys
  // Takes few leading keys in a step of their own; strided columns are many.
  static constexpr bool kNarrows = kLeads && !kTransforms && !kStridedLeads;
  // The kernels of ranges that are not plain, of scores that are only scaled.
  static constexpr bool kRanges = kBounds && !kTransforms && !kListed && !kPacks;
  static constexpr int BLOCK_Q = kConsumers * kConsumerRows;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kBlocksPerSm = kHalf ? 2 : 1;

  // A tile in shared memory is a row of slabs, each as wide as a swizzled row of the copy engine.
  static constexpr int kColumns = columns_of(HEAD_DIM);
  static constexpr int kSlabColumns = slab_of(kColumns);
  static constexpr int kRowBytes = kSlabColumns * 2;
  static constexpr int kQueryBytes = kConsumerRows * kColumns * 2;  // of one consumer
  static constexpr int kKeyBytes = BLOCK_KV * kColumns * 2;

  // Schedule; figures in docs/kernels/hopper.md.
  static constexpr bool kWide = is_wide(HEAD_DIM);
  // The first QK of the next tile runs with the last PV of this one: Q twice, O in its own memory,
  // for which half tiles have no room but at head dim 64.
  static constexpr bool kCrossTile = !kWide && !kBiased && (!kHalf || HEAD_DIM == 64);
  // O is rescaled while QK runs instead of after PV.
  static constexpr bool kEarlyRescale = HEAD_DIM > 192;
  // Consumers issue their products in turn, so that one's softmax runs under the other's products;
  // of long products that comes by itself. Ragged kernels of more than plain calls lose 1 to 5 %
  // without turns, strided columns 6 %, softcap up to 7 %.
  static constexpr bool kPingPong =
      kConsumers > 1 && !kWide &&
      (HEAD_DIM < 128 || (kRagged ? !kPlain : kFewQueries || kRanges || kSmallCaps));
  // The next query tile is claimed when one is almost loaded, not when it begins: faster where
  // tiles differ in length; and else a long piece of a deal would claim another as it begins.
  // Half tiles have no room for the barrier; sequences whose consumers take turns gain nothing, and
  // strided columns, whose tiles are short and take long to plan, lose 2 to 6 %.
  static constexpr bool kClaimsLate =
      !kHalf && !(kRanges && kStridedLeads) && (!kRagged || kDeals || (kPlain && !kPingPong));
  // A list's tile is written while QK of the next one's second step runs; in a turn it would hold
  // up the other consumer, and other tiles lose 1 to 5 % by it.
  static constexpr bool kWritesInStep = kListed && kCrossTile && !kPingPong;
  // Where three consumers take turns one finishes its rows past its turn; elsewhere that is done
  // under QK, where it takes no time.
  static constexpr bool kFinishesLate = kConsumers == 3 && HEAD_DIM <= 64;
  static_assert(!kFinishesLate || !kScaled, "the scale of keys would be the next tile's");
  // Rows' maxima are followed lazily (softmax.cuh), but in kernels that add biases, which have no
  // registers for it. Ragged kernels of 128 also serve head dims 65 to 96, whose own kernels are
  // not lazy.
  static constexpr bool kLazy = is_lazy(HEAD_DIM) && !kBiased;
  static constexpr bool kLazyByCall =
      kRagged && find_kernel(kMostEager, {kOwn.accepts, kOwn.splits}).head_dim == HEAD_DIM;
  static_assert(!kLazy || !kEarlyRescale, "O is rescaled between steps, where a maximum moved");
  // Others find maxima by the bits of scores, in so many chains, where that is faster.
  static constexpr int kBitChains =
      HEAD_DIM == 64 && (!kListed || kHalf) && (!kLeads || kTransforms) && !kRanges ? 2 : 0;
  static constexpr int kValueStages = 2;
  // Half tiles have half the room, and V is held longer.
  static constexpr int kHalfBytes = kQueryBytes + (2 + kValueStages) * kKeyBytes;
  static constexpr int kKeyStages =
      kHalf && kHalfBytes > kSharedBytesOfSm / 2 - kOtherBytes ? 1 : 2;
  // All masks of plain kernels slide, and consumers of half tiles find theirs alone.
  static constexpr bool kMaskWriter = !kPlain && !kHalf;
  static constexpr int kMasks = HEAD_DIM <= 96 ? 2 : 1;  // written ahead, where there is room
  static constexpr int kMostBoxes = kHalf ? BLOCK_KV / kMinBoxRows : 1;  // that consumers know of
  static constexpr bool kCopiesMask = kBiased && kMaskWriter;
  static constexpr int kMaskStages = kWide ? 1 : 2;  // of tiles of attn_mask that are copied
  static constexpr int kMaskSlabBytes = BLOCK_Q * kMaskColumns * 2;
  static constexpr int kMaskTileBytes = BLOCK_KV / kMaskColumns * kMaskSlabBytes;
  static constexpr int kQueryBuffers = kCrossTile ? 2 : 1;
  static constexpr int kOutBuffer = kCrossTile ? kQueryBuffers : 0;  // where O is staged
  // Loaders of pages have no room in few registers.
  static constexpr bool kFewOfProducers = (kWide || kFewQueries) && kPlain && !kRagged;
  static constexpr int kProducerRegisters = kConsumers == 3   ? 32
                                            : kHalf           ? 48
                                            : kFewOfProducers ? 40
                                                              : 56;
  static constexpr int kConsumerRegisters = kConsumers == 3   ? 160
                                            : kConsumers == 1 ? 208
                                            : kFewOfProducers ? 232
                                                              : 224;
  // What every thread has at launch, of which the roles are given theirs.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kBlocksPerSm) / 8 * 8;

  static_assert(HEAD_DIM % 16 == 0, "a wgmma sums 16 columns");
  static_assert(!kFolds || kWide || kCrossTile, "a sum lies where else the second Q and O do");
  static_assert(BLOCK_KV % 16 == 0 && BLOCK_KV <= 128,
                "a wgmma sums 16 keys, and a mask word holds 32 of a thread's columns");
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    (kConsumers + 1) * kLaunchRegisters,
                "else a role waits for registers for ever");
};

/// Named barriers; 0 is __syncthreads. Each kind has one for each consumer.
enum NamedBarrier : int { kBarrierTurn = 1, kBarrierOut = 4 };
/// Threads that meet at a consumer's barrier: it and its predecessor, or it alone.
enum NamedBarrierThreads : int { kTurnThreads = 2 * kWarpgroup, kOutThreads = kWarpgroup };

/// Rows of a view, with a tensor map each: a residue class, one with one row more; the lead view,
/// and where that is strided, so that it has classes too, one with one row more.
enum RowsOf : int8_t { kShortClass, kLongClass, kLeadView, kLongLead };

/// Element 0 of a slice's rows or keys in the tensor maps: a row of a residue class.
struct ViewPlace {
  int32_t row, class_idx;
};

/// That of a view of a sequence whose first row is `first` of the tensor's.
__device__ __forceinline__ ViewPlace view_place(const View& view, int32_t dilation, int32_t first) {
  if (dilation == 1 || first == 0) return {first, view.offset};
  const int32_t at = first + view.offset, row = at / dilation;
  return {row, at - row * dilation};
}

/// A query tile, rows first_row, first_row + 1, ... of a slice of a (batch, head), and what it
/// visits.
struct Work {
  int32_t batch = -1;  // -1: there is no more
  int32_t head = 0, head_kv = 0;
  int32_t first_row = 0;
  int16_t chunk = -1;   // of the keys, whose partial results are written; -1: it visits them all
  uint16_t chunks = 0;  // or groups of chunks, of the query tile: Partials::StoredChunks
  uint16_t chunk_tiles = 0;  // key tiles of each chunk, of those that the thread block folds; 0: it
                             // folds none, or one of more than fit here
  RowsOf query_rows = kShortClass, key_rows = kShortClass;
  bool written = false;    // some of its key tiles may need a mask that is written
  int8_t heads = 1;        // that share the tile, from `head` on
  int8_t first_group = 0;  // chunks of the group with which a fold begins
  int8_t group = 0;        // ... and of those after it
  Slice slice;
  Tiles tiles;
  ListedRuns runs;  // of a list

  static constexpr int32_t sequence_row = 0, sequence_key = 0;  // of (B, H, S, D) tensors
};

/// The same of a sequence that begins anywhere in packed tensors.
struct RaggedWork : Work {
  int32_t sequence_row = 0, sequence_key = 0;  // its first ones
};

/// The same of a piece of a deal.
struct DealtWork : RaggedWork {
  int32_t slot = -1;  // of its partial results; -1: it is a whole tile
};

/// The factor of a query tile's keys or values; 1 where there are no scales.
__device__ __forceinline__ float scale_of(const ScaleView& scales, const Work& work) {
  return scales.at(work.batch, work.head_kv);
}

/// Elements of the views whose keys exist for some row of a query tile.
struct ExistingKeys {
  Interval main, lead;
};

/// The mask that a key tile needs: none, one that slides by a column a row, or one of words that
/// the mask writer writes, and in half tiles the consumers; of a list's tile with partial blocks
/// the words have their bits too. Where the bits are all of the mask consumers read them as they
/// are.
enum class TileMask : int32_t { kNone, kSliding, kBits, kWritten, kPartial };
/// Whether words of the mask have the bits of partial blocks.
template <class C>
__device__ __forceinline__ bool has_bits_in_words(TileMask mask) {
  return C::kPartial && mask == TileMask::kPartial;
}

/// What follows a key tile in its query tile: the first one of the next chunk, of those that a
/// thread block takes in turn, or one of the same chunk; a narrow one, of few leading keys, is the
/// last. One of bits is masked by those alone.
enum class Follows : int32_t { kNothing, kChunk, kNarrow, kWhole, kBits, kMasked };

/// What consumers must know of a key tile; goes with the K of its step.
struct alignas(16) StepInfo {
  union {
    Sliding columns = {};  // of the tile, that its rows see; where the mask slides
    int32_t bits[4];       // of each box, in rows of its bits: the tile's first; where bits mask
  };
  TileMask mask;
  Follows follows;
  int32_t key;       // position of the tile's first column; for kTop and kBiased, not of lists
  int32_t key_step;  // from a column to the next; for kBiased
};

/// What StepInfo says of boxes that have no bits.
enum BoxBits : int32_t { kSeenWhole = -1, kNotSeen = -2 };

/// Which keys of a tile a row sees: a word for each of the four threads that hold it.
struct alignas(16) RowMask {
  static constexpr int kWords = 4;
  uint32_t word[kWords];
};

/// Copied tiles of attn_mask, for kernels with a warp that asks for them.
template <class C, bool = C::kCopiesMask>
struct MaskTiles {};
template <class C>
struct MaskTiles<C, true> {
  alignas(1024) uint8_t mask_tile[C::kMaskStages][C::kMaskTileBytes];
  uint64_t mask_tile_full[C::kMaskStages], mask_tile_empty[C::kMaskStages];
};

constexpr int kInfoSlots = 4;  // of StepInfo, written two stages ahead of the last reader

/// The first key of each box of a list's tile, beside its StepInfo, for the kernels that add
/// biases.
template <class C, bool = C::kBiased && C::kListed>
struct BoxKeys {};
template <class C>
struct BoxKeys<C, true> {
  int32_t box_keys[kInfoSlots][C::kMostBoxes];
};

/// What one thread of a block signals: the first Q and K have come; a tile of V has come that holds
/// rows past the valid keys; a query tile of a kernel that claims late is almost loaded.
enum BlockEvent : int { kFirstKey, kRawValue, kAlmostLoaded };

/// Offsets in shared memory are those of this struct.
template <class C>
struct SharedStorage : MaskTiles<C>, BoxKeys<C> {
  static constexpr int kWorkSlots = 3;
  static_assert(kInfoSlots >= C::kKeyStages + 2 && (kInfoSlots & (kInfoSlots - 1)) == 0,
                "a step's info outlives the step's stage of K");

  alignas(1024) uint8_t query[C::kOutBuffer + 1][C::kConsumers][C::kQueryBytes];
  uint8_t key[C::kKeyStages][C::kKeyBytes];
  uint8_t value[C::kValueStages][C::kKeyBytes];
  union {
    RowMask mask[C::kMasks][C::kConsumers][C::kMaskWriter ? kConsumerRows : 1];  // the next ones
    int32_t boxes[kInfoSlots][C::kMostBoxes];  // of a tile whose mask consumers find: keys or runs
  };
  using Work = std::conditional_t<C::kDeals, DealtWork,
                                  std::conditional_t<C::kRagged, RaggedWork, hopper::Work>>;
  Work work[kWorkSlots];
  Interval there[kWorkSlots][C::kLeads ? 2 : 1];  // those of ExistingKeys that views have
  StepInfo info[kInfoSlots];

  uint64_t query_full[C::kQueryBuffers][C::kConsumers],
      query_empty[C::kQueryBuffers][C::kConsumers];
  uint64_t key_full[C::kKeyStages], key_empty[C::kKeyStages];
  uint64_t value_full[C::kValueStages], value_empty[C::kValueStages];
  uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
  uint64_t mask_full[C::kMasks][C::kConsumers], mask_empty[C::kMasks][C::kConsumers];
  static constexpr int kEvents = C::kClaimsLate ? kAlmostLoaded + 1 : kAlmostLoaded;
  uint64_t event[kEvents];
};

/// Position in a ring of `kSlots` slots and the parity of the phase to wait for there.
template <int kSlots>
struct Ring {
  int32_t index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kSlots) {
      index = 0;
      parity ^= 1;
    }
  }
};

/// That of a ring of one slot, whose position is known.
template <>
struct Ring<1> {
  static constexpr int32_t index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() { parity ^= 1; }
};

}  // namespace sparse_attn::cuda::hopper

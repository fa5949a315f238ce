// The loaders: warps that keep the rings of Q, K and V filled by TMA. Those of K and V walk the key
// tiles on their own, so that neither ring waits for the other; what a loader does between the
// release of a stage and the copy into it is on the consumers' critical path. Rows of V past the
// valid keys become zeros: a probability of 0 must never meet a NaN.
#pragma once

#include "../common/ptx/grid.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/ptx/tma.cuh"
#include "chunks.cuh"
#include "tile_source.cuh"
#include "work_ring.cuh"

namespace sparse_attn::cuda::hopper {

/// What a loader brings.
enum class Loads { kQuery, kKey, kQueryAndKey, kValue };

template <class C, Loads kLoads>
class Loader {
  using Work = typename SharedStorage<C>::Work;
  static constexpr bool kKeys = kLoads == Loads::kKey || kLoads == Loads::kQueryAndKey;
  static constexpr bool kBoth = kLoads == Loads::kQueryAndKey;
  // With two buffers the next Q has long been free to load; else it waits for O, and K need not.
  static constexpr bool kQueryFirst = C::kQueryBuffers > 1;
  static constexpr bool kClears = kLoads == Loads::kValue && C::kRawValues;

 public:
  __device__ __forceinline__ Loader(const Arguments& args, const TensorMaps& maps,
                                    SharedStorage<C>& smem)
      : args_(args),
        maps_(maps),
        smem_(smem),
        lane_(threadIdx.x % kWarp),
        box_bytes_(args.copy_rows * C::kRowBytes),
        box_of_copy_(C::kListed ? lane_ / (args.box_rows / args.copy_rows) : 0),
        row_of_copy_(C::kListed ? lane_ % (args.box_rows / args.copy_rows) * args.copy_rows
                                : lane_ * args.copy_rows) {
    query_.parity = ring_.parity = 1;  // the first pass over a ring finds every stage empty
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      const Work& work = wait_work<C>(smem_, work_);
      if (work.batch < 0) break;
      if constexpr (kLoads == Loads::kValue) wait_first_key();
      if constexpr (kLoads == Loads::kQuery) {
        load_query(work);
      } else {
        load_tile(work);
      }
      release_work<C>(smem_, work_, lane_);
      if constexpr (kLoads == Loads::kQuery) wait_first_key();
    }
  }

 private:
  /// Where the keys of a view lie in the tensor maps.
  struct MappedView {
    const CUtensorMap* map;
    int32_t class_at, head, batch;
    int32_t first;  // row of the view's element 0
  };

  /// What the copies of a query tile's keys ask for at each step. Taken once, since a wait makes
  /// the compiler read memory again.
  struct Keys {
    const int32_t* pages;  // the sequence's row of the table
    int32_t number;        // of the sequence
    ExistingKeys there;
  };

  /// A batch entry of a map, or a page, and a row there.
  struct MapRow {
    int32_t batch, row;
  };

  /// Whether keys lie in pages: the map's rows are then those of a page, the lead's the main
  /// view's.
  __device__ __forceinline__ bool paged() const { return args_.params.keys.paged(); }

  /// Batch entry of the keys in the maps.
  __device__ __forceinline__ int32_t key_batch(const Work& work) const {
    return args_.params.sequences.first_keys == nullptr ? work.batch : 0;
  }

  __device__ __forceinline__ Keys keys_of(const Work& work) const {
    Keys keys = {nullptr, work.slice.num_keys, {}};
    const KeySource& source = args_.params.keys;
    if (paged()) keys.pages = source.table + work.batch * source.table_stride;
    if constexpr (kClears) {
      keys.there.main = smem_.there[work_.index][0];
      if constexpr (C::kLeads) keys.there.lead = smem_.there[work_.index][C::kLeads];
    }
    return keys;
  }

  __device__ __forceinline__ int32_t class_step() const {
    return kKeys ? args_.at.key_step : args_.at.value_step;
  }

  /// The map of consecutive leading keys begins with key 0; columns are a class of the keys.
  __device__ __forceinline__ MappedView mapped_lead(const CUtensorMap* maps,
                                                    const Work& work) const {
    const View& lead = work.slice.lead.view;
    const int32_t step = args_.params.pattern.lead.step;
    if (step == 1) {
      return {&maps[kLeadView], 0, work.head_kv, key_batch(work), work.sequence_key + lead.offset};
    }
    const ViewPlace at = view_place(lead, step, work.sequence_key);
    return {&maps[at.class_idx < args_.long_leads ? kLongLead : kLeadView],
            at.class_idx * class_step(), work.head_kv, key_batch(work), at.row};
  }

  __device__ __forceinline__ void load_tile(const Work& work) {
    const CUtensorMap* maps = kKeys ? maps_.key : maps_.value;
    const ViewPlace at =
        view_place(work.slice.keys, args_.params.pattern.dilation, work.sequence_key);
    // Where many lanes copy, each moves its operands to registers of the warp; these lie there.
    constexpr bool kManyCopy = C::kListed || C::kRagged;
    auto uniform = [](int32_t x) { return kManyCopy ? __reduce_max_sync(~0u, x) : x; };
    const MappedView main = {&maps[uniform(work.key_rows)], at.class_idx * class_step(),
                             uniform(work.head_kv), uniform(key_batch(work)), at.row};
    const Keys keys = keys_of(work);
    const bool folding = folds<C>(args_, work);
    const bool query_first = kQueryFirst && !folding;
    if (kBoth && query_first) load_query(work);
    TileSource<C, kKeys> source(args_, work);
    Step step = source.first();
    bool masked = kKeys && source.needs_mask(step);
    bool first = true;
    int32_t chunk_left = 0;  // key tiles of this chunk; 0: there are no chunks
    if (kKeys && folding && work.chunk_tiles > 0) {
      chunk_left = (work.tiles.count() - 1) % work.chunk_tiles + 1;
    }
    int32_t until_almost = kKeys ? loads_before_claim<C>(args_, work) : 0;  // key tiles
    int32_t entry = table_entry(keys, step);
    while (step.valid) {
      Step ahead = source.next();
      const int32_t entry_ahead = table_entry(keys, ahead);
      const bool masked_ahead = kKeys && ahead.valid && source.needs_mask(ahead);
      if constexpr (kKeys) {
        Follows next = what_follows(ahead, masked_ahead);
        if (C::kFolds && --chunk_left == 0) {
          if (ahead.valid) next = Follows::kChunk;
          chunk_left = work.chunk_tiles;
        }
        describe(work, step, masked ? source.mask(step) : StepMask{}, next);
      }
      const MappedView mapped = step.lead && !paged() ? mapped_lead(maps, work) : main;
      const Interval there = C::kLeads && step.lead ? keys.there.lead : keys.there.main;
      if (kKeys && first) wait_for_inputs();
      // The keys of plain calls end in the tile that is visited first.
      if (kClears && args_.raw && (first || !C::kPlain) && holds_no_keys(step, there)) {
        load_cleared(keys, mapped, step, entry, there);
      } else {
        load_stage(keys, mapped, step, entry);
      }
      if (kBoth && first && !query_first) load_query(work);
      if (kKeys && first) wait_first_key();
      if (kKeys && --until_almost == 0) tell_almost_loaded();
      first = false;
      step = ahead;
      entry = entry_ahead;
      masked = masked_ahead;
    }
    if (kKeys && until_almost > 0) tell_almost_loaded();
  }

  /// Lets the planner claim the next query tile.
  __device__ __forceinline__ void tell_almost_loaded() const {
    if (C::kClaimsLate && lane_ == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&smem_.event[kAlmostLoaded]));
    }
  }

  /// Tells the consumers what to know of the tile, and half tiles the boxes of a mask that does not
  /// slide and where a bias joins them. The slot is free: its last reader has since released a
  /// younger stage.
  __device__ __forceinline__ void describe(const Work& work, const Step& step, const StepMask& mask,
                                           Follows follows) {
    const uint32_t slot = steps_++ % kInfoSlots;
    if (C::kHalf && mask.kind >= TileMask::kWritten) {
      for (int32_t box = 0; box < args_.boxes; ++box) {
        const bool by_run = has_bits_in_words<C>(mask.kind);
        const int32_t of_box = __shfl_sync(~0u, by_run ? step.run : step.key, box);
        if (lane_ == 0) smem_.boxes[slot][box] = of_box;
      }
    }
    if constexpr (C::kBiased && C::kListed) {
      if (lane_ < args_.boxes) smem_.box_keys[slot][lane_] = step.key;
      __syncwarp();
    }
    StepInfo& info = smem_.info[slot];
    if (C::kPartial && mask.kind == TileMask::kBits) {
      if (lane_ < args_.boxes) info.bits[lane_] = rows_of_bits(work, step);
      __syncwarp();
    }
    if (lane_ != 0) return;
    info.mask = mask.kind;
    info.follows = follows;
    if (mask.kind == TileMask::kSliding) info.columns = mask.columns;
    if constexpr (C::kTop) info.key = step.key;
    if constexpr (C::kBiased && !C::kListed) {
      const View& view = step.lead ? work.slice.lead.view : work.slice.keys;
      info.key = step.key == kUnlimited ? 0 : view.at(step.key);
      info.key_step = view.step;
    }
  }

  /// The row that begins what the query tile has of the bits of this lane's box; which come to L2,
  /// a step before consumers read them.
  __device__ __forceinline__ int32_t rows_of_bits(const Work& work, const Step& step) const {
    if (step.key == kUnlimited) return kNotSeen;
    if (step.bits < 0) return kSeenWhole;
    const BlockList& list = args_.params.pattern.list;
    const int32_t row = step.bits * list.block_q + work.first_row % list.block_q;
    const int32_t row_bytes = args_.box_rows / 8;
    ptx::prefetch_to_l2(reinterpret_cast<const uint8_t*>(list.bits) + int64_t{row} * row_bytes,
                        C::BLOCK_Q * row_bytes);
    return row;
  }

  /// The first element that this lane copies; kUnlimited where there is none.
  __device__ __forceinline__ int32_t copy_key(const Step& step) const {
    if (!paged()) return step.key;
    const int32_t key = C::kListed ? __shfl_sync(~0u, step.key, box_of_copy_) : step.key;
    if (lane_ >= args_.copies || key == kUnlimited) return kUnlimited;
    return key + row_of_copy_;
  }

  /// Which page of its sequence holds a key.
  __device__ __forceinline__ int32_t page_number(int32_t key) const {
    return args_.page_shift >= 0 ? key >> args_.page_shift : key / args_.params.keys.page_size;
  }

  /// The table's entry of the page of this lane's copy; read a step ahead, so that no copy waits.
  __device__ __forceinline__ int32_t table_entry(const Keys& keys, const Step& step) const {
    if (!paged()) return 0;
    const int32_t key = copy_key(step);
    if (key >= keys.number) return 0;
    KeySource own = args_.params.keys;
    own.table = keys.pages;
    return own.entry_of(0, page_number(key));
  }

  /// Whether the tile holds rows past the valid keys.
  __device__ __forceinline__ bool holds_no_keys(const Step& step, Interval there) const {
    const int32_t key = C::kListed ? copy_key(step) : step.key;
    const int32_t rows = C::kListed ? args_.copy_rows : C::BLOCK_KV;
    return __any_sync(~0u, key != kUnlimited && !there.holds({key, key + rows}));
  }

  /// Fills the next stage; rows outside `there` become zeros before it counts as full.
  __device__ __forceinline__ void load_cleared(const Keys& keys, const MappedView& mapped,
                                               const Step& step, int32_t entry, Interval there) {
    const uint32_t stage = ptx::shared_address(smem_.value[ring_.index]);
    const uint32_t raw = ptx::shared_address(&smem_.event[kRawValue]);
    copy_stage(keys, mapped, step, entry, raw);
    ptx::mbarrier_wait(raw, raw_parity_);
    raw_parity_ ^= 1;
    auto clear = [&](int32_t begin, int32_t end) {  // rows, which the lanes share as they lie
#pragma unroll 1
      for (int32_t at = begin * C::kRowBytes + lane_ * 16; at < end * C::kRowBytes; at += 512) {
        for (int32_t slab = 0; slab < C::kKeyBytes; slab += C::BLOCK_KV * C::kRowBytes) {
          ptx::store_shared_16(stage + slab + at, {0, 0, 0, 0});
        }
      }
    };
    // A list's boxes hold keys of their own, other tiles consecutive ones.
    const int32_t rows = C::kListed ? args_.copy_rows : C::BLOCK_KV, own_key = copy_key(step);
#pragma unroll 1
    for (int32_t first = 0; first < C::BLOCK_KV; first += rows) {
      const int32_t key = C::kListed ? __shfl_sync(~0u, own_key, first / rows) : step.key;
      clear(first, first + imax(0, imin(there.begin - key, rows)));
      clear(first + imax(0, imin(there.end - key, rows)), first + rows);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.value_full[ring_.index]));
    ring_.advance();
  }

  /// Fills the ring's next stage.
  __device__ __forceinline__ void load_stage(const Keys& keys, const MappedView& mapped,
                                             const Step& step, int32_t entry) {
    copy_stage(keys, mapped, step, entry,
               ptx::shared_address((kKeys ? smem_.key_full : smem_.value_full) + ring_.index));
    __syncwarp();
    ring_.advance();
  }

  /// Copies to the ring's next stage once it is empty; each lane copies its box. Completion
  /// signals `full`.
  __device__ __forceinline__ void copy_stage(const Keys& keys, const MappedView& mapped,
                                             const Step& step, int32_t entry, uint32_t full) {
    uint8_t* stages = kKeys ? smem_.key[0] : smem_.value[0];
    const uint32_t empty =
        ptx::shared_address((kKeys ? smem_.key_empty : smem_.value_empty) + ring_.index);
    // Boxes of few leading keys, of which a narrow step takes one.
    const bool few = C::kNarrows && step.lead && args_.lead_rows == kNarrowKeys;
    const bool narrow = C::kNarrows && step.narrow;
    const int32_t box_bytes = few ? kNarrowKeys * C::kRowBytes : box_bytes_;
    const int32_t copies = narrow ? 1 : few ? C::BLOCK_KV / kNarrowKeys : args_.copies;
    const int32_t slabs = few ? args_.at.lead_copies : args_.at.key_copies;
    const uint32_t box =
        ptx::shared_address(stages + ring_.index * C::kKeyBytes) + lane_ * box_bytes;
    const uint64_t eviction = read_once() ? ptx::kEvictFirst : ptx::kEvictLast;
    MapRow at = place_of_copy(keys, mapped, copy_key(step), entry);
    if (few) at.row += lane_ * kNarrowKeys;
    ptx::mbarrier_wait(empty, ring_.parity);
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect(full, narrow ? kNarrowKeys * C::kColumns * 2 : C::kKeyBytes);
    }
    if (lane_ < copies) {
#pragma unroll 1
      for (int32_t slab = 0; slab < slabs; ++slab) {
        ptx::tma_load(box + slab * C::BLOCK_KV * C::kRowBytes, mapped.map,
                      {slab * args_.at.slab_columns, at.row,
                       mapped.class_at + slab * args_.at.slab_step, mapped.head, at.batch},
                      full, eviction);
      }
    }
  }

  /// Whether L2 need not keep keys: a tile holds all rows that read them, as it mostly does in the
  /// contiguous kernel of few queries.
  __device__ __forceinline__ bool read_once() const {
    if constexpr (!C::kDeals) return C::kFewQueries;
    return args_.packs() == 1 && args_.params.problem.seq_q <= args_.packing.rows;
  }

  /// The map's batch entry, or the page, and the row of the copy that begins with element `key`;
  /// keys past the sequence's last page come as zeros.
  __device__ __forceinline__ MapRow place_of_copy(const Keys& keys, const MappedView& mapped,
                                                  int32_t key, int32_t entry) const {
    if (!paged()) return {mapped.batch, mapped.first + key};
    if (key >= keys.number) return {0, kUnlimited};
    const KeySource& source = args_.params.keys;
    return {source.existing_page(entry), key - page_number(key) * source.page_size};
  }

  /// Waits until the kernel in front has written what is copied, if the planner has not; past the
  /// first tile it has ended. The loader of V waits for the first K.
  __device__ __forceinline__ void wait_for_inputs() const {
    if (plans_early<C>(args_)) ptx::wait_for_primary();
  }

  /// All blocks begin at once, and memory serves them all: what the first product does not need
  /// waits until what it needs has come.
  __device__ __forceinline__ void wait_first_key() const {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.event[kFirstKey]), 0);
  }

  /// Each consumer's 64 rows have barriers of their own. A lane copies the rows of one head.
  __device__ __forceinline__ void load_query(const Work& work) {
    const HeadPacking& packing = args_.packing;
    const int32_t rows = imin(packing.rows, kConsumerRows), in_tile = lane_ * rows;
    if (in_tile < C::BLOCK_Q) {
      const int32_t consumer = in_tile / kConsumerRows, row = in_tile % kConsumerRows;
      const int32_t head = packing.head(in_tile);
      const uint32_t full = ptx::shared_address(&smem_.query_full[query_.index][consumer]);
      ptx::mbarrier_wait(ptx::shared_address(&smem_.query_empty[query_.index][consumer]),
                         query_.parity);
      if (row == 0) ptx::mbarrier_arrive_expect(full, C::kQueryBytes);
      const uint32_t tile = ptx::shared_address(smem_.query[query_.index][consumer]);
      const ViewPlace at =
          view_place(work.slice.rows, args_.params.pattern.dilation, work.sequence_row);
      wait_for_inputs();
#pragma unroll 1
      for (int32_t slab = 0; slab < args_.at.query_copies; ++slab) {
        ptx::tma_load(
            tile + (slab * kConsumerRows + row) * C::kRowBytes, &maps_.query[work.query_rows],
            {slab * args_.at.slab_columns, at.row + work.first_row + in_tile - head * packing.rows,
             at.class_idx * args_.at.query_step + slab * args_.at.slab_step, work.head + head,
             args_.query_batch(work.batch)},
            full, ptx::kEvictFirst);
      }
    }
    __syncwarp();
    query_.advance();
    if (kQueryFirst && folds<C>(args_, work)) query_.advance();  // the other one holds sums
  }

  const Arguments& args_;
  const TensorMaps& maps_;
  SharedStorage<C>& smem_;
  const int lane_;
  const int box_bytes_;
  const int box_of_copy_, row_of_copy_;  // where the lane's copy begins in the tile's boxes
  uint32_t steps_ = 0;
  uint32_t raw_parity_ = 0;
  Ring<C::kQueryBuffers> query_;
  Ring<kKeys ? C::kKeyStages : C::kValueStages> ring_;  // of K or of V
  WorkRing<C> work_;
};

}  // namespace sparse_attn::cuda::hopper

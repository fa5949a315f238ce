// The planner: one warp that numbers the query tiles, asks pattern.h what each visits, and hands
// the plans to the loaders, the mask writer and the consumers. It runs ahead of them, so that none
// waits for divisions.
#pragma once

#include "../common/ptx/grid.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "chunks.cuh"
#include "tile_order.h"
#include "tile_source.cuh"
#include "work_ring.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class Planner {
  using Work = typename SharedStorage<C>::Work;

 public:
  __device__ __forceinline__ Planner(const Arguments& args, SharedStorage<C>& smem)
      : args_(args), list_(args.params.pattern.list), smem_(smem), lane_(threadIdx.x % kWarp) {
    slot_.parity = 1;  // the first pass over the ring finds every slot empty
  }

  __device__ __forceinline__ void run() {
    int32_t num_tiles = args_.num_tiles;
    // All else in the block waits for a plan. The kernel that writes the counter has waited itself.
    const bool early = plans_early<C>(args_);
    if (C::kRagged || (args_.counter == nullptr && !early)) ptx::wait_for_primary();
    if constexpr (C::kDeals) {
      num_tiles = imin(__ldcg(args_.deal.counts) * args_.deal.by_width.divisor, num_tiles);
    } else if constexpr (C::kRagged) {
      const int32_t rows = __ldcg(args_.sequence_ends + args_.params.problem.batch);
      num_tiles = imin(rows * args_.grid.section, num_tiles);
      folds_ = C::kFolds && args_.folds != Fold::kNone &&
               __ldcg(args_.sequence_ends + args_.params.problem.batch + 1) != 0;
    }
    for (int32_t tile = blockIdx.x; tile < num_tiles; tile = next_tile(tile)) {
      Work work = decode(tile);
      Interval rows = {work.first_row, imin(work.first_row + C::BLOCK_Q, work.slice.rows.length)};
      // Past the end of a short class, or split over its keys.
      if (rows.empty() || (C::kSplits && !C::kFewQueries && work.chunk < 0 && is_split(work))) {
        continue;
      }
      Bounds bounds = bounds_of(work, rows);
      if constexpr (C::kRawValues) bounds.cut(num_keys_);
      work.tiles = visited_tiles(args_.params.pattern, work.slice, rows, bounds, C::BLOCK_KV);
      if constexpr (C::kListed) {
        work.runs =
            list_.runs(work.batch, work.head, work.first_row / list_.block_q, args_.box_rows);
      }
      if (C::kSplits && work.chunk >= 0 && !take_chunk(work)) continue;
      if constexpr (C::kDeals) {
        work.tiles = take_tiles(work.tiles, dealt_.begin, dealt_.size());
      } else if (C::kRagged && (folds_ || (C::kWide && C::kFolds))) {
        const int32_t visited = work.tiles.count(), length = imax(1, own_.chunk_tiles(visited));
        fold_by(length, count_chunks(length, visited), group_of(visited, C::HEAD_DIM), work);
      }
      work.written = C::kMaskWriter && may_write_masks<C>(args_, work.tiles);
      publish(work, existing_keys(work, bounds.any));
      wait_turn(work);
    }
    publish(Work{}, {});
    if (early) ptx::wait_for_primary();  // where there was no tile to load
    ptx::launch_dependents();
  }

 private:
  __device__ __forceinline__ Work decode(int32_t tile) {
    if constexpr (C::kDeals) return decode_piece(tile);
    if constexpr (C::kRagged) return decode_in_row(tile);
    if constexpr (!C::kSplits) return decode_whole(tile);
    if (C::kFewQueries || tile < args_.split_items) return decode_split(tile);
    return decode_whole(tile - args_.split_items);
  }

  /// A chunk of the keys of a query tile.
  __device__ __forceinline__ Work decode_split(int32_t item) {
    int32_t problem = args_.by_items.divide(item);
    const int32_t in_problem = args_.by_items.remainder(item);
    int32_t heads = 1;
    if (C::kPacks && args_.packing.heads > 1) {
      const int32_t group = args_.by_packs.divide(problem);
      const int32_t first = args_.by_packs.remainder(problem) * args_.packing.heads;
      heads = imin(args_.packing.heads, args_.group - first);
      problem = group * args_.group + first;
    }
    Work work = place(args_.partials.first_head * args_.classes + problem);
    work.heads = static_cast<int8_t>(heads);
    work.first_row = args_.partials.first_query(work.slice.origin, work.slice.offset) +
                     args_.by_parts.divide(in_problem) * C::BLOCK_Q;
    work.chunk = static_cast<int16_t>(args_.by_parts.remainder(in_problem));
    return work;
  }

  __device__ __forceinline__ bool is_split(const Work& work) const {
    const int32_t first = args_.partials.first_query(work.slice.origin, work.slice.offset);
    return Interval{first, first + args_.split.tiles * C::BLOCK_Q}.contains(work.first_row);
  }

  /// How many chunks of `length` key tiles there are.
  __device__ __forceinline__ int32_t count_chunks(int32_t length, int32_t visited) const {
    const uint32_t begun = __ballot_sync(~0u, lane_ * length < visited);  // a lane each
    return imax(1, __popc(begun));
  }

  /// The thread block takes the last ones of `chunks` chunks in turn.
  __device__ __forceinline__ static void fold_by(int32_t length, int32_t chunks, int32_t group,
                                                 Work& work) {
    work.chunk_tiles = static_cast<uint16_t>(length <= UINT16_MAX ? length : 0);
    work.first_group = static_cast<int8_t>((chunks - 1) % group + 1);
    work.group = static_cast<int8_t>(group);
  }

  /// Leaves of what the tile visits its chunk or group; false where it has fewer.
  __device__ __forceinline__ bool take_chunk(Work& work) const {
    const int32_t visited = work.tiles.count();
    const int32_t length =  // chunk_tiles, by a product
        imax(args_.split.least, args_.by_chunks.divide(visited + args_.split.chunks - 1));
    const int32_t chunks = count_chunks(length, visited), group = group_of(visited, C::HEAD_DIM);
    if (args_.folds != Fold::kNone) {
      fold_by(length, args_.folds == Fold::kWhole ? chunks : group, group, work);
    }
    if (args_.folds == Fold::kWhole) return true;
    const int32_t in_part = args_.folds == Fold::kGroup ? group : 1;
    if (work.chunk > 0 && work.chunk * in_part >= chunks) return false;
    const Partials::StoredChunks count = {ceil_div(chunks, in_part), group >= chunks};
    work.chunks = static_cast<uint16_t>(count.code());
    work.tiles = take_tiles(work.tiles, work.chunk * in_part * length, in_part * length);
    return true;
  }

  /// A tile of a piece: that of a head, or of several of its group.
  __device__ __forceinline__ Work decode_piece(int32_t tile) {
    const int32_t at = args_.deal.by_width.divide(tile);
    const int32_t in_piece = args_.deal.by_width.remainder(tile);
    const auto* piece = reinterpret_cast<const int4*>(args_.deal.pieces + at);  // a Piece
    const int4 whole = __ldcg(piece);
    const int4 part = __ldcg(piece + 1);
    dealt_ = {part.x * whole.z, (part.x + part.y) * whole.z};
    const int32_t group = args_.by_packs.divide(in_piece);
    const int32_t head = args_.by_packs.remainder(in_piece) * args_.packing.heads;
    Work work = place(whole.x + group * args_.group + head);
    work.heads = static_cast<int8_t>(imin(args_.packing.heads, args_.group - head));
    work.first_row = whole.y * C::BLOCK_Q;
    fold_by(whole.z, part.x + part.y, group_of(whole.w, C::HEAD_DIM), work);
    if (part.z >= 0) work.slot = part.z + in_piece * part.w + part.x;
    return work;
  }

  /// A tile of a section of problems.
  __device__ __forceinline__ Work decode_in_row(int32_t tile) {
    const int32_t row = args_.by_section.divide(tile);
    const int4 first =
        __ldcg(reinterpret_cast<const int4*>(args_.section_rows + row));  // a SectionRow
    own_.chunks = first.z;
    own_.least = first.w;
    Work work = place(first.x + args_.by_section.remainder(tile));
    work.first_row = first.y * C::BLOCK_Q;
    return work;
  }

  __device__ __forceinline__ Work decode_whole(int32_t tile) {
    const TilePlace of = place_of(args_.grid, args_.last_first, tile);
    Work work = place(of.problem);
    work.first_row = of.row_block * C::BLOCK_Q;
    return work;
  }

  /// The (batch entry, head, class) of a number.
  __device__ __forceinline__ Work place(int32_t problem) {
    const AttentionParams& params = args_.params;
    Work work;
    int32_t class_idx = 0;
    if (args_.classes > 1) {
      class_idx = problem % args_.classes;
      problem /= args_.classes;
    }
    work.batch = args_.by_heads.divide(problem);
    work.head = problem - work.batch * params.problem.heads_q;
    work.head_kv = args_.by_group.divide(work.head);
    const Sequence sequence = params.sequences.of(work.batch);
    num_keys_ = params.num_keys(sequence);
    find_slice(class_idx, sequence);
    work.slice = slice_;
    work.query_rows = query_rows_;
    work.key_rows = key_rows_;
    if constexpr (C::kRagged) find_place(sequence, work);
    return work;
  }

  /// Where the slice of a sequence begins.
  __device__ __forceinline__ void find_place(const Sequence& sequence, Work& work) const {
    const Sequences& sequences = args_.params.sequences;
    work.sequence_row = sequence.first_row;
    work.sequence_key = sequence.first_key;
    if (args_.params.pattern.dilation == 1) return;
    if (sequences.packed()) {
      work.query_rows = kind_of(work.slice.rows, work.sequence_row, sequences.packed_rows);
    }
    if (sequences.first_keys != nullptr) {
      work.key_rows = kind_of(work.slice.keys, work.sequence_key, sequences.packed_keys);
    }
  }

  /// Whether the view's class of the tensor's rows is one of those with one row more.
  __device__ __forceinline__ static RowsOf kind_of(const View& view, int32_t first, int32_t size) {
    return (first + view.offset) % view.step < size % view.step ? kLongClass : kShortClass;
  }

  /// Without dilation a slice takes few sums; else it is most often that of the tile before.
  __device__ __forceinline__ void find_slice(int32_t class_idx, const Sequence& sequence) {
    const AttentionParams& params = args_.params;
    if (params.pattern.dilation == 1) {
      slice_ = make_slice(params.pattern, 0, sequence);
      return;
    }
    const bool same_lengths =
        !C::kRagged || (sequence.rows == rows_ && sequence.keys == slice_.num_keys);
    if (class_idx == class_idx_ && sequence.offset == slice_.offset && sequence.origin == origin_ &&
        same_lengths) {
      return;
    }
    class_idx_ = class_idx;
    origin_ = sequence.origin;
    rows_ = sequence.rows;
    slice_ = make_slice(params.pattern, class_idx, sequence);
    query_rows_ = class_kind(slice_.rows, params.problem.seq_q);
    key_rows_ = class_kind(slice_.keys, params.problem.seq_kv);
  }

  /// Whether the class is one of those with one row more.
  __device__ __forceinline__ static RowsOf class_kind(const View& view, int32_t size) {
    return view.offset < size % view.step ? kLongClass : kShortClass;
  }

  /// What key_bounds say of the rows of a tile.
  __device__ __forceinline__ Bounds bounds_of(const Work& work, Interval rows) const {
    const AttentionParams& params = args_.params;
    if (params.scores.bounds.data == nullptr) return unbounded(params.problem.seq_kv);
    Bounds bounds = no_rows(params.problem.seq_kv);
    for (int32_t r = rows.begin + lane_; r < rows.end; r += kWarp) {
      bounds.add(params.scores.bounds.row(work.batch, work.head, work.slice.rows.at(r),
                                          params.problem.seq_kv));
    }
    bounds.any = {__reduce_min_sync(~0u, bounds.any.begin), __reduce_max_sync(~0u, bounds.any.end)};
    bounds.all = {__reduce_max_sync(~0u, bounds.all.begin), __reduce_min_sync(~0u, bounds.all.end)};
    return bounds;
  }

  __device__ __forceinline__ ExistingKeys existing_keys(const Work& work, Interval keys) const {
    if constexpr (!C::kRawValues) return {};
    ExistingKeys there = {work.slice.keys.inside(keys), {}};
    if constexpr (C::kLeads) there.lead = work.slice.lead.inside(args_.params.pattern, keys);
    return there;
  }

  /// The next tile is claimed when the one before `work` is finished, or `work` almost loaded,
  /// since a queue would unbalance the end; after a short one, which ends before the next is
  /// planned, as soon as there is room for it. Pieces of a deal are few, so one waits for each.
  __device__ __forceinline__ void wait_turn(const Work& work) {
    auto wait = [&](const auto& slot) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.work_empty[slot.index]), slot.parity);
    };
    wait(slot_);
    const int32_t visits = most_visits<C>(args_, work);
    if (loads_before_claim<C>(args_, work) > 0) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.event[kAlmostLoaded]), loaded_parity_);
      loaded_parity_ ^= 1;
    } else if (C::kDeals && claims_late<C>(args_) ? visits > 1 : visits > kShortTile) {
      auto before = slot_;
      before.advance();
      wait(before);
    }
  }

  __device__ __forceinline__ void publish(const Work& work, const ExistingKeys& there) {
    if (lane_ == 0) {
      smem_.work[slot_.index] = work;
      if constexpr (C::kLeads) smem_.there[slot_.index][C::kLeads] = there.lead;
      if constexpr (C::kRawValues) smem_.there[slot_.index][0] = there.main;
      ptx::mbarrier_arrive(ptx::shared_address(&smem_.work_full[slot_.index]));
    }
    __syncwarp();
    slot_.advance();
  }

  /// The first tiles are dealt by the blocks' numbers, while the counter and the order of the rest
  /// are still being written. Every block comes here or has waited, since it ends by finding no
  /// tile.
  __device__ __forceinline__ int32_t next_tile(int32_t tile) const {
    const int32_t grid = static_cast<int32_t>(gridDim.x);
    if (args_.counter == nullptr) return tile + grid;
    ptx::wait_for_primary();
    const int32_t turn = __shfl_sync(~0u, lane_ == 0 ? atomicAdd(args_.counter, 1) : 0, 0);
    const bool ordered = C::kListed && args_.order != nullptr && turn < args_.num_tiles - grid;
    return ordered ? __ldcg(args_.order + turn) : turn + grid;
  }

  const Arguments& args_;
  const BlockList& list_;
  SharedStorage<C>& smem_;
  const int lane_;
  WorkRing<C> slot_;
  uint32_t loaded_parity_ = 0;  // of the next tile that is waited for
  bool folds_ = false;
  KeySplit own_;            // of a tile of a sequence among others
  Interval dealt_;          // of what the tile visits, the piece
  int32_t class_idx_ = -1;  // of the slice, none yet
  int32_t origin_ = 0;
  int32_t rows_ = 0;
  int32_t num_keys_ = 0;  // of the sequence, that may be read
  Slice slice_;
  RowsOf query_rows_ = kShortClass, key_rows_ = kShortClass;
};

}  // namespace sparse_attn::cuda::hopper

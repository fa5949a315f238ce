// The loader: one warp that keeps the rings of Q, K and V filled by TMA. V runs one step behind K,
// the order in which consumers wait, across query tiles too where the schedule crosses them. What
// is asked of it between the release of a stage and the copy into it is on the consumers' critical
// path.
#pragma once

#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/tma.cuh"
#include "tile_source.cuh"

namespace sparse_attn::cuda::hopper {

template <class C>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Arguments& args, const TensorMaps& maps,
                                    SharedStorage<C>& smem)
      : args_(args),
        maps_(maps),
        smem_(smem),
        lane_(threadIdx.x % kWarp),
        boxes_(C::BLOCK_KV / args.box_rows),
        box_bytes_(args.box_rows * C::kRowBytes) {
    // The first pass over a ring finds every stage empty.
    query_.parity = key_.parity = value_.parity = 1;
  }

  __device__ __forceinline__ void run() {
    Load pending;
    for (;;) {
      ptx::mbarrier_wait(ptx::smem_address(&smem_.work_full[work_.index]), work_.parity);
      const Work& work = smem_.work[work_.index];
      if (work.batch < 0) break;
      load_tile(work, pending);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::smem_address(&smem_.work_empty[work_.index]));
      work_.advance();
    }
    load_value(pending);
  }

 private:
  /// A key tile on its way: where this lane's box lies, for K first and for V a step later.
  struct Load {
    bool valid = false;
    RowsOf view;
    int32_t key, class_idx, head, batch;
  };

  __device__ __forceinline__ void load_tile(const Work& work, Load& pending) {
    const Load origin = {true, work.key_rows, 0, work.slice.keys.offset, work.head_kv, work.batch};
    TileSource<C> source(args_, work);
    Step step = source.next();
    if (!step.valid) step = {TileKind::kMasked, true, kUnlimited};  // zeros that no row sees
    bool first = true;
    while (step.valid) {
      Step ahead = source.next();
      Load load = origin;
      load.key = step.key;
      if (step.kind == TileKind::kLead) load.view = kLeadView, load.class_idx = 0;
      load_key(load, step.kind, !ahead.valid);
      load_value(pending);
      if (first) load_query(work);
      pending = load;
      step = ahead;
      first = false;
    }
    if (!C::kCrossTile) load_value(pending);
  }

  __device__ __forceinline__ void load_key(const Load& load, TileKind kind, bool last) {
    // The slot is free: its last reader has since released a younger stage.
    StepInfo& info = smem_.info[steps_++ % SharedStorage<C>::kInfoSlots];
    if (lane_ == 0) {
      info.kind = kind;
      info.last = last;
    }
    if (lane_ < StepInfo::kMaxBoxes) info.key[lane_] = load.key;
    __syncwarp();
    copy(maps_.key, load, args_.at.key_step, smem_.key, smem_.key_full, smem_.key_empty, key_);
  }

  __device__ __forceinline__ void load_value(Load& load) {
    if (!load.valid) return;
    copy(maps_.value, load, args_.at.value_step, smem_.value, smem_.value_full, smem_.value_empty,
         value_);
    load.valid = false;
  }

  /// Fills the ring's next stage once it is empty; each lane copies its box.
  __device__ __forceinline__ void copy(const CUtensorMap* maps, const Load& load,
                                       int32_t class_step, uint8_t (*stages)[C::kKeyBytes],
                                       uint64_t* full, uint64_t* empty, Ring<C::kStages>& ring) {
    const CUtensorMap* map = &maps[load.view];
    const uint32_t barrier = ptx::smem_address(&full[ring.index]);
    const uint32_t box = ptx::smem_address(stages[ring.index]) + lane_ * box_bytes_;
    const int32_t class_at = load.class_idx * class_step;
    const bool copies = lane_ < (load.view == kLeadView ? 1 : boxes_);
    ptx::mbarrier_wait(ptx::smem_address(&empty[ring.index]), ring.parity);
    if (lane_ == 0) ptx::mbarrier_arrive_expect(barrier, C::kKeyBytes);
    if (copies) {
#pragma unroll 1
      for (int32_t slab = 0; slab < args_.at.key_copies; ++slab) {
        ptx::tma_load(box + slab * C::BLOCK_KV * C::kRowBytes, map,
                      {slab * args_.at.slab_columns, load.key, class_at + slab * args_.at.slab_step,
                       load.head, load.batch},
                      barrier, ptx::kEvictLast);
      }
    }
    __syncwarp();
    ring.advance();
  }

  /// Each consumer's 64 rows have barriers of their own.
  __device__ __forceinline__ void load_query(const Work& work) {
    if (lane_ < C::kConsumers) {
      uint32_t full = ptx::smem_address(&smem_.query_full[query_.index][lane_]);
      ptx::mbarrier_wait(ptx::smem_address(&smem_.query_empty[query_.index][lane_]), query_.parity);
      ptx::mbarrier_arrive_expect(full, C::kQueryBytes);
      uint32_t tile = ptx::smem_address(smem_.query[query_.index][lane_]);
#pragma unroll 1
      for (int32_t slab = 0; slab < args_.at.query_copies; ++slab) {
        ptx::tma_load(tile + slab * kConsumerRows * C::kRowBytes, &maps_.query[work.query_rows],
                      {slab * args_.at.slab_columns, work.first_row + lane_ * kConsumerRows,
                       work.slice.rows.offset * args_.at.query_step + slab * args_.at.slab_step,
                       work.head, work.batch},
                      full, ptx::kEvictFirst);
      }
    }
    __syncwarp();
    query_.advance();
  }

  const Arguments& args_;
  const TensorMaps& maps_;
  SharedStorage<C>& smem_;
  const int lane_;
  const int boxes_;  // of a tile of the main view
  const int box_bytes_;
  uint32_t steps_ = 0;
  Ring<C::kQueryBuffers> query_;
  Ring<C::kStages> key_, value_;
  Ring<SharedStorage<C>::kWorkSlots> work_;
};

}  // namespace sparse_attn::cuda::hopper

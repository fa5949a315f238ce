// The views of a call's tensors that the copy engine reads and writes.
#include "../common/tensor_map.h"
#include "config.h"
#include "tensor_maps.h"

namespace sparse_attn::cuda::hopper {
namespace {

/// A strided view of a tensor's rows, strides in elements.
struct RowsView {
  int64_t rows, row_stride;
  int64_t classes, class_stride;
};

/// Sizes of a tensor; packed rows are one batch entry, and pages are entries.
struct Extents {
  int64_t columns, rows, heads, batch;
};

Extents query_extents(const AttentionParams& params, int32_t columns) {
  const Problem& p = params.problem;
  if (params.sequences.packed()) return {columns, params.sequences.packed_rows, p.heads_q, 1};
  return {columns, p.seq_q, p.heads_q, p.batch};
}

Extents key_extents(const AttentionParams& params, int32_t columns) {
  const Problem& p = params.problem;
  const Sequences& sequences = params.sequences;
  const KeySource& keys = params.keys;
  const int32_t rows = mapped_keys(params);
  if (keys.paged()) return {columns, rows, p.heads_kv, keys.num_pages};
  return {columns, rows, p.heads_kv, sequences.first_keys != nullptr ? 1 : p.batch};
}

class Encoder {
 public:
  Encoder(const AttentionParams& params, const BoxShape& box)
      : params_(params), slab_(box.slab), columns_(box.columns) {}

  int32_t slabs() const { return columns_ / slab_; }

  /// Whether slabs are a dimension of the maps: rows fill them, and every class begins a whole
  /// number of slabs after the one before.
  bool folds() const {
    if (params_.problem.head_dim != columns_ || params_.problem.value_dim != columns_) return false;
    if (params_.pattern.dilation == 1 && params_.pattern.lead.step == 1) return true;
    for (const TensorView* tensor :
         {&params_.query, &params_.keys.key, &params_.keys.value, &params_.outputs.out}) {
      if (tensor->stride_s % slab_ != 0) return false;
    }
    return true;
  }

  void encode(const TensorView& tensor, const void* first, const Extents& extents,
              const RowsView& view, int32_t box_rows, int32_t copies, CUtensorMap* map) {
    const bool folded = folds();
    const int64_t third =
        folded ? (view.classes - 1) * (view.class_stride / slab_) + slabs() : view.classes;
    const TensorMapShape shape = {
        {folded ? slab_ : extents.columns, view.rows, third, extents.heads, extents.batch},
        {view.row_stride, folded ? slab_ : view.class_stride, tensor.stride_h, tensor.stride_b},
        {slab_, box_rows, slabs() / copies, 1, 1}};
    const Status status = encode_tensor_map(params_.problem.dtype, first, shape, map);
    if (!status.ok()) status_ = status;
  }

  Status status() const { return status_; }

 private:
  const AttentionParams& params_;
  int32_t slab_, columns_;
  Status status_;
};

}  // namespace

int32_t mapped_keys(const AttentionParams& params) {
  const Sequences& sequences = params.sequences;
  if (params.keys.paged()) return params.keys.page_size;
  if (sequences.first_keys != nullptr) return sequences.packed_keys;
  return has_short_maps(params) ? params.num_keys(sequences.common()) : params.problem.seq_kv;
}

bool can_map(const AttentionParams& params) {
  constexpr int64_t kUnit = 8;  // elements of 16 bytes
  const MaskView& mask = params.scores.mask;
  if (mask.kind == MaskKind::kNone || mask.kind == MaskKind::kBool ||
      mask.kind == MaskKind::kFloat32) {
    return false;
  }
  const bool rows = mask.stride_q > 0 || params.problem.seq_q == 1;
  return rows && mask.stride_k == 1 && mask.stride_h >= 0 && mask.stride_b >= 0 &&
         (mask.stride_q | mask.stride_h | mask.stride_b) % kUnit == 0 &&
         reinterpret_cast<uintptr_t>(mask.data) % (2 * kUnit) == 0;
}

Status make_mask_map(const AttentionParams& params, int32_t rows, CUtensorMap* map) {
  const MaskView& mask = params.scores.mask;
  const Problem& problem = params.problem;
  const int64_t heads = mask.stride_h == 0 ? 1 : problem.heads_q;
  const int64_t batch = mask.stride_b == 0 ? 1 : problem.batch;
  const TensorMapShape shape = {{problem.seq_kv, problem.seq_q, 1, heads, batch},
                                {mask.stride_q, 0, mask.stride_h, mask.stride_b},
                                {kMaskColumns, rows, 1, 1, 1},
                                /*wide=*/true};
  return encode_tensor_map(problem.dtype, mask.data, shape, map);
}

Status make_tensor_maps(const AttentionParams& params, const BoxShape& box, TensorMaps* maps,
                        TileCoordinates* coordinates) {
  Encoder encoder(params, box);
  const Pattern& pattern = params.pattern;
  const int32_t slabs = encoder.slabs();
  const bool folded = encoder.folds();
  auto step = [&](const TensorView& tensor) -> int32_t {
    return folded ? static_cast<int32_t>(tensor.stride_s / box.slab) : 1;
  };
  const int32_t query_copies = folded && box.query_rows == kConsumerRows ? 1 : slabs;
  const int32_t key_copies = folded && box.key_rows == box.tile_keys ? 1 : slabs;
  const int32_t lead_copies = folded && box.lead_rows == box.tile_keys ? 1 : slabs;
  *coordinates = {query_copies,
                  key_copies,
                  lead_copies,
                  folded ? 0 : box.slab,
                  folded ? 1 : 0,
                  step(params.query),
                  step(params.outputs.out),
                  step(params.keys.key),
                  step(params.keys.value)};

  // Rows in classes by their residue modulo `d`.
  auto encode_classes = [&](const TensorView& tensor, const Extents& extents, int64_t d,
                            int32_t box_rows, int32_t copies, CUtensorMap* of_class) {
    const int64_t size = extents.rows;
    RowsView view = {size / d, d * tensor.stride_s, d < size ? d : size, tensor.stride_s};
    encoder.encode(tensor, tensor.data, extents, view, box_rows, copies, &of_class[kShortClass]);
    if (size % d == 0) return;
    ++view.rows;
    encoder.encode(tensor, tensor.data, extents, view, box_rows, copies, &of_class[kLongClass]);
  };
  auto encode_keys = [&](const TensorView& tensor, const TensorView& gathered, int32_t columns,
                         CUtensorMap* of_view) {
    const Extents keys = key_extents(params, columns);
    encode_classes(tensor, keys, pattern.dilation, box.key_rows, key_copies, of_view);
    if (pattern.lead_keys != nullptr) {
      const RowsView view = {pattern.lead.length, gathered.stride_s, 1, 0};
      encoder.encode(gathered, gathered.data, keys, view, box.lead_rows, lead_copies,
                     &of_view[kLeadView]);
      return;
    }
    if (!pattern.has_lead() || keys.rows == 0) return;
    if (pattern.lead.step > 1) {
      encode_classes(tensor, keys, pattern.lead.step, box.lead_rows, lead_copies,
                     &of_view[kLeadView]);
      return;
    }
    // The lead view may move with each sequence.
    const bool moves = params.sequences.key_origins != nullptr || !params.sequences.same_lengths();
    const int32_t there = static_cast<int32_t>(keys.rows);
    const int32_t lead_keys = moves ? there : pattern.lead.before(there);
    if (lead_keys == 0) return;
    RowsView view = {lead_keys, tensor.stride_s, 1, 0};
    encoder.encode(tensor, tensor.data, keys, view, box.lead_rows, lead_copies,
                   &of_view[kLeadView]);
  };

  const Problem& problem = params.problem;
  encode_classes(params.query, query_extents(params, problem.head_dim), pattern.dilation,
                 box.query_rows, query_copies, maps->query);
  encode_classes(params.outputs.out, query_extents(params, problem.value_dim), pattern.dilation,
                 box.out_rows, query_copies, maps->out);
  encode_keys(params.keys.key, params.keys.lead_key, problem.head_dim, maps->key);
  encode_keys(params.keys.value, params.keys.lead_value, problem.value_dim, maps->value);
  return encoder.status();
}

}  // namespace sparse_attn::cuda::hopper

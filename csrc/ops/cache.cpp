// append_to_cache as an op: new keys and values into the slots of a cache.
#include "../cache_params.h"
#include "checks.h"
#include "dispatch.h"
#include "overlap.h"
#include "sequence_contents.h"

namespace sparse_attn {
namespace {

const std::string kAppendOp = "append_to_cache";

void check_new_rows(const char* name, const Tensor& rows) {
  if (rows.dim() != 3) {
    fail_expected(kAppendOp, text(name, " of shape (tokens, heads, head_dim)"), shape_of(rows));
  }
  if (rows.size(1) > kMaxLength || rows.size(2) > kMaxLength) {
    fail_expected(kAppendOp, text(name, " of heads and head_dim up to ", kMaxLength),
                  shape_of(rows));
  }
  if (!is_attention_dtype(rows)) {
    fail_expected(kAppendOp, text(name, " of dtype float32, float16 or bfloat16"), dtype_of(rows));
  }
  check_last_contiguous(kAppendOp, name, rows);
}

void check_cache(const char* name, const Tensor& cache, const char* rows_name, const Tensor& rows) {
  check_same_device(kAppendOp, name, cache, rows, "key");
  if (cache.dim() != 4 || cache.size(2) != rows.size(1) || cache.size(3) != rows.size(2)) {
    fail_expected(kAppendOp,
                  text(name, " of shape (pages, page_size, ", rows.size(1), ", ", rows.size(2),
                       ") as ", rows_name, " has heads and head_dim"),
                  shape_of(cache));
  }
  if (cache.size(1) > kMaxLength) {
    fail_expected(kAppendOp, text(name, " of page_size up to ", kMaxLength),
                  std::to_string(cache.size(1)));
  }
  if (!is_float8(cache) && cache.scalar_type() != rows.scalar_type()) {
    fail_expected(kAppendOp,
                  text(name, " of ", rows_name, "'s dtype ", dtype_of(rows), " or float8_e4m3fn"),
                  dtype_of(cache));
  }
  check_last_contiguous(kAppendOp, name, cache);
}

/// New rows and where they go; `scale` may be None.
CacheRows rows_into(const Tensor& rows, const Tensor& cache, const char* scale_name,
                    const MaybeTensor& scale) {
  CacheRows written;
  written.rows = rows.const_data_ptr();
  written.row_stride_t = rows.stride(0);
  written.row_stride_h = rows.stride(1);
  written.cache = cache.mutable_data_ptr();
  written.stride_page = cache.stride(0);
  written.stride_slot = cache.stride(1);
  written.stride_h = cache.stride(2);
  written.head_dim = static_cast<int32_t>(rows.size(2));
  written.scale = check_cache_scale(kAppendOp, scale_name, scale, cache, "key");
  return written;
}

}  // namespace

void append_to_cache(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
                     const Tensor& slot_mapping, MaybeTensor key_scale, MaybeTensor value_scale) {
  check_new_rows("key", key);
  check_new_rows("value", value);
  check_same_device(kAppendOp, "value", value, key, "key");
  if (value.scalar_type() != key.scalar_type()) {
    fail_expected(kAppendOp, text("value of key's dtype ", dtype_of(key)), dtype_of(value));
  }
  check_shape(kAppendOp, "value", value, {key.size(0), key.size(1), value.size(2)});
  check_cache("key_cache", key_cache, "key", key);
  check_cache("value_cache", value_cache, "value", value);
  check_shape(kAppendOp, "value_cache", value_cache,
              {key_cache.size(0), key_cache.size(1), value.size(1), value.size(2)});
  if (value_cache.scalar_type() != key_cache.scalar_type()) {
    fail_expected(kAppendOp, text("value_cache of key_cache's dtype ", dtype_of(key_cache)),
                  dtype_of(value_cache));
  }
  check_same_device(kAppendOp, "slot_mapping", slot_mapping, key, "key");
  check_dtype(kAppendOp, "slot_mapping", slot_mapping, ScalarType::Long, "int64");
  check_shape(kAppendOp, "slot_mapping", slot_mapping, {key.size(0)});
  std::vector<NamedTensor> inputs = {
      {"key", &key}, {"value", &value}, {"slot_mapping", &slot_mapping}};
  if (key_scale) inputs.push_back({"key_scale", &*key_scale});
  if (value_scale) inputs.push_back({"value_scale", &*value_scale});
  check_no_overlap(kAppendOp, "value_cache", value_cache, inputs);
  inputs.push_back({"value_cache", &value_cache});
  check_no_overlap(kAppendOp, "key_cache", key_cache, inputs);

  AppendParams params;
  params.key = rows_into(key, key_cache, "key_scale", key_scale);
  params.value = rows_into(value, value_cache, "value_scale", value_scale);
  params.tokens = key.size(0);
  params.heads = static_cast<int32_t>(key.size(1));
  params.pages = key_cache.size(0);
  params.page_size = static_cast<int32_t>(key_cache.size(1));
  params.dtype = dtype_code(key);
  params.float8 = is_float8(key_cache);
  if (params.tokens == 0 || key_cache.size(0) * key_cache.size(1) * key.size(1) == 0) return;
  auto guard = backend().enter(key.get_device_index());
  Tensor slots = torch::stable::contiguous(slot_mapping);
  params.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  params.device = key.get_device_index();
  params.stream = backend().stream(params.device);
  check_status(kAppendOp, backend().tools().append_to_cache(params));
}

}  // namespace sparse_attn

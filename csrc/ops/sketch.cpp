// The key sketch as ops: appending tokens, sketching slots of a paged cache; its tensors checked.
#include "checks.h"
#include "dispatch.h"
#include "overlap.h"
#include "sequence_contents.h"
#include "sketch_arguments.h"

namespace sparse_attn {
namespace {

/// Kernels read 16 bytes at a time.
void check_aligned(const std::string& op, const char* name, const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (address % 16 != 0) {
    fail_expected(op, text(name, " that begin at a multiple of 16 bytes"),
                  text(address % 16, " bytes past one"));
  }
}

/// Keys that a sketch may be of: four dimensions of a `shape`, those of a cache of 8 bits too.
void check_sketched_keys(const std::string& op, const char* name, const Tensor& key,
                         const char* shape, bool cache) {
  if (key.dim() != 4) fail_expected(op, text(name, " of shape ", shape), shape_of(key));
  if (!is_attention_dtype(key) && !(cache && is_float8(key))) {
    const char* dtypes =
        cache ? "float32, float16, bfloat16 or float8_e4m3fn" : "float32, float16 or bfloat16";
    fail_expected(op, text(name, " of dtype ", dtypes), dtype_of(key));
  }
  check_head_dim(op, name, key.size(3));
  check_last_contiguous(op, name, key);
}

}  // namespace

int32_t sketch_group_of(int64_t page_size) {
  return page_size % 64 == 0 ? 64 : page_size % 32 == 0 ? 32 : 16;
}

SketchView check_sketch(const std::string& op, const SketchShape& shape, const Tensor& codes,
                        const Tensor& ranges, const Tensor& key, const char* name) {
  SketchView view;
  view.heads = static_cast<int32_t>(shape.heads);
  view.head_dim = static_cast<int32_t>(shape.head_dim);
  view.paged = shape.page_size > 0;
  view.group = shape.page_size > 0 ? sketch_group_of(shape.page_size) : kSketchGroup;
  check_same_device(op, "sketch", codes, key, name);
  check_dtype(op, "sketch's codes", codes, ScalarType::Int, "int32");
  const int32_t two_bits = view.row_words();
  const bool fits = codes.dim() == 4 && codes.size(0) == shape.entries &&
                    codes.size(1) == shape.heads && codes.size(2) % view.group == 0 &&
                    codes.size(2) <= kMaxLength &&
                    (shape.page_size == 0 || codes.size(2) == shape.page_size) &&
                    (codes.size(3) == two_bits || codes.size(3) == 2 * two_bits);
  if (!fits) {
    const std::string rows = shape.page_size > 0 ? std::to_string(shape.page_size) : "tokens";
    fail_expected(op,
                  text("a sketch of ", name, "'s shape (its codes ", shape.entries, ", ",
                       shape.heads, ", ", rows, ", ", two_bits, " or ", 2 * two_bits, ")"),
                  shape_of(codes));
  }
  view.rows = static_cast<int32_t>(codes.size(2));
  view.bits = codes.size(3) == two_bits ? 2 : 4;
  check_same_device(op, "sketch", ranges, key, name);
  if (is_float8(key)) {
    if (!is_attention_dtype(ranges) || dtype_code(ranges) == Dtype::kFloat32) {
      fail_expected(op, text("a sketch of float16 or bfloat16 beside ", name, " of float8_e4m3fn"),
                    dtype_of(ranges));
    }
  } else if (ranges.scalar_type() != key.scalar_type()) {
    fail_expected(op, text("a sketch of ", name, "'s dtype ", dtype_of(key)), dtype_of(ranges));
  }
  check_shape(op, "sketch's ranges", ranges,
              {shape.entries, shape.heads, view.rows / view.group, 2, shape.head_dim});
  check_contiguous(op, "sketch's codes", codes);
  check_contiguous(op, "sketch's ranges", ranges);
  check_aligned(op, "sketch's codes", codes);
  check_aligned(op, "sketch's ranges", ranges);
  view.codes = static_cast<uint32_t*>(const_cast<void*>(codes.const_data_ptr()));
  view.ranges = const_cast<void*>(ranges.const_data_ptr());
  return view;
}

int32_t* check_sketch_lengths(const std::string& op, const SketchView& view, int64_t entries,
                              const Tensor& lengths, const Tensor& key, const char* name) {
  check_same_device(op, "sketch", lengths, key, name);
  check_dtype(op, "sketch's lengths", lengths, ScalarType::Int, "int32");
  if (view.paged) {
    check_shape(op, "sketch's lengths", lengths, {entries, view.rows / view.group});
  } else {
    check_shape(op, "sketch's lengths", lengths, {entries});
  }
  check_contiguous(op, "sketch's lengths", lengths);
  return static_cast<int32_t*>(const_cast<void*>(lengths.const_data_ptr()));
}

void append_to_sketch(const Tensor& key, Tensor codes, Tensor ranges, Tensor open_keys,
                      Tensor lengths) {
  const std::string op = "append_to_sketch";
  check_sketched_keys(op, "key", key, "(batch, heads, length, head_dim)", false);
  const int64_t batch = key.size(0), heads = key.size(1), head_dim = key.size(3);
  SketchAppendParams params;
  params.sketch = check_sketch(op, {batch, heads, head_dim}, codes, ranges, key, "key");
  params.lengths = check_sketch_lengths(op, params.sketch, batch, lengths, key, "key");
  params.sketch.lengths = params.lengths;
  check_same_device(op, "open_keys", open_keys, key, "key");
  check_shape(op, "open_keys", open_keys, {batch, heads, kSketchGroup, head_dim});
  if (open_keys.scalar_type() != key.scalar_type()) {
    fail_expected(op, text("open_keys of key's dtype ", dtype_of(key)), dtype_of(open_keys));
  }
  check_contiguous(op, "open_keys", open_keys);
  std::vector<NamedTensor> others = {{"key", &key}};
  for (const auto& [name, tensor] :
       {NamedTensor("codes", &codes), NamedTensor("ranges", &ranges),
        NamedTensor("open_keys", &open_keys), NamedTensor("lengths", &lengths)}) {
    check_no_overlap(op, name, *tensor, others);
    others.push_back({name, tensor});
  }
  params.key = view_of(key);
  params.open_keys = open_keys.mutable_data_ptr();
  params.batch = static_cast<int32_t>(batch);
  params.tokens = check_at_least(op, "length", key.size(2), 0);
  params.dtype = dtype_code(key);
  if (key.numel() == 0) return;
  auto guard = backend().enter(key.get_device_index());
  params.device = key.get_device_index();
  params.stream = backend().stream(params.device);
  check_status(op, backend().tools().append_to_sketch(params));
}

void sketch_pages(const Tensor& key_cache, const Tensor& slots, Tensor codes, Tensor ranges,
                  Tensor lengths, MaybeTensor key_scale) {
  const std::string op = "sketch_pages";
  check_sketched_keys(op, "key_cache", key_cache, "(pages, page_size, heads, head_dim)", true);
  const int64_t page_size = key_cache.size(1);
  check_page_size(op, "key_cache", page_size);
  SketchPagesParams params;
  params.sketch =
      check_sketch(op, {key_cache.size(0), key_cache.size(2), key_cache.size(3), page_size}, codes,
                   ranges, key_cache, "key_cache");
  params.lengths =
      check_sketch_lengths(op, params.sketch, key_cache.size(0), lengths, key_cache, "key_cache");
  check_same_device(op, "slots", slots, key_cache, "key_cache");
  check_dtype(op, "slots", slots, ScalarType::Long, "int64");
  if (slots.dim() != 1) fail_expected(op, "slots of shape (slots)", shape_of(slots));
  params.scale = check_cache_scale(op, "key_scale", key_scale, key_cache, "key_cache");
  std::vector<NamedTensor> others = {{"key_cache", &key_cache}, {"slots", &slots}};
  if (key_scale) others.push_back({"key_scale", &*key_scale});
  for (const auto& [name, tensor] : {NamedTensor("codes", &codes), NamedTensor("ranges", &ranges),
                                     NamedTensor("lengths", &lengths)}) {
    check_no_overlap(op, name, *tensor, others);
    others.push_back({name, tensor});
  }
  params.cache = {const_cast<void*>(key_cache.const_data_ptr()), key_cache.stride(0),
                  key_cache.stride(2), key_cache.stride(1)};
  params.num_slots = slots.numel();
  params.pages = key_cache.size(0);
  params.dtype = dtype_code(ranges);
  params.float8 = is_float8(key_cache);
  if (params.num_slots == 0 || key_cache.numel() == 0) return;
  auto guard = backend().enter(key_cache.get_device_index());
  Tensor listed = torch::stable::contiguous(slots);
  params.slots = static_cast<const int64_t*>(listed.const_data_ptr());
  params.device = key_cache.get_device_index();
  params.stream = backend().stream(params.device);
  check_status(op, backend().tools().sketch_pages(params));
}

}  // namespace sparse_attn

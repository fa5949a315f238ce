// Checks of what says which sequences a call has: shapes and dtypes, and contents where the host
// sees them (sequence_contents.h).
#include "sequence_arguments.h"

#include <algorithm>

#include "allocate.h"
#include "checks.h"
#include "sequence_contents.h"

namespace sparse_attn {
namespace {

/// Packed rows (tokens, heads, head_dim) as (1, heads, tokens, head_dim).
Tensor unpacked(const std::string& op, const char* name, const Tensor& tensor) {
  if (tensor.dim() != 3) {
    fail_expected(op, text(name, " of shape (tokens, heads, head_dim)"), shape_of(tensor));
  }
  return torch::stable::unsqueeze(torch::stable::transpose(tensor, 0, 1), 0);
}

/// A cache (pages, page_size, heads, head_dim) as (pages, heads, page_size, head_dim).
Tensor turned(const std::string& op, const char* name, const Tensor& cache) {
  if (cache.dim() != 4) {
    fail_expected(op, text(name, " of shape (pages, page_size, heads, head_dim)"), shape_of(cache));
  }
  check_page_size(op, name, cache.size(1));
  return torch::stable::transpose(cache, 1, 2);
}

/// Keys with query's head_dim, and values with the tokens and heads of the keys.
void check_rows(const std::string& op, const char* const* names, const Tensor& query,
                const Tensor& key, const MaybeTensor& value) {
  const int64_t last = key.dim() - 1;
  const int64_t head_dim = query.dim() > 0 ? query.size(query.dim() - 1) : 0;
  if (key.size(last) != head_dim) {
    const char* sizes = last == 2 ? "(tokens, heads, " : "(pages, page_size, heads, ";
    fail_expected(op, text(names[0], " of shape ", sizes, head_dim, ") as query has it"),
                  shape_of(key));
  }
  if (!value) return;
  const int64_t columns = value->size(last);
  if (last == 2) return check_shape(op, names[1], *value, {key.size(0), key.size(1), columns});
  check_shape(op, names[1], *value, {key.size(0), key.size(1), key.size(2), columns});
}

/// An int32 tensor of `size` numbers on query's device.
const int32_t* check_numbers(const std::string& op, const char* name, const Tensor& numbers,
                             const Tensor& query, int64_t size) {
  check_same_device(op, name, numbers, query);
  check_dtype(op, name, numbers, ScalarType::Int, "int32");
  if (numbers.dim() == 0 && name == std::string("query_offset")) {
    fail_expected(op, text(name, " of shape ", shape_text({size})),
                  shape_of(numbers) + "; one offset for all batch entries is an int");
  }
  check_shape(op, name, numbers, {size});
  check_contiguous(op, name, numbers);
  return static_cast<const int32_t*>(numbers.const_data_ptr());
}

int32_t check_bound(const std::string& op, const char* name, const MaybeInt& bound, int64_t most) {
  if (!bound) fail_expected(op, text(name, " beside cu_seq_q"), "None");
  return static_cast<int32_t>(std::min<int64_t>(check_at_least(op, name, *bound, 0), most));
}

ScaleView check_scales(const std::string& op, const char* name, const MaybeTensor& scale,
                       const Problem& problem, const CallArguments& args) {
  ScaleView view;
  if (!scale) return view;
  if (!is_float8(*args.key)) {
    fail_expected(op, text(name, " beside keys of dtype float8_e4m3fn"), dtype_of(*args.key));
  }
  check_same_device(op, name, *scale, *args.query);
  check_dtype(op, name, *scale, ScalarType::Float, "float32");
  const bool by_head = has_shape(*scale, {problem.heads_kv});
  const bool by_entry = has_shape(*scale, {problem.batch, problem.heads_kv});
  if (scale->dim() != 0 && !by_head && !by_entry) {
    fail_expected(op,
                  text(name, " of shape (), (", problem.heads_kv, ") or (", problem.batch, ", ",
                       problem.heads_kv, ")"),
                  shape_of(*scale));
  }
  check_scales_on_host(op, name, *scale);
  view.data = static_cast<const float*>(scale->const_data_ptr());
  if (by_head) view.stride_h = scale->stride(0);
  if (by_entry) {
    view.stride_b = scale->stride(0);
    view.stride_h = scale->stride(1);
  }
  return view;
}

/// Checks the table of pages, where there is one, and fills what tells where they are.
void check_table(const std::string& op, const Problem& problem, const CallArguments& args,
                 KeySource* keys) {
  if (!args.block_table) return;
  const Tensor& table = *args.block_table;
  check_same_device(op, "block_table", table, *args.query);
  check_dtype(op, "block_table", table, ScalarType::Int, "int32");
  check_shape(op, "block_table", table, {problem.batch, table.size(1)});
  check_last_contiguous(op, "block_table", table);
  keys->table = static_cast<const int32_t*>(table.const_data_ptr());
  keys->table_stride = table.stride(0);
  keys->table_pages = static_cast<int32_t>(std::min<int64_t>(table.size(1), kMaxLength));
  keys->page_size = static_cast<int32_t>(args.key->size(2));
  keys->num_pages = static_cast<int32_t>(std::min<int64_t>(args.key->size(0), kMaxLength));
  check_pages_on_host(op, problem, *keys, args);
}

}  // namespace

void view_sequences(const std::string& op, Holding holding, CallArguments* args) {
  if (holding == Holding::kTensors) return;
  const Tensor query = *args->query;  // shapes are compared as the caller has them
  const MaybeTensor out = args->out;
  if (args->cu_seq_q) {
    args->query = unpacked(op, "query", *args->query);
    if (args->cu_seq_q->dim() != 1 || args->cu_seq_q->size(0) < 1) {
      fail_expected(op, "cu_seq_q of shape (batch + 1)", shape_of(*args->cu_seq_q));
    }
    if (args->out) args->out = unpacked(op, "out", *args->out);
    if (args->lse) {
      if (args->lse->dim() != 2) {
        fail_expected(op, "lse of shape (heads, tokens)", shape_of(*args->lse));
      }
      args->lse = torch::stable::unsqueeze(*args->lse, 0);
    }
  } else if (args->max_q) {
    fail_expected(op, "max_q beside cu_seq_q alone", "no cu_seq_q");
  }
  const Tensor key = *args->key;
  const MaybeTensor value = args->value;
  const bool packed = holding == Holding::kPacked;
  const char* names[] = {packed ? "key" : "key_cache", packed ? "value" : "value_cache"};
  args->key = packed ? unpacked(op, names[0], key) : turned(op, names[0], key);
  if (value) args->value = packed ? unpacked(op, names[1], *value) : turned(op, names[1], *value);
  check_rows(op, names, query, key, value);
  if (args->cu_seq_q && out && value) {
    check_shape(op, "out", *out, {query.size(0), query.size(1), value->size(value->dim() - 1)});
  }
  if (!packed) {
    if (args->block_table->dim() != 2) {
      fail_expected(op, "block_table of shape (batch, pages of a sequence)",
                    shape_of(*args->block_table));
    }
  }
  if (args->attn_mask) fail_not_served(op, "attn_mask with packed or paged sequences");
  if (args->key_bounds) fail_not_served(op, "key_bounds with packed or paged sequences");
}

Tensor view_of_output(bool packed, const Tensor& output) {
  if (!packed) return output;
  if (output.dim() == 2) return torch::stable::unsqueeze(output, 0);
  return torch::stable::unsqueeze(torch::stable::transpose(output, 0, 1), 0);
}

Problem problem_of(const std::string& op, const CallArguments& args) {
  const Tensor& query = *args.query;
  const Tensor& key = *args.key;
  const int64_t batch = args.cu_seq_q ? args.cu_seq_q->size(0) - 1 : query.size(0);
  const int64_t heads = query.size(1);
  // So that int32 numbers them; entries and heads may be broadcast, which takes no memory.
  if (batch > kMaxLength || heads > kMaxLength || batch * heads > kMaxLength) {
    fail_expected(op, text("up to ", kMaxLength, " query heads in all batch entries"),
                  text(batch, " times ", heads));
  }
  Problem problem;
  problem.batch = static_cast<int32_t>(batch);
  problem.heads_q = static_cast<int32_t>(heads);
  problem.heads_kv = static_cast<int32_t>(key.size(1));
  problem.seq_q = static_cast<int32_t>(query.size(2));
  if (args.cu_seq_q) problem.seq_q = check_bound(op, "max_q", args.max_q, problem.seq_q);
  problem.seq_kv = static_cast<int32_t>(key.size(2));
  if (args.cu_seq_k) problem.seq_kv = check_bound(op, "max_k", args.max_k, problem.seq_kv);
  if (args.block_table) {
    const int64_t capacity = args.block_table->size(1) * key.size(2);
    problem.seq_kv = static_cast<int32_t>(std::min<int64_t>(capacity, kMaxLength));
    if (key.size(0) == 0) problem.seq_kv = 0;
  }
  problem.head_dim = static_cast<int32_t>(query.size(3));
  problem.value_dim = args.value ? static_cast<int32_t>(args.value->size(3)) : problem.head_dim;
  problem.dtype = dtype_code(query);
  return problem;
}

Sequences check_sequences(const std::string& op, const Problem& problem, const CallArguments& args,
                          MaybeTensor* offsets) {
  const Tensor& query = *args.query;
  Sequences sequences;
  sequences.rows = problem.seq_q;
  sequences.keys = problem.seq_kv;
  sequences.packed_rows = static_cast<int32_t>(query.size(2));
  sequences.packed_keys = static_cast<int32_t>(args.key->size(2));
  auto numbers = [&](const char* name, const MaybeTensor& tensor, int64_t size) {
    return tensor ? check_numbers(op, name, *tensor, query, size) : nullptr;
  };
  sequences.first_rows = numbers("cu_seq_q", args.cu_seq_q, int64_t{problem.batch} + 1);
  sequences.first_keys = numbers("cu_seq_k", args.cu_seq_k, int64_t{problem.batch} + 1);
  sequences.used_keys = numbers("seqused_k", args.seqused_k, problem.batch);
  sequences.key_origins = numbers("key_origin", args.key_origin, problem.batch);
  sequences.query_offsets = numbers("query_offset", args.query_offsets, problem.batch);
  check_lengths_on_host(op, problem, sequences, args);
  const int64_t limit = kMaxLength;
  const int64_t offset = args.query_offset.value_or(lower_right(problem.seq_q, problem.seq_kv));
  sequences.query_offset = static_cast<int32_t>(std::max(-limit, std::min(limit, offset)));
  if (!args.query_offset) return sequences;
  if (args.query_offsets) fail_expected(op, "query_offset as an int or as a tensor", "both");
  if (!sequences.same_lengths()) {
    // Where lengths are on the device an offset that no tensor gives follows from them.
    *offsets = empty(query, ScalarType::Int, {problem.batch});
    torch::stable::fill_(**offsets, sequences.query_offset);
    sequences.query_offsets = static_cast<const int32_t*>((*offsets)->const_data_ptr());
  }
  return sequences;
}

KeySource check_keys(const std::string& op, const Problem& problem, const CallArguments& args) {
  KeySource keys;
  keys.key = view_of(*args.key);
  if (args.value) keys.value = view_of(*args.value);
  keys.dtype = is_float8(*args.key) ? Dtype::kFloat8 : problem.dtype;
  keys.key_scale = check_scales(op, "key_scale", args.key_scale, problem, args);
  keys.value_scale = check_scales(op, "value_scale", args.value_scale, problem, args);
  if (args.cu_seq_k) keys.key.stride_b = keys.value.stride_b = 0;
  check_table(op, problem, args, &keys);
  return keys;
}

}  // namespace sparse_attn

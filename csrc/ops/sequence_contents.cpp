// Checks of starts, lengths, pages and scales, entry by entry where they lie on the CPU.
#include "sequence_contents.h"

#include <algorithm>
#include <cmath>

#include "checks.h"

namespace sparse_attn {
namespace {

/// The longest run of `starts`, which rise from 0 or above up to `size`.
int32_t check_starts(const std::string& op, const char* name, const int32_t* starts, int64_t batch,
                     int32_t size) {
  int32_t longest = 0;
  for (int64_t b = 0; b <= batch; ++b) {
    const int32_t least = b == 0 ? 0 : starts[b - 1];
    if (starts[b] < least) {
      fail_expected(
          op, text(name, "[", b, "] of at least ", least, b == 0 ? "" : ", the number before it"),
          std::to_string(starts[b]));
    }
    if (starts[b] > size) {
      fail_expected(op, text(name, " up to ", size, ", the tokens that there are"),
                    std::to_string(starts[b]));
    }
    if (b > 0) longest = std::max(longest, starts[b] - least);
  }
  return longest;
}

void check_longest(const std::string& op, const char* name, const MaybeInt& bound, int32_t longest,
                   const char* what) {
  if (bound && *bound < longest) {
    fail_expected(op, text(name, " of at least ", longest, ", the longest sequence's ", what),
                  std::to_string(*bound));
  }
}

void check_blocks(const std::string& op, const char* of, int64_t blocks, int32_t block,
                  int32_t longest) {
  const int32_t wanted = ceil_div(longest, block);
  if (blocks < wanted) {
    fail_expected(op,
                  text("a layout of at least ", wanted, " ", of,
                       " blocks for the longest sequence's ", longest, " in blocks of ", block),
                  std::to_string(blocks));
  }
}

}  // namespace

void check_lengths_on_host(const std::string& op, const Problem& problem,
                           const Sequences& sequences, const CallArguments& args) {
  if (!args.query->is_cpu()) return;
  const int64_t batch = problem.batch;
  if (sequences.first_rows != nullptr) {
    const int32_t longest =
        check_starts(op, "cu_seq_q", sequences.first_rows, batch, sequences.packed_rows);
    check_longest(op, "max_q", args.max_q, longest, "queries");
  }
  int32_t longest = 0;
  if (sequences.first_keys != nullptr) {
    longest = check_starts(op, "cu_seq_k", sequences.first_keys, batch, sequences.packed_keys);
  }
  if (sequences.used_keys != nullptr) {
    longest = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int32_t* first = sequences.first_keys;
      const int32_t room = first == nullptr ? sequences.keys : first[b + 1] - first[b];
      const int32_t used = sequences.used_keys[b];
      if (used < 0 || used > room) {
        fail_expected(op, text("seqused_k[", b, "] from 0 to ", room, ", the keys it has room for"),
                      std::to_string(used));
      }
      longest = std::max(longest, used);
    }
  }
  check_longest(op, "max_k", args.max_k, longest, "keys");
}

void check_blocks_on_host(const std::string& op, const Problem& problem, const Sequences& sequences,
                          const BlockList& list, const CallArguments& args) {
  if (!args.query->is_cpu()) return;
  int32_t queries = 0, keys = 0;
  for (int32_t b = 0; b < problem.batch; ++b) {
    const Sequence sequence = sequences.of(b);
    queries = std::max(queries, sequence.rows);
    keys = std::max(keys, sequence.keys);
  }
  check_blocks(op, "key", args.num_kv_blocks, list.block_kv, keys);
  if (args.counts && args.counts->dim() == 3) {
    check_blocks(op, "query", args.counts->size(2), list.block_q, queries);
  }
}

void check_pages_on_host(const std::string& op, const Problem& problem, const KeySource& keys,
                         const CallArguments& args) {
  if (!args.query->is_cpu() || !args.seqused_k) return;
  const auto* used = static_cast<const int32_t*>(args.seqused_k->const_data_ptr());
  for (int64_t b = 0; b < problem.batch; ++b) {
    const int64_t pages = (int64_t{used[b]} + keys.page_size - 1) / keys.page_size;
    for (int64_t i = 0; i < pages; ++i) {
      const int32_t page = keys.table[b * keys.table_stride + i];
      if (page < 0 || page >= keys.num_pages) {
        fail_expected(op,
                      text("block_table[", b, ", ", i, "] to name one of the ", keys.num_pages,
                           " pages of the cache"),
                      std::to_string(page));
      }
    }
  }
}

void check_scales_on_host(const std::string& op, const char* name, const Tensor& scale) {
  if (!scale.is_cpu()) return;
  const Tensor all = torch::stable::contiguous(scale);
  const auto* values = static_cast<const float*>(all.const_data_ptr());
  for (int64_t i = 0; i < all.numel(); ++i) {
    if (!(values[i] > 0.0f && std::isfinite(values[i]))) {
      fail_expected(op, text(name, " above 0 and finite"), text(values[i]));
    }
  }
}

ScaleView check_cache_scale(const std::string& op, const char* name, const MaybeTensor& scale,
                            const Tensor& cache, const char* like) {
  ScaleView view;
  if (!scale) return view;
  if (!is_float8(cache)) {
    fail_expected(op, text(name, " with caches of float8_e4m3fn alone"), dtype_of(cache));
  }
  check_same_device(op, name, *scale, cache, like);
  check_dtype(op, name, *scale, ScalarType::Float, "float32");
  if (scale->dim() != 0 && !has_shape(*scale, {cache.size(2)})) {
    fail_expected(op, text(name, " of shape () or (", cache.size(2), ")"), shape_of(*scale));
  }
  check_scales_on_host(op, name, *scale);
  view.data = static_cast<const float*>(scale->const_data_ptr());
  view.stride_h = scale->dim() == 0 ? 0 : scale->stride(0);
  return view;
}

}  // namespace sparse_attn

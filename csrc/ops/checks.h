// Small checks on tensors and numbers, each with its sentence.
#pragma once

#include <initializer_list>

#include "arguments.h"
#include "error.h"

namespace sparse_attn {

using torch::headeronly::ScalarType;

inline bool is_attention_dtype(const Tensor& tensor) {
  ScalarType type = tensor.scalar_type();
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline bool is_float8(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float8_e4m3fn;
}

inline Dtype dtype_code(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      return Dtype::kFloat32;
  }
}

inline bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t d = 0;
  for (int64_t size : sizes) {
    if (tensor.size(d++) != size) return false;
  }
  return true;
}

inline std::string shape_text(std::initializer_list<int64_t> sizes) {
  std::string result = "(";
  for (int64_t size : sizes) result += (result.size() > 1 ? ", " : "") + std::to_string(size);
  return result + ")";
}

inline void check_shape(const std::string& op, const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> sizes) {
  if (!has_shape(tensor, sizes)) {
    fail_expected(op, text(name, " of shape ", shape_text(sizes)), shape_of(tensor));
  }
}

inline std::string device_of(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu"
                         : text(tensor.is_cuda() ? "cuda:" : "device ", tensor.get_device_index());
}

inline bool on_same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() &&
         (a.is_cpu() || a.get_device_index() == b.get_device_index());
}

inline void check_same_device(const std::string& op, const char* name, const Tensor& tensor,
                              const Tensor& first, const char* first_name = "query") {
  if (!on_same_device(tensor, first)) {
    fail_expected(op, text(name, " on ", first_name, "'s device ", device_of(first)),
                  device_of(tensor));
  }
}

inline void check_dtype(const std::string& op, const char* name, const Tensor& tensor,
                        ScalarType type, const char* type_name) {
  if (tensor.scalar_type() != type) {
    fail_expected(op, text(name, " of dtype ", type_name), dtype_of(tensor));
  }
}

/// Rows lie in one piece. `copies` says whether a copy would serve as well.
inline void check_last_contiguous(const std::string& op, const char* name, const Tensor& tensor,
                                  bool copies = false) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.numel() > 0 && tensor.size(last) > 1 && tensor.stride(last) != 1) {
    const std::string hint = copies ? text("; ", name, ".contiguous() has one") : "";
    fail_expected(op, text(name, " with a contiguous last dimension"),
                  text("stride ", tensor.stride(last), hint));
  }
}

/// All elements lie in one piece, in order.
inline void check_contiguous(const std::string& op, const char* name, const Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  std::string strides;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    strides += (d ? ", " : "") + std::to_string(tensor.stride(d));
  }
  fail_expected(op, text(name, " to be contiguous"), text("strides (", strides, ")"));
}

/// A count or size argument: at least `least`; numbers beyond 32 bits are simply large.
inline int32_t check_at_least(const std::string& op, const char* name, int64_t value,
                              int64_t least) {
  if (value < least) fail_expected(op, text(name, " of at least ", least), std::to_string(value));
  return static_cast<int32_t>(value > kUnlimited ? kUnlimited : value);
}

/// Rows or keys of a block.
inline int32_t check_block(const std::string& op, const char* name, int64_t block) {
  if (block < 16 || block % 16 != 0 || block >= kUnlimited) {
    fail_expected(op, text(name, " that is a multiple of 16"), std::to_string(block));
  }
  return static_cast<int32_t>(block);
}

inline void check_head_dim(const std::string& op, const char* name, int64_t head_dim) {
  if (head_dim < 8 || head_dim % 8 != 0 || head_dim > kMaxHeadDim) {
    fail_expected(op, text(name, " with a head_dim that is a multiple of 8 up to ", kMaxHeadDim),
                  std::to_string(head_dim));
  }
}

/// Keys of a page.
inline void check_page_size(const std::string& op, const char* name, int64_t page_size) {
  constexpr int64_t kPageUnit = 16;
  if (page_size == 0 || page_size % kPageUnit != 0 || page_size > kMaxLength) {
    fail_expected(op, text(name, " with a page_size that is a multiple of ", kPageUnit),
                  std::to_string(page_size));
  }
}

/// The sizes that broadcast to `size`.
inline std::string one_or(int64_t size) { return size == 1 ? "1" : text("1 or ", size); }

/// The numbers of lists that a batch entry may have.
inline std::string heads_of_lists(int64_t heads_q, int64_t heads_kv) {
  if (heads_kv == 1 || heads_kv == heads_q) return one_or(heads_q);
  return text("1, ", heads_kv, " or ", heads_q);
}

}  // namespace sparse_attn

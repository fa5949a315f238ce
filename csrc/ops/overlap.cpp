// Exact for views of one buffer with equal strides (a fused projection's slices); otherwise two
// tensors overlap when their address ranges do.
#include "overlap.h"

#include <algorithm>

#include "error.h"

namespace sparse_attn {
namespace {

struct Dimension {
  int64_t stride, size_a, size_b;
};

/// Whether sum of stride * (index_a - index_b) over the dimensions from `d` on reaches `distance`.
/// Strides descend and nest, so that only two quotients are possible at each dimension.
bool reaches(const std::vector<Dimension>& dims, size_t d, int64_t distance) {
  if (d == dims.size()) return distance == 0;
  const Dimension& dim = dims[d];
  int64_t quotient = distance / dim.stride - (distance % dim.stride < 0);
  for (int64_t k : {quotient, quotient + 1}) {
    if (k > -dim.size_b && k < dim.size_a && reaches(dims, d + 1, distance - k * dim.stride)) {
      return true;
    }
  }
  return false;
}

std::pair<const char*, const char*> address_range(const Tensor& tensor) {
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

bool overlaps(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  auto range_a = address_range(a);
  auto range_b = address_range(b);
  if (range_a.second <= range_b.first || range_b.second <= range_a.first) return false;
  int64_t size = static_cast<int64_t>(a.element_size());
  int64_t bytes = range_b.first - range_a.first;
  if (a.dim() != b.dim() || a.element_size() != b.element_size() || bytes % size != 0) return true;
  std::vector<Dimension> dims;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) == 1 && b.size(d) == 1) continue;
    if (a.stride(d) != b.stride(d) || a.stride(d) <= 0) return true;
    dims.push_back({a.stride(d), a.size(d), b.size(d)});
  }
  std::sort(dims.begin(), dims.end(), [](Dimension x, Dimension y) { return x.stride > y.stride; });
  for (size_t d = 0; d + 1 < dims.size(); ++d) {
    int64_t inner = dims[d + 1].stride * std::max(dims[d + 1].size_a, dims[d + 1].size_b);
    if (inner > dims[d].stride) return true;
  }
  return reaches(dims, 0, bytes / size);
}

bool overlaps_itself(const Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.push_back({tensor.stride(d), tensor.size(d)});
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& dim : dims) {
    if (dim.first < extent) return true;
    extent = dim.first * dim.second;
  }
  return false;
}

}  // namespace

void check_no_overlap(const std::string& op, const char* name, const Tensor& out,
                      const std::vector<NamedTensor>& others) {
  if (out.numel() == 0) return;
  if (overlaps_itself(out)) {
    fail_expected(op, text(name, " without overlapping elements"), "overlapping strides");
  }
  for (const auto& other : others) {
    if (overlaps(out, *other.second)) {
      fail_expected(op, text(name, " that does not overlap ", other.first),
                    text("an overlapping ", name));
    }
  }
}

void check_no_overlap(const std::string& op, const char* name, const Tensor& out,
                      const CallArguments& args) {
  const std::pair<const char*, const MaybeTensor*> inputs[] = {
      {"query", &args.query},
      {"key", &args.key},
      {"value", &args.value},
      {"attn_mask", &args.attn_mask},
      {"key_bounds", &args.key_bounds},
      {"query_offset", &args.query_offsets},
      {"key_origin", &args.key_origin},
      {"sink_logits", &args.sink_logits},
      {"alibi_slopes", &args.alibi_slopes},
      {"key_scale", &args.key_scale},
      {"value_scale", &args.value_scale},
      {"cu_seq_q", &args.cu_seq_q},
      {"cu_seq_k", &args.cu_seq_k},
      {"seqused_k", &args.seqused_k},
      {"block_table", &args.block_table},
      {"counts", &args.counts},
      {"indices", &args.indices},
      {"partial", &args.partial},
      {"bits", &args.bits},
      {"scores", &args.scores},
      {"sketch_codes", &args.sketch_codes},
      {"sketch_ranges", &args.sketch_ranges},
      {"sketch_lengths", &args.sketch_lengths},
      {"global_tokens", &args.global_tokens},
      {"lse", &args.lse}};
  std::vector<NamedTensor> others;
  for (const auto& input : inputs) {
    if (input.second->has_value() && &**input.second != &out) {
      others.push_back({input.first, &**input.second});
    }
  }
  check_no_overlap(op, name, out, others);
}

}  // namespace sparse_attn

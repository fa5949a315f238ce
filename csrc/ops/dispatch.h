// From the dispatcher's stack to an engine. A library holds one Backend, the CPU's or CUDA's, and
// registers the boxed functions below for its dispatch key.
#pragma once

#include <torch/csrc/stable/library.h>

#include <memory>
#include <string>

#include "../engine.h"
#include "arguments.h"
#include "schema.h"

namespace sparse_attn {

/// The engines and tools of one device type.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const Engine& engine(const std::string& name) const = 0;
  virtual const Tools& tools() const = 0;
  /// Makes `device` current while the result lives.
  virtual std::shared_ptr<void> enter(int32_t device) const = 0;
  virtual void* stream(int32_t device) const = 0;
  virtual int32_t compute_capability(int32_t device) const = 0;  // 90 for 9.0
};

/// The library's backend, defined where it registers its kernels.
const Backend& backend();

using BoxedKernel = void (*)(StableIValue*, uint64_t, uint64_t);

/// The kernel of a form of attention op `index` (see schema.h).
BoxedKernel boxed_attention(int index, OpForm form);

void select_blocks_kernel(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
std::tuple<Tensor, Tensor> list_from_mask(const Tensor& mask);
std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a,
                                        const Tensor& out_b, const Tensor& lse_b);
void merge_states_out(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                      const Tensor& lse_b, Tensor out, Tensor lse);

void append_to_cache(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
                     const Tensor& slot_mapping, MaybeTensor key_scale, MaybeTensor value_scale);

void append_to_sketch(const Tensor& key, Tensor codes, Tensor ranges, Tensor open_keys,
                      Tensor lengths);
void sketch_pages(const Tensor& key_cache, const Tensor& slots, Tensor codes, Tensor ranges,
                  Tensor lengths, MaybeTensor key_scale);

/// Registers every kernel with a library of dispatch key CPU or CUDA.
void register_kernels(torch::stable::detail::StableLibrary& library);

/// Scratch of at least `bytes`, and its 256-byte aligned address; null for none.
struct Scratch {
  MaybeTensor owner;
  void* address = nullptr;
};
Scratch allocate_scratch(int64_t bytes, const Tensor& like);

/// int32 tensor on the device of `like`.
Tensor empty_int32(std::initializer_list<int64_t> sizes, const Tensor& like);

/// Raises what an engine or tool reported.
void check_status(const std::string& op, const Status& status);

/// Lists the best blocks of a checked selection.
std::tuple<Tensor, Tensor> run_selection(const std::string& op, SelectParams params,
                                         const Tensor& query);

}  // namespace sparse_attn

// What the CPU engines take from torch: its thread pool and its BLAS. Beside ops/ the only file
// that sees torch, through the stable C interface alone; nothing here throws.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include <atomic>
#include <cstdint>

namespace sparse_attn::cpu {

/// Threads of torch's pool.
inline int32_t num_workers() {
  uint32_t threads = 1;
  if (torch_get_num_threads(&threads) != 0 || threads < 1) return 1;
  return static_cast<int32_t>(threads);
}

/// Calls work(worker, item) for every item, in order of need; worker < workers. All workers start
/// even for one item: inside the pool BLAS runs on one thread, so a product's bits never depend on
/// how many items there are. `work` must not throw.
template <class Work>
bool for_each_item(int32_t workers, int64_t items, const Work& work) {
  if (items == 0) return true;
  struct Context {
    const Work* work;
    int64_t items;
    std::atomic<int64_t> next;
  } context = {&work, items, {0}};
  auto run = [](int64_t begin, int64_t end, void* data) {
    auto* shared = static_cast<Context*>(data);
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t item; (item = shared->next.fetch_add(1)) < shared->items;) {
        (*shared->work)(static_cast<int32_t>(worker), item);
      }
    }
  };
  return torch_parallel_for(0, workers, 1, run, &context) == 0;
}

/// A float32 matrix in memory that someone else owns, as torch sees it. One stride is 1.
class Matrix {
 public:
  Matrix(const float* data, int64_t rows, int64_t columns, int64_t stride)
      : Matrix(data, rows, columns, stride, 1) {}
  /// The transpose of a [rows, columns] matrix.
  static Matrix transposed(const float* data, int64_t rows, int64_t columns, int64_t stride) {
    return Matrix(data, columns, rows, 1, stride);
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;
  ~Matrix() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle handle() const { return handle_; }

 private:
  Matrix(const float* data, int64_t rows, int64_t columns, int64_t row_stride,
         int64_t column_stride) {
    const int64_t sizes[2] = {rows, columns};
    const int64_t strides[2] = {row_stride, column_stride};
    if (aoti_torch_create_tensor_from_blob(const_cast<float*>(data), 2, sizes, strides, 0,
                                           aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(),
                                           0, &handle_) != 0) {
      handle_ = nullptr;
    }
  }
  AtenTensorHandle handle_ = nullptr;
};

/// c = a b, or c += a b. Calls below the dispatcher: no autograd, no modes, about 1 us.
inline bool multiply(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate) {
  if (a.handle() == nullptr || b.handle() == nullptr || c.handle() == nullptr) return false;
  if (!accumulate) return aoti_torch_cpu_mm_out(c.handle(), a.handle(), b.handle()) == 0;
  return aoti_torch_cpu_addmm_out(c.handle(), c.handle(), a.handle(), b.handle(), 1.0, 1.0) == 0;
}

}  // namespace sparse_attn::cpu

// The portable engine's choice of tiles for the shared memory of every device: what is chosen fits,
// and the dense kernels are taken wherever they do.
#include "cuda/portable/tile.h"

#include "check.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::portable;

namespace {

void test_choice(int32_t limit, int32_t head_dim) {
  std::string text = "limit " + std::to_string(limit) + ", head dim " + std::to_string(head_dim);
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16}) {
    for (bool dense_suffices : {false, true}) {
      KernelKind kind = choose_kernel(dtype, dense_suffices, head_dim, limit);
      TileShape shape = tile_shape(kind, head_dim);
      CHECK(shape.fits(limit), text);
      CHECK(shape.head_dim >= head_dim, text);
      CHECK((kind == KernelKind::kFloat) == (dtype == Dtype::kFloat32), text);
      CHECK(kind != KernelKind::kDense || dense_suffices, text);
    }
  }
  bool dense = choose_kernel(Dtype::kFloat16, true, head_dim, limit) == KernelKind::kDense;
  CHECK(dense == tile_shape(KernelKind::kDense, head_dim).fits(limit), text);
}

/// The tuned tiles where they belong: head dim 128 everywhere from 99 KB, 256 from 163 KB.
void test_tuned_tiles() {
  auto choice = [](int32_t head_dim, int32_t kilobytes) {
    return choose_kernel(Dtype::kBFloat16, true, head_dim, kilobytes << 10);
  };
  CHECK(choice(128, 99) == KernelKind::kDense, "head dim 128");
  CHECK(choice(256, 163) == KernelKind::kDense, "head dim 256");
  CHECK(choice(256, 99) == KernelKind::kGeneral, "head dim 256 in little memory");
}

/// Two thread blocks of the dense kernels share a multiprocessor with 164 KB, each with the 1 KB
/// that the system takes.
void test_two_blocks_a_multiprocessor() {
  for (int32_t head_dim : {64, 96, 128}) {
    int32_t bytes = tile_shape(KernelKind::kDense, head_dim).smem_bytes() + (1 << 10);
    CHECK(2 * bytes <= 164 << 10, "head dim " + std::to_string(head_dim));
  }
}

}  // namespace

int main() {
  for (int32_t kilobytes : {64, 99, 163, 227}) {
    for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      test_choice(kilobytes << 10, head_dim);
    }
  }
  test_tuned_tiles();
  test_two_blocks_a_multiprocessor();
  return check::summary();
}

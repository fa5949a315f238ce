// The portable engine's choice of tiles for the shared memory of every device: what is chosen fits,
// and the dense kernels are taken wherever they do.
#include "cuda/portable/tile.h"

#include <cstdio>
#include <initializer_list>

using namespace sparse_attn;
using namespace sparse_attn::cuda::portable;

namespace {

int failures = 0;

void expect(bool holds, const char* what, int32_t limit, int32_t head_dim) {
  if (holds) return;
  std::printf("%s: limit %d, head dim %d\n", what, limit, head_dim);
  ++failures;
}

}  // namespace

int main() {
  for (int32_t kilobytes : {64, 99, 163, 227}) {
    int32_t limit = kilobytes << 10;
    for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      for (Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16}) {
        for (bool dense_suffices : {false, true}) {
          KernelKind kind = choose_kernel(dtype, dense_suffices, head_dim, limit);
          TileShape shape = tile_shape(kind, head_dim);
          expect(shape.fits(limit), "the chosen tile does not fit", limit, head_dim);
          expect(shape.head_dim >= head_dim, "the tile is too narrow", limit, head_dim);
          expect((kind == KernelKind::kFloat) == (dtype == Dtype::kFloat32), "wrong type", limit,
                 head_dim);
          expect(kind != KernelKind::kDense || dense_suffices, "dense does not suffice", limit,
                 head_dim);
        }
      }
      bool dense = choose_kernel(Dtype::kFloat16, true, head_dim, limit) == KernelKind::kDense;
      expect(dense == tile_shape(KernelKind::kDense, head_dim).fits(limit), "dense stood aside",
             limit, head_dim);
    }
  }
  bool everywhere = choose_kernel(Dtype::kBFloat16, true, 128, 99 << 10) == KernelKind::kDense &&
                    choose_kernel(Dtype::kBFloat16, true, 256, 163 << 10) == KernelKind::kDense &&
                    choose_kernel(Dtype::kBFloat16, true, 256, 99 << 10) == KernelKind::kGeneral;
  expect(everywhere, "the tuned tiles are not where they belong", 0, 0);
  return failures == 0 ? 0 : 1;
}

// The portable engine's choice of tiles for the shared memory of every device: what is chosen fits,
// and the dense kernels are taken wherever they do.
#include "cuda/portable/tile.h"

#include "check.h"

using namespace sparse_attn;
using namespace sparse_attn::cuda::portable;

namespace {

constexpr KernelKind kWanted[] = {KernelKind::kDense, KernelKind::kDense64, KernelKind::kDense32,
                                  KernelKind::kDense16, KernelKind::kGeneral};

void test_choice(int32_t limit, int32_t head_dim) {
  std::string text = "limit " + std::to_string(limit) + ", head dim " + std::to_string(head_dim);
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16}) {
    for (KernelKind wanted : kWanted) {
      if (is_compiled(wanted, head_dim)) {
        KernelKind kind = choose_kernel(dtype, wanted, head_dim, limit);
        TileShape shape = tile_shape(kind, head_dim);
        CHECK(shape.fits(limit), text);
        CHECK(shape.head_dim >= head_dim, text);
        CHECK((kind == KernelKind::kFloat) == (dtype == Dtype::kFloat32), text);
        CHECK(!is_dense(kind) || kind == wanted, text);
      }
    }
  }
  CHECK(!topk_fits(head_dim, limit) || tile_shape(KernelKind::kTop, head_dim).fits(limit), text);
  bool dense =
      choose_kernel(Dtype::kFloat16, KernelKind::kDense, head_dim, limit) == KernelKind::kDense;
  CHECK(dense == tile_shape(KernelKind::kDense, head_dim).fits(limit), text);
}

/// A dense kernel takes whole blocks only, and computes no more rows than the general one.
void test_blocks(int32_t block_q, int32_t block_kv, int32_t head_dim) {
  std::string text = "blocks " + std::to_string(block_q) + " x " + std::to_string(block_kv) +
                     ", head dim " + std::to_string(head_dim);
  KernelKind kind = kernel_for_blocks(block_q, block_kv, head_dim);
  auto rows = [block_q](KernelKind kind) {
    int32_t tile = tile_shape(kind, 128).block_q;
    return (block_q + tile - 1) / tile * tile;
  };
  CHECK(block_kv % tile_shape(kind, head_dim).granule == 0, text);
  CHECK(rows(kind) <= rows(KernelKind::kGeneral), text);
  CHECK(is_compiled(kind, head_dim), text);
}

/// The tuned tiles where they belong: head dim 128 everywhere from 99 KB, 256 from 163 KB; lists by
/// the height of their query blocks.
void test_tuned_tiles() {
  auto choice = [](int32_t head_dim, int32_t kilobytes) {
    return choose_kernel(Dtype::kBFloat16, KernelKind::kDense, head_dim, kilobytes << 10);
  };
  CHECK(choice(128, 99) == KernelKind::kDense, "head dim 128");
  CHECK(choice(256, 163) == KernelKind::kDense, "head dim 256");
  CHECK(topk_fits(256, 163 << 10) && topk_fits(64, 99 << 10), "both passes of top-k");
  CHECK(!topk_fits(128, 99 << 10), "both passes of top-k at head dim 128 in little memory");
  CHECK(choice(256, 99) == KernelKind::kGeneral, "head dim 256 in little memory");
  CHECK(kernel_for_blocks(128, 64, 128) == KernelKind::kDense, "128 x 64");
  CHECK(kernel_for_blocks(64, 64, 128) == KernelKind::kDense64, "64 x 64");
  CHECK(kernel_for_blocks(64, 32, 128) == KernelKind::kGeneral, "64 x 32");
  CHECK(kernel_for_blocks(32, 64, 96) == KernelKind::kDense32, "32 x 64");
  CHECK(kernel_for_blocks(16, 16, 64) == KernelKind::kDense16, "16 x 16");
  CHECK(kernel_for_blocks(16, 16, 256) == KernelKind::kGeneral, "16 x 16 at head dim 256");
}

/// Two thread blocks of the dense kernels share a multiprocessor with 164 KB, each with the 1 KB
/// that the system takes.
void test_two_blocks_a_multiprocessor() {
  for (int32_t head_dim : {64, 96, 128}) {
    int32_t bytes = tile_shape(KernelKind::kDense, head_dim).smem_bytes() + (1 << 10);
    CHECK(2 * bytes <= 164 << 10, "head dim " + std::to_string(head_dim));
  }
}

/// Five thread blocks of lists of 32 rows share one with 228 KB, of which each takes whole lines.
void test_five_blocks_of_low_tiles() {
  constexpr int32_t kLine = 128;
  const int32_t bytes = tile_shape(KernelKind::kDense32, 128).smem_bytes();
  CHECK(5 * (ceil_div(bytes, kLine) * kLine + (1 << 10)) <= 228 << 10, std::to_string(bytes));
}

}  // namespace

int main() {
  for (int32_t kilobytes : {64, 99, 163, 227}) {
    for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      test_choice(kilobytes << 10, head_dim);
    }
  }
  for (int32_t block_q = 16; block_q <= 256; block_q += 16) {
    for (int32_t block_kv = 16; block_kv <= 256; block_kv += 16) {
      for (int32_t head_dim : {64, 96, 128, 256}) test_blocks(block_q, block_kv, head_dim);
    }
  }
  test_tuned_tiles();
  test_two_blocks_a_multiprocessor();
  test_five_blocks_of_low_tiles();
  return check::summary();
}

// Runs a layer that export.py has written, without Python: main <layer.pt2> <sparse_attn/_C.so>.
// Opening the library registers its ops with torch; a program for CUDA opens _C_cuda.so after it.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s layer.pt2 sparse_attn/_C.so\n", argv[0]);
    return 2;
  }
  if (dlopen(argv[2], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader layer(argv[1]);
  at::Tensor tokens = at::linspace(-1, 1, 2 * 200 * 64).reshape({2, 200, 64});
  at::Tensor out = layer.run({tokens})[0];
  std::printf("%.4f\n", out.sum().item<double>());
  return 0;
}

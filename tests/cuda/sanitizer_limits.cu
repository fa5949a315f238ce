// Right programs that compute-sanitizer is run on beside the tests: what a tool reports here, it
// does not understand. scripts/sanitizers.py builds it (sm_90a) and records what each tool says.
//   initcheck: a buffer filled by a bulk copy from shared memory, and one by plain stores, are
//   read. racecheck: a warp writes shared memory, one lane for all of them (or every lane for
//   itself) arrives on an mbarrier, another warp waits for it and reads.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

namespace {

constexpr int kThreads = 32;

__device__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__global__ void fills_by_bulk_copy(float* out) {
  __shared__ alignas(128) float tile[kThreads];
  tile[threadIdx.x] = static_cast<float>(threadIdx.x);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out),
                 "r"(smem_address(tile)), "r"(static_cast<int>(sizeof(tile)))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

__global__ void fills_by_stores(float* out) { out[threadIdx.x] = static_cast<float>(threadIdx.x); }

__global__ void reads_bulk_copied(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void reads_stored(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x]; }

/// Lanes of the first warp hand 32 numbers to the second, which reads them in reverse.
template <bool kEveryLane>
__device__ void hand_over(float* out) {
  __shared__ float tile[kThreads];
  __shared__ uint64_t full;
  const int lane = threadIdx.x % kThreads;
  const uint32_t barrier = smem_address(&full);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(kEveryLane ? kThreads : 1)
                 : "memory");
  }
  __syncthreads();
  if (threadIdx.x < kThreads) {
    tile[lane] = static_cast<float>(lane);
    __syncwarp();
    if (kEveryLane || lane == 0) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    }
  } else {
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(barrier)
          : "memory");
    }
    out[lane] = tile[kThreads - 1 - lane];
  }
}

__global__ void one_lane_arrives(float* out) { hand_over<false>(out); }

__global__ void every_lane_arrives(float* out) { hand_over<true>(out); }

bool holds(const float* device, bool reversed) {
  float host[kThreads];
  cudaMemcpy(host, device, sizeof(host), cudaMemcpyDeviceToHost);
  bool right = true;
  for (int i = 0; i < kThreads; ++i) right &= host[i] == (reversed ? kThreads - 1 - i : i);
  return right;
}

}  // namespace

int main() {
  float *filled, *out;
  bool right = true;
  cudaMalloc(&out, kThreads * sizeof(float));
  cudaMalloc(&filled, kThreads * sizeof(float));
  fills_by_bulk_copy<<<1, kThreads>>>(filled);
  reads_bulk_copied<<<1, kThreads>>>(filled, out);
  right &= holds(out, false);
  cudaFree(filled);
  cudaMalloc(&filled, kThreads * sizeof(float));
  fills_by_stores<<<1, kThreads>>>(filled);
  reads_stored<<<1, kThreads>>>(filled, out);
  right &= holds(out, false);
  one_lane_arrives<<<1, 2 * kThreads>>>(out);
  right &= holds(out, true);
  every_lane_arrives<<<1, 2 * kThreads>>>(out);
  right &= holds(out, true);
  right &= cudaDeviceSynchronize() == cudaSuccess;
  std::printf("%s\n", right ? "right" : "wrong");
  return right ? 0 : 1;
}

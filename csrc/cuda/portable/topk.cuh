// The threshold pass of token top-k: per row the k-th highest scale * q.k, by radix selection over
// histograms in shared memory. Each round walks the tiles again and fixes the next digits; a row is
// done as soon as its digit's keys are all kept. Exact ties go to the lower key, found by one more
// walk where there are any.
#pragma once

#include "topk_scores.cuh"
#include "transform.cuh"

namespace sparse_attn::cuda::portable {

/// Selection of one row.
struct RowSelection {
  uint32_t prefix;  // the digits found so far
  uint32_t wanted;  // place of the k-th key among those of the prefix
  bool active;
  Threshold threshold;
};

constexpr int kKeyBits = 32;

/// The threshold kernel's shared memory after the tiles.
template <int BLOCK_Q>
constexpr int32_t selection_bytes(int digit_bits) {
  return BLOCK_Q * (static_cast<int32_t>(sizeof(RowSelection)) + (4 << digit_bits));
}

/// A source's visit of all steps, with rS = scale * Q K^T joined with attn_mask.
template <typename Config, typename Function>
__device__ __forceinline__ void visit_scaled(const ScoreSource<Config>& source,
                                             const Function& function) {
  source.visit(topk::Stride{},
               [&](typename Config::ScoreFragment& rS, const typename Config::Step& step) {
                 scale_scores<Config>(rS, source.tile.score_scale());
                 join_mask<true, Config>(rS, source.tile, step);
                 function(rS, step);
               });
}

/// Moves a row one digit on; a whole warp calls it.
__device__ inline void advance(RowSelection& row, const uint32_t* histogram, int digit_bits,
                               int shift) {
  Digit digit = find_digit(histogram, 1 << digit_bits, row.wanted);
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  uint32_t prefix = row.prefix | digit.value << shift;
  if (!digit.found || digit.wanted == digit.count) {
    // Fewer keys than k, or the digit's keys are all kept: everything from the prefix on.
    row.threshold = {digit.found ? prefix - 1 : 0, -1};
    row.active = false;
  }
  row.prefix = prefix;
  row.wanted = digit.wanted;
}

/// A digit of the keys: bits [shift, end), and the mask of those above them.
struct DigitPlace {
  int shift;
  uint32_t high, digit_mask;

  /// The digit that ends at bit `end`; from 0 on down it is empty and `high` masks a whole key.
  __device__ static DigitPlace below(int end, int digit_bits) {
    end = imax(end, 0);
    int shift = imax(end - digit_bits, 0);
    return {shift, end == kKeyBits ? 0 : ~0u << end, (1u << (end - shift)) - 1};
  }
};

/// Counts the digits of the scores whose higher digits are those of their row.
template <typename Config>
__device__ __forceinline__ void count_digits(typename Config::ScoreFragment& rS,
                                             const DigitPlace& place, int digit_bits,
                                             const RowSelection* selections, uint32_t* histograms) {
  for_each_score<Config>(rS, [&](float score, int mt, int h, int) {
    int r = lane_row<Config>(mt, h);
    uint32_t key = ordered_key(score);
    if (score != -INFINITY && selections[r].active && (key & place.high) == selections[r].prefix) {
      atomicAdd(&histograms[(r << digit_bits) + (key >> place.shift & place.digit_mask)], 1u);
    }
  });
}

/// Finds the last kept key of the rows that are still active, whose prefix is the threshold itself,
/// where it is in this tile; `seen` counts the ties of the tiles before.
template <typename Config>
__device__ __forceinline__ void find_last_tie(typename Config::ScoreFragment& rS,
                                              const QueryTile<Config>& tile,
                                              const typename Config::Step& step,
                                              RowSelection* selections,
                                              uint32_t (&seen)[Config::MT][2]) {
  static_assert(Config::BLOCK_KV <= 64, "a tile's ties fit 64 bits");
  uint64_t ties[Config::MT][2] = {};
  for_each_score<Config>(rS, [&](float score, int mt, int h, int k) {
    bool tie =
        score != -INFINITY && ordered_key(score) == selections[lane_row<Config>(mt, h)].prefix;
    if (tie) ties[mt][h] |= uint64_t{1} << lane_column(k);
  });
#pragma unroll
  for (int row = 0; row < 2 * Config::MT; ++row) {
    uint64_t& bits = ties[row / 2][row % 2];
    bits |= __shfl_xor_sync(~0u, bits, 1);
    bits |= __shfl_xor_sync(~0u, bits, 2);
    RowSelection& selection = selections[lane_row<Config>(row / 2, row % 2)];
    uint32_t& before = seen[row / 2][row % 2];
    uint32_t count = __popcll(bits);
    if (threadIdx.x % 4 == 0 && selection.active && before < selection.wanted &&
        before + count >= selection.wanted) {
      for (uint32_t skip = selection.wanted - before - 1; skip > 0; --skip) bits &= bits - 1;
      selection.threshold = {selection.prefix, tile.key_position(step, __ffsll(bits) - 1)};
    }
    before += count;
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    threshold_kernel(const __grid_constant__ AttentionParams params,
                     const __grid_constant__ GridPlan plan, Threshold* thresholds, bool aligned,
                     int digit_bits) {
  constexpr TileShape kShape = Config::kShape;
  extern __shared__ __align__(128) char dynamic_smem[];
  char* smem = held_address(dynamic_smem);
  RowSelection* selections = reinterpret_cast<RowSelection*>(smem + kShape.smem_bytes());
  uint32_t* histograms = reinterpret_cast<uint32_t*>(selections + Config::BLOCK_Q);
  QueryTile<Config> tile(params, smem, aligned);
  if (!tile.find(plan)) return;
  const uint32_t ring =
      ptx::shared_address(smem) + (kShape.query_registers ? 0 : kShape.query_bytes());
  const uint32_t sQ = kShape.query_registers ? ring : ptx::shared_address(smem);
  tile.load_queries(sQ);
  ptx::cp_async_commit();
  for (int r = threadIdx.x; r < Config::BLOCK_Q; r += Config::kThreads) {
    selections[r] = {0, static_cast<uint32_t>(params.pattern.topk), r < tile.work.rows.size(), {}};
  }
  tile.prepare();
  ptx::cp_async_wait<0>();
  __syncthreads();
  typename Config::Products products;
  const int first_row = threadIdx.x / 32 * Config::kWarpRows;
  products.start(sQ + first_row * Config::kPitch);
  __syncthreads();
  const ScoreSource<Config> source = {tile, products, ring};

  bool active = true;
  uint32_t ties_seen[Config::MT][2] = {};
  for (int end = kKeyBits; active; end -= digit_bits) {
    const bool digits_left = end > 0;  // one walk's code for all: it is long
    const DigitPlace place = DigitPlace::below(end, digit_bits);
    for (int i = threadIdx.x; i < Config::BLOCK_Q << digit_bits; i += Config::kThreads) {
      histograms[i] = 0;
    }
    visit_scaled<Config>(
        source, [&](typename Config::ScoreFragment& rS, const typename Config::Step& step) {
          if (digits_left) {
            count_digits<Config>(rS, place, digit_bits, selections, histograms);
          } else {
            find_last_tie<Config>(rS, tile, step, selections, ties_seen);
          }
        });
    if (!digits_left) break;
    active = false;
    for (int r = first_row; r < first_row + Config::kWarpRows; ++r) {
      if (selections[r].active) {
        advance(selections[r], histograms + (r << digit_bits), digit_bits, place.shift);
      }
      __syncwarp();
      active |= selections[r].active;
    }
    active = __syncthreads_or(active);
  }
  __syncthreads();
  int64_t head = int64_t{tile.work.batch} * params.problem.heads_q + tile.work.head;
  for (int r = threadIdx.x; r < tile.work.rows.size(); r += Config::kThreads) {
    int64_t i = tile.work.slice.rows.at(tile.work.rows.begin + r);
    thresholds[head * params.problem.seq_q + i] = selections[r].threshold;
  }
}

}  // namespace sparse_attn::cuda::portable

// Masses of tiles of 16 keys from a sketch: with code c of key j, q.k_j = q.least + sum over d of
// (q_d step_d) c_jd. Codes go from memory to the tensor cores without arithmetic: a few bits under
// a mask are a 16-bit float, c 2^s 2^-24 with s the bit that they begin at, and the queries carry
// 2^-s. A warp takes a group at a time, from a ring of its own that cp.async fills ahead: it scales
// its queries by the group's steps and multiplies tile by tile, keys as the 16 rows of mma, queries
// as its 8 columns. Four queries or fewer take two groups at a time, a half of the columns each:
// of a group's products a lane keeps those of its own half.
//
//   rows of a tile of queries   query heads of one key head x queries, 8 or 4 at a time
//   lane                        quad c = lane % 4 has channels c D/4 .. (c + 1) D/4 - 1 of the keys
//                               lane / 4 and lane / 4 + 8, and of column lane / 4
#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/mask.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mma.cuh"
#include "../select/tools.h"
#include "group_ring.cuh"
#include "queries.cuh"

namespace sparse_attn::cuda {
namespace {

constexpr int kMarkThreads = 64;

/// The half of two values that a lane keeps while its partner `step` lanes away keeps the other.
template <int N>
__device__ __forceinline__ void fold(float (&values)[N], int lane, int step, int count) {
  const bool high = lane & step;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    if (i >= count / 2) break;
    const float send = high ? values[i] : values[i + count / 2];
    const float keep = high ? values[i + count / 2] : values[i];
    values[i] = keep + __shfl_xor_sync(~0u, send, step);
  }
}

/// Scores of the tiles of a lane's groups: keys lane / 4 and lane / 4 + 8 by two columns.
using ScoreFragment = float[kTiles][4];

/// The products of a slot's codes with queries times steps; of each group's a lane keeps those of
/// its own half. Groups of fewer tiles take their first one again, and leave its masses out.
template <typename Config>
__device__ __forceinline__ void multiply_codes(const char* codes,
                                               const uint32_t (&stepped)[Config::kPairs],
                                               int32_t group_tiles, int group_of_sums,
                                               ScoreFragment& scores) {
  const int lane = threadIdx.x % 32;
  codes += lane / 4 * Config::kRowBytes + lane % 4 * (Config::kRowBytes / 4);
#pragma unroll
  for (int at = 0; at < Config::kGroups; ++at, codes += Config::kCodeBytes) {
    uint32_t words[kTiles][2][Config::kWords];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int from = tile < group_tiles ? tile * kSketchTile : 0;
      load_words(codes + from * Config::kRowBytes, words[tile][0]);
      load_words(codes + (from + 8) * Config::kRowBytes, words[tile][1]);
    }
    ScoreFragment products = {};
#pragma unroll
    for (int pair = 0; pair < Config::kPairs; pair += 2) {
      const int word = pair / Config::kPairsOfWord, e = pair % Config::kPairsOfWord;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t keys[4] = {codes_of<Config>(words[tile][0][word], e),
                                  codes_of<Config>(words[tile][1][word], e),
                                  codes_of<Config>(words[tile][0][word], e + 1),
                                  codes_of<Config>(words[tile][1][word], e + 1)};
        ptx::mma_16x8x16<__half>(products[tile], keys, stepped[pair], stepped[pair + 1]);
      }
    }
    if (at > 0 && at != group_of_sums) continue;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) scores[i / 4][i % 4] = products[i / 4][i % 4];
  }
}

/// Hides the keys that a row does not see, or that the sketch does not hold; the group begins with
/// key `begin`.
template <typename Config>
__device__ __forceinline__ void hide_unseen(const QueryTile<Config>& queries, int32_t begin,
                                            int32_t group_tiles, ScoreFragment& scores) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    const int32_t j = begin + i / 4 * kSketchTile + threadIdx.x % 32 / 4 + i % 4 / 2 * 8;
    const bool seen =
        i / 4 < group_tiles && queries.rows[i % 2].keys.contains(j) && j < queries.held;
    if (!seen) scores[i / 4][i % 4] = -INFINITY;
  }
}

/// The mass of the tile and the row that the lane writes, of scores in units of log 2.
__device__ __forceinline__ float sum_tiles(const ScoreFragment& scores) {
  const int lane = threadIdx.x % 32;
  float sums[2 * kTiles];  // of rows x tiles
  float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    highest[i % 2] = fmaxf(highest[i % 2], scores[i / 4][i % 4]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    for (int step = 4; step < 32; step *= 2) {
      highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], step));
    }
    const float from = highest[r] == -INFINITY ? 0.0f : highest[r];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      sums[r * kTiles + tile] =
          ptx::exp2_approx(scores[tile][r] - from) + ptx::exp2_approx(scores[tile][r + 2] - from);
    }
  }
  fold(sums, lane, 16, 8);
  fold(sums, lane, 8, 4);
  fold(sums, lane, 4, 2);
  return ((lane < 16 ? highest[0] : highest[1]) + __log2f(sums[0])) * kLn2;
}

/// kCaps: under softcap, whose code would lie in the way of other calls'.
template <typename Config, bool kCaps>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    score_sketch(const __grid_constant__ SelectParams params,
                 const __grid_constant__ SketchView sketch, float* masses, int32_t row_tiles,
                 int32_t splits, bool aligned) {
  extern __shared__ __align__(16) char rings[];
  ptx::wait_for_primary();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto split = static_cast<int32_t>(blockIdx.x % splits);
  const auto first_row = static_cast<int>(blockIdx.x / splits % row_tiles) * Config::kRows;
  const uint32_t item = blockIdx.x / splits / row_tiles;
  const auto batch = static_cast<int32_t>(item / params.problem.heads_kv);
  const auto head_kv = static_cast<int32_t>(item % params.problem.heads_kv);
  const int32_t num_tiles = ceil_div(params.problem.seq_kv, kSketchTile);
  const int32_t group_tiles = sketch.group / kSketchTile;
  const int32_t groups = ceil_div(num_tiles, group_tiles);
  const int32_t held = sketch.held(batch, params.entry_keys(batch));
  const QueryTile<Config> queries(params, batch, head_kv, first_row, held);
  // The tile and the row whose mass this lane writes.
  const int32_t written_tile = lane / 4 % kTiles;
  const QueryRow written = lane < 16 ? queries.rows[0] : queries.rows[1];
  float* target =
      masses + ((int64_t{batch} * params.problem.heads_q + written.head) * params.problem.seq_q +
                written.query) *
                   num_tiles;

  const GroupRing<Config> ring(params, sketch, batch, head_kv, groups, queries.any,
                               rings + warp * Config::kSlots * Config::kSlotBytes);
  const int32_t step = splits * Config::kWarps * Config::kGroups;
  const int32_t first = (split * Config::kWarps + warp) * Config::kGroups;
  const float scale = params.scores.scale * (kCaps ? 1.0f : kLog2e);
  LaneQuery<Config> query;
  float factor[2];
  int slot = 0;
#pragma unroll 1
  for (int32_t loaded = first;; loaded += step) {
    ring.load(loaded, slot);
    slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
    const int32_t oldest = loaded - (Config::kSlots - 1) * step;
    if (oldest < first) {
      if (oldest + step < first) continue;
      // While the first groups are on their way.
      query.load(params, batch, queries.own, aligned);
      query.find_factors(scale, factor);
      continue;
    }
    if (oldest >= groups) break;
    ptx::cp_async_wait<Config::kSlots - 1>();
    __syncwarp();  // the oldest groups have landed
    const int32_t group = oldest + queries.group_of_sums;
    const bool visible = ring.is_visible(group);
    float mass = -INFINITY;
    if (__any_sync(~0u, visible)) {
      char* ranges = ring.slot(slot) + ring.kRanges;
      make_steps<Config>(ranges, params.problem.head_dim);
      ranges += queries.column_group * Config::kRangeBytes;
      uint32_t stepped[Config::kPairs];
      scale_query<Config>(query, ranges, params.problem.head_dim, stepped);
      float bases[2];
      least_products<Config>(query, ranges, params.problem.head_dim, queries.group_of_sums, bases);
      ScoreFragment scores;
      multiply_codes<Config>(ring.slot(slot), stepped, group_tiles, queries.group_of_sums, scores);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        float& score = scores[i / 4][i % 4];
        score = fmaf(score, factor[i % 2], bases[i % 2] * scale);
        if constexpr (kCaps) score = capped(score, params.scores.softcap) * kLog2e;
      }
      if (group_tiles < kTiles || oldest * sketch.group < queries.all.begin ||
          (oldest + Config::kGroups) * sketch.group > queries.all.end) {
        hide_unseen(queries, group * sketch.group, group_tiles, scores);
      }
      const float sum = sum_tiles(scores);
      if (visible) mass = sum;
    }
    __syncwarp();  // the slot has been read
    const int32_t tile = group * group_tiles + written_tile;
    if (written.head < 0 || written_tile >= group_tiles || tile >= num_tiles) continue;
    const Interval keys = {tile * kSketchTile, (tile + 1) * kSketchTile};
    const Interval unknown =
        intersect(intersect(keys, written.keys), {held, params.problem.seq_kv});
    target[tile] = !unknown.empty() || mass == INFINITY ? NAN : mass;
  }
}

/// NaN as the masses of tiles with keys that a row sees and a sketch of pages does not hold. A
/// thread for a group of a sequence, of which mostly nothing is missing.
__global__ void __launch_bounds__(kMarkThreads)
    mark_not_held(const __grid_constant__ SelectParams params, float* masses) {
  ptx::wait_for_primary();
  const int32_t parts =
      ceil_div(ceil_div(params.problem.seq_kv, params.sketch.group), kMarkThreads);
  const auto batch = static_cast<int32_t>(blockIdx.x / parts);
  const int32_t begin =
      static_cast<int32_t>(blockIdx.x % parts * kMarkThreads + threadIdx.x) * params.sketch.group;
  const Interval group = {begin, imin(begin + params.sketch.group, params.entry_keys(batch))};
  if (group.empty()) return;
  const Interval missing = {params.held_end(batch, begin), group.end};
  if (missing.empty()) return;
  const int32_t num_tiles = ceil_div(params.problem.seq_kv, kSketchTile);
  for (int32_t head = 0; head < params.problem.heads_q; ++head) {
    for (int32_t i = 0; i < params.problem.seq_q; ++i) {
      const int64_t row =
          (int64_t{batch} * params.problem.heads_q + head) * params.problem.seq_q + i;
      const Interval tiles = SelectParams::blocks_of(
          intersect(params.keys_of_row(batch, head, i), missing), kSketchTile);
      for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
        masses[row * num_tiles + tile] = NAN;
      }
    }
  }
}

template <typename Config>
Status launch_scores(const SelectParams& params, const SketchView& sketch, float* masses) {
  const int32_t rows = params.problem.group() * params.problem.seq_q;
  const int32_t row_tiles = ceil_div(rows, Config::kRows);
  const int64_t items = int64_t{params.problem.batch} * params.problem.heads_kv * row_tiles;
  int processors = 1;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, params.device);
  // As many thread blocks as the device holds at once; each of them loads its queries.
  constexpr int32_t kGroupsPerWarp = 2;
  const int64_t fitting = processors * Config::kBlocksPerSm / items;
  const int64_t most =
      ceil_div64(params.problem.seq_kv, sketch.group * Config::kWarps * kGroupsPerWarp);
  const auto splits = static_cast<int32_t>(fitting < 1 ? 1 : fitting < most ? fitting : most);
  const auto kernel =
      params.scores.softcap == 0.0f ? score_sketch<Config, false> : score_sketch<Config, true>;
  const Status status = allow_shared_bytes(kernel, Config::kSmemBytes);
  if (!status.ok()) return status;
  const bool aligned = begins_at_16_bytes(params.query, size_of(params.problem.dtype));
  const LaunchShape shape = {static_cast<uint32_t>(items * splits), Config::kThreads,
                             Config::kSmemBytes, to_stream(params.stream)};
  return launch_dependent(kernel, shape, params, sketch, masses, row_tiles, splits, aligned);
}

template <typename T, int CHUNKS, int BITS>
Status launch_by_rows(const SelectParams& params, const SketchView& sketch, float* masses) {
  constexpr bool kHasHalves = CHUNKS <= 2;  // larger groups leave no registers for it
  if constexpr (kHasHalves) {
    using Halves = SketchConfig<T, CHUNKS, BITS, 2>;
    if (params.problem.group() * params.problem.seq_q <= Halves::kRows) {
      return launch_scores<Halves>(params, sketch, masses);
    }
  }
  return launch_scores<SketchConfig<T, CHUNKS, BITS, 1>>(params, sketch, masses);
}

template <typename T, int CHUNKS>
Status launch_by_bits(const SelectParams& params, const SketchView& sketch, float* masses) {
  if (sketch.bits == 2) return launch_by_rows<T, CHUNKS, 2>(params, sketch, masses);
  return launch_by_rows<T, CHUNKS, 4>(params, sketch, masses);
}

}  // namespace

Status launch_sketch_masses(const SelectParams& params, const SketchView& sketch, float* masses) {
  const Status status = with_type(params.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    switch (ceil_div(params.problem.head_dim, kSketchChannels)) {
      case 1:
        return launch_by_bits<T, 1>(params, sketch, masses);
      case 2:
        return launch_by_bits<T, 2>(params, sketch, masses);
      case 3:
        return launch_by_bits<T, 3>(params, sketch, masses);
      default:
        return launch_by_bits<T, 4>(params, sketch, masses);
    }
  });
  if (!status.ok() || !sketch.paged) return status;
  const int64_t blocks = int64_t{params.problem.batch} *
                         ceil_div(ceil_div(params.problem.seq_kv, sketch.group), kMarkThreads);
  const LaunchShape shape = {static_cast<uint32_t>(blocks), kMarkThreads, 0,
                             to_stream(params.stream)};
  return launch_dependent(mark_not_held, shape, params, masses);
}

}  // namespace sparse_attn::cuda

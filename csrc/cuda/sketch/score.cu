// Masses of tiles of 16 keys from a sketch: with code c of key j, q.k_j = q.least + sum over d of
// (q_d step_d) c_jd. Codes go from memory to the tensor cores without arithmetic: a few bits under
// a mask are a 16-bit float, c 2^s 2^-24 with s the bit that they begin at, and the queries carry
// 2^-s. A warp takes a group at a time, from a ring of its own that cp.async fills ahead: it scales
// its queries by the group's steps and multiplies tile by tile, keys as the 16 rows of mma, queries
// as its 8 columns. Four queries or fewer take two groups at a time, a half of the columns each:
// what a half multiplies for the other is times 0.
//
//   rows of a tile of queries   query heads of one key head x queries, 8 or 4 at a time
//   lane                        quad c = lane % 4 has channels c D/4 .. (c + 1) D/4 - 1 of the keys
//                               lane / 4 and lane / 4 + 8, and of column lane / 4
#include "../common/launch.cuh"
#include "../common/log2_units.h"
#include "../common/mask.cuh"
#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/grid.cuh"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mma.cuh"
#include "../common/types.cuh"
#include "sketch.h"

namespace sparse_attn::cuda {
namespace {

constexpr int kColumns = 8;                         // of mma
constexpr int kTiles = kSketchGroup / kSketchTile;  // of a group
constexpr int kLift = 4;       // the scaled queries' exponent, between the smallest and largest
constexpr int kCodeUnit = 24;  // a code at bit 0 is a multiple of 2^-24

/// One kernel's sizes: CHUNKS x 64 channels, codes of BITS, GROUPS of them at a time.
template <typename T_, int CHUNKS, int BITS, int GROUPS>
struct SketchConfig {
  using T = T_;
  static constexpr int kGroups = GROUPS;
  static constexpr int kRows = kColumns / GROUPS;  // queries of a tile
  static constexpr int kBits = BITS;
  static constexpr int kChannels = 16 * CHUNKS;  // of a lane
  static constexpr int kPairs = kChannels / 2;
  static constexpr int kWords = kChannels * BITS / 32;  // of a lane and key
  static constexpr int kPairsOfWord = 16 / BITS;
  // As registers allow.
  static constexpr int kBlocksPerSm = CHUNKS == 1 ? 4 : CHUNKS == 2 && BITS == 2 ? 3 : 2;
  // A slot of a warp's ring: of each group its codes, then its ranges.
  static constexpr int kRowBytes = 16 * kWords;
  static constexpr int kCodeBytes = kSketchGroup * kRowBytes;
  static constexpr int kRangeBytes = 2 * 64 * CHUNKS * static_cast<int>(sizeof(T));
  static constexpr int kGroupBytes = kCodeBytes + kRangeBytes;
  static constexpr int kSlotBytes = GROUPS * kGroupBytes;
  static constexpr int kSmemLimit = 64 << 10;  // that every device has
  static constexpr int kWarps = kSlotBytes <= 8 << 10 ? 4 : 2;
  static constexpr int kSlots = 3 * kWarps * kSlotBytes <= kSmemLimit ? 3 : 2;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSmemBytes = kWarps * kSlots * kSlotBytes;
  static_assert(kSmemBytes <= kSmemLimit, "fits every device");
  static constexpr uint32_t kLevels = (1u << BITS) - 1;
  /// The bit of its half at which pair e of a word lies once it is in the low byte.
  SPARSE_ATTN_HD static constexpr int shift(int e) { return e * BITS % 8; }
};

/// The pair e of a word as two 16-bit floats, c 2^shift 2^-24 each.
template <typename Config>
__device__ __forceinline__ uint32_t codes_of(uint32_t word, int e) {
  const uint32_t mask = (Config::kLevels << Config::shift(e)) * 0x00010001u;
  return (e * Config::kBits < 8 ? word : word >> 8) & mask;
}

/// The queries of a lane's row, in its channels.
template <typename Config>
struct LaneQuery {
  uint32_t scaled[Config::kPairs];  // q 2^(kLift - shift) / unit / levels, below 2^kLift
  float plain[Config::kChannels];
};

template <int N>
__device__ __forceinline__ void load_words(const char* from, uint32_t (&to)[N]) {
  constexpr int kVector = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
  struct alignas(kVector * 4) Words {
    uint32_t word[kVector];
  };
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i % kVector > 0) continue;
    const Words words = reinterpret_cast<const Words*>(from)[i / kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) to[i + k] = words.word[k];
  }
}

/// Eight elements as floats; `from` lies on a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void load_eight(const T* from, float (&to)[8]) {
  struct alignas(16) Elements {
    T element[8];
  };
  const Elements elements = *reinterpret_cast<const Elements*>(from);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(elements.element[i]);
}

/// Copies up to `most` bytes, a multiple of 16; the lanes of a warp share them.
template <int kMost>
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int32_t bytes) {
#pragma unroll
  for (int begin = 0; begin < kMost; begin += 32 * 16) {
    const int at = begin + static_cast<int>(threadIdx.x) % 32 * 16;
    if (at < bytes) ptx::cp_async_16(to + at, static_cast<const char*>(from) + at, true);
  }
}

__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

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

/// What a row of a tile of queries is, and which keys it sees.
struct QueryRow {
  int32_t head, query;  // a head of -1 is none; it sees what the last row sees
  Interval keys;
};

__device__ __forceinline__ QueryRow row_at(const SelectParams& params, int64_t batch,
                                           int64_t head_kv, int32_t row) {
  const int32_t last = params.group() * params.seq_q - 1;
  const int32_t own = imin(row, last);
  const int32_t head = static_cast<int32_t>(head_kv) * params.group() + own / params.seq_q;
  const int32_t query = own % params.seq_q;
  return {row > last ? -1 : head, query, params.keys_of_row(batch, head, query)};
}

/// Reads the lane's row and returns its unit: the power of two above its largest element.
template <typename Config>
__device__ float load_query(const SelectParams& params, int64_t batch, const QueryRow& row,
                            LaneQuery<Config>& lane_query) {
  using T = typename Config::T;
  const int first = threadIdx.x % 4 * Config::kChannels;
  const T* query = static_cast<const T*>(params.query.data) + batch * params.query.stride_b +
                   row.head * params.query.stride_h + row.query * params.query.stride_s;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kChannels; ++i) {
    const bool there = row.head >= 0 && first + i < params.head_dim;
    lane_query.plain[i] = to_float(there ? query[first + i] : from_float<T>(0.0f));
  }
#pragma unroll
  for (int i = 0; i < Config::kChannels; ++i) {
    largest = fmaxf(largest, fabsf(lane_query.plain[i]));
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  int exponent = 0;
  frexpf(largest, &exponent);
  const float lift = ldexpf(1.0f, kLift - exponent) / Config::kLevels;
#pragma unroll
  for (int i = 0; i < Config::kPairs; ++i) {
    const float factor = lift / (1 << Config::shift(i % Config::kPairsOfWord));
    lane_query.scaled[i] =
        pack<__half>(lane_query.plain[2 * i] * factor, lane_query.plain[2 * i + 1] * factor);
  }
  return ldexpf(1.0f, exponent);
}

/// The lane's queries times a group's steps; returns its part of q.least.
template <typename Config>
__device__ __forceinline__ float scale_query(const LaneQuery<Config>& query,
                                             const typename Config::T* ranges, int32_t head_dim,
                                             uint32_t (&stepped)[Config::kPairs]) {
  const int first = threadIdx.x % 4 * Config::kChannels;
  float base = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kChannels; i += 8) {
    // Queries are 0 in channels that do not exist.
    const int channel = first + i < head_dim ? first + i : 0;
    float least[8], greatest[8];
    load_eight(ranges + channel, least);
    load_eight(ranges + head_dim + channel, greatest);
#pragma unroll
    for (int d = 0; d < 8; d += 2) {
      base = fmaf(query.plain[i + d], least[d], base);
      base = fmaf(query.plain[i + d + 1], least[d + 1], base);
      const __half2 step =
          __floats2half2_rn(greatest[d] - least[d], greatest[d + 1] - least[d + 1]);
      const uint32_t pair = query.scaled[(i + d) / 2];
      const __half2 product = __hmul2(reinterpret_cast<const __half2&>(pair), step);
      stepped[(i + d) / 2] = reinterpret_cast<const uint32_t&>(product);
    }
  }
  return base;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    score_sketch(const SelectParams params, const SketchView sketch, float* masses,
                 int32_t row_tiles, int32_t splits) {
  using T = typename Config::T;
  extern __shared__ __align__(16) char rings[];
  ptx::wait_for_primary();
  ptx::launch_dependents();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int32_t split = blockIdx.x % splits;
  const uint32_t row_tile = blockIdx.x / splits % row_tiles;
  const uint32_t item = blockIdx.x / splits / row_tiles;
  const int64_t batch = item / params.heads_kv, head_kv = item % params.heads_kv;
  const int32_t num_tiles = ceil_div(params.seq_kv, kSketchTile);
  const int32_t held = sketch.held(batch, params.keys(batch));

  // Of the lane's column, and of the two columns of its accumulators.
  const int column_group = lane / 4 / Config::kRows, group_of_sums = 2 * quad / Config::kRows;
  const int first_row = static_cast<int>(row_tile) * Config::kRows;
  LaneQuery<Config> query;
  const QueryRow own = row_at(params, batch, head_kv, first_row + lane / 4 % Config::kRows);
  const float lane_unit = load_query<Config>(params, batch, own, query);
  QueryRow rows[2];
  float factor[2];
  const float scale = params.scale * (params.softcap == 0.0f ? kLog2e : 1.0f);
  // Keys that some row sees, and those that all of them see.
  Interval any = {params.seq_kv, 0}, all = {0, held};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[r] = row_at(params, batch, head_kv, first_row + (2 * quad + r) % Config::kRows);
    factor[r] = scale * ldexpf(__shfl_sync(~0u, lane_unit, (2 * quad + r) * 4), kCodeUnit - kLift);
    any.begin = imin(any.begin, rows[r].keys.empty() ? params.seq_kv : rows[r].keys.begin);
    any.end = imax(any.end, imin(rows[r].keys.end, held));
    all = intersect(all, rows[r].keys);
  }
  for (int step = 1; step < 4; step *= 2) {
    any.begin = imin(any.begin, __shfl_xor_sync(~0u, any.begin, step));
    any.end = imax(any.end, __shfl_xor_sync(~0u, any.end, step));
    all.begin = imax(all.begin, __shfl_xor_sync(~0u, all.begin, step));
    all.end = imin(all.end, __shfl_xor_sync(~0u, all.end, step));
  }
  // The tile and the row whose mass this lane writes.
  const int32_t written_tile = lane / 4 % kTiles;
  const QueryRow written = lane < 16 ? rows[0] : rows[1];
  float* target =
      masses + ((batch * params.heads_q + written.head) * params.seq_q + written.query) * num_tiles;

  const int32_t group_tiles = sketch.group / kSketchTile;
  const int32_t groups = ceil_div(num_tiles, group_tiles);
  const int32_t step = splits * Config::kWarps * Config::kGroups;
  auto is_visible = [&](int32_t group) {
    return group < groups && group * sketch.group < any.end &&
           (group + 1) * sketch.group > any.begin;
  };
  const int32_t entry_groups = sketch.rows / sketch.group;
  char* ring = rings + threadIdx.x / 32 * Config::kSlots * Config::kSlotBytes;
  auto load = [&](int32_t group, uint32_t to) {
    int64_t entry = batch;
    int32_t inside = group;
    if (sketch.paged) {
      entry = params.pages.page_of(batch, group * sketch.group);
      inside = group % entry_groups;
    }
    const int64_t at = (entry * sketch.heads + head_kv) * entry_groups + inside;
    const int32_t code_bytes = sketch.group * Config::kRowBytes;
    const int32_t range_bytes = 2 * params.head_dim * static_cast<int32_t>(sizeof(T));
    copy_bytes<Config::kCodeBytes>(
        to, reinterpret_cast<const char*>(sketch.codes) + at * code_bytes, code_bytes);
    copy_bytes<Config::kRangeBytes>(to + Config::kCodeBytes,
                                    static_cast<const char*>(sketch.ranges) + at * range_bytes,
                                    range_bytes);
  };
  const int32_t first =
      (split * Config::kWarps + static_cast<int32_t>(threadIdx.x / 32)) * Config::kGroups;
  int slot = 0;
#pragma unroll 1
  for (int32_t loaded = first;; loaded += step) {
    const uint32_t to = ptx::shared_address(ring) + slot * Config::kSlotBytes;
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) {
      if (is_visible(loaded + i)) load(loaded + i, to + i * Config::kGroupBytes);
    }
    ptx::cp_async_commit();
    slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
    const int32_t oldest = loaded - (Config::kSlots - 1) * step;
    if (oldest < first) continue;
    if (oldest >= groups) break;
    ptx::cp_async_wait<Config::kSlots - 1>();
    __syncwarp();  // the oldest groups have landed
    const char* codes = ring + slot * Config::kSlotBytes;
    const T* ranges =
        reinterpret_cast<const T*>(codes + column_group * Config::kGroupBytes + Config::kCodeBytes);
    const int32_t group = oldest + group_of_sums;
    const int32_t begin = group * sketch.group;
    float sums[2 * kTiles];  // of rows x tiles
    float highest[2] = {-INFINITY, -INFINITY};
    const bool visible = is_visible(group);
    if (__any_sync(~0u, visible)) {
      codes += lane / 4 * Config::kRowBytes + quad * (Config::kRowBytes / 4);
      uint32_t stepped[Config::kPairs];
      float base = scale_query<Config>(query, ranges, params.head_dim, stepped);
      base = scale * sum_of_quad(base);
      const float bases[2] = {__shfl_sync(~0u, base, 2 * quad * 4),
                              __shfl_sync(~0u, base, (2 * quad + 1) * 4)};
      float scores[kTiles][4] = {};
#pragma unroll
      for (int at = 0; at < Config::kGroups; ++at, codes += Config::kGroupBytes) {
        uint32_t words[kTiles][2][Config::kWords];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          // Smaller groups take their first tile again, and leave its masses out.
          const int from = tile < group_tiles ? tile * kSketchTile : 0;
          load_words(codes + from * Config::kRowBytes, words[tile][0]);
          load_words(codes + (from + 8) * Config::kRowBytes, words[tile][1]);
        }
#pragma unroll
        for (int pair = 0; pair < Config::kPairs; pair += 2) {
          const int word = pair / Config::kPairsOfWord, e = pair % Config::kPairsOfWord;
          const uint32_t left = at == column_group ? stepped[pair] : 0;
          const uint32_t right = at == column_group ? stepped[pair + 1] : 0;
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const uint32_t keys[4] = {codes_of<Config>(words[tile][0][word], e),
                                      codes_of<Config>(words[tile][1][word], e),
                                      codes_of<Config>(words[tile][0][word], e + 1),
                                      codes_of<Config>(words[tile][1][word], e + 1)};
            ptx::mma_16x8x16<__half>(scores[tile], keys, left, right);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        float& score = scores[i / 4][i % 4];
        score = fmaf(score, factor[i % 2], bases[i % 2]);
      }
      if (params.softcap != 0.0f) {
#pragma unroll
        for (int i = 0; i < 4 * kTiles; ++i) {
          float& score = scores[i / 4][i % 4];
          score = capped(score, params.softcap) * kLog2e;
        }
      }
      if (group_tiles < kTiles || oldest * sketch.group < all.begin ||
          (oldest + Config::kGroups) * sketch.group > all.end) {
#pragma unroll
        for (int i = 0; i < 4 * kTiles; ++i) {
          const int32_t j = begin + i / 4 * kSketchTile + lane / 4 + i % 4 / 2 * 8;
          const bool seen = i / 4 < group_tiles && rows[i % 2].keys.contains(j) && j < held;
          if (!seen) scores[i / 4][i % 4] = -INFINITY;
        }
      }
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
          sums[r * kTiles + tile] = ptx::exp2_approx(scores[tile][r] - from) +
                                    ptx::exp2_approx(scores[tile][r + 2] - from);
        }
      }
      fold(sums, lane, 16, 8);
      fold(sums, lane, 8, 4);
      fold(sums, lane, 4, 2);
    }
    __syncwarp();  // the slot has been read
    const int32_t tile = group * group_tiles + written_tile;
    if (written.head < 0 || written_tile >= group_tiles || tile >= num_tiles) continue;
    float mass = -INFINITY;
    if (visible) mass = ((lane < 16 ? highest[0] : highest[1]) + __log2f(sums[0])) * kLn2;
    const Interval keys = {tile * kSketchTile, (tile + 1) * kSketchTile};
    const Interval unknown = intersect(intersect(keys, written.keys), {held, params.seq_kv});
    target[tile] = !unknown.empty() || mass == INFINITY ? NAN : mass;
  }
}

template <typename Config>
Status launch_scores(const SelectParams& params, const SketchView& sketch, float* masses) {
  const int32_t rows = params.group() * params.seq_q;
  const int32_t row_tiles = ceil_div(rows, Config::kRows);
  const int64_t items = int64_t{params.batch} * params.heads_kv * row_tiles;
  int processors = 1;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, params.device);
  // As many thread blocks as the device holds at once; each of them loads its queries.
  constexpr int32_t kGroupsPerWarp = 2;
  const int64_t fitting = processors * Config::kBlocksPerSm / items;
  const int64_t most = ceil_div64(params.seq_kv, sketch.group * Config::kWarps * kGroupsPerWarp);
  const auto splits = static_cast<int32_t>(fitting < 1 ? 1 : fitting < most ? fitting : most);
  const cudaError_t error = cudaFuncSetAttribute(
      score_sketch<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes);
  if (error != cudaSuccess) return to_status(error);
  const LaunchShape shape = {static_cast<uint32_t>(items * splits), Config::kThreads,
                             Config::kSmemBytes, to_stream(params.stream)};
  return launch_dependent(score_sketch<Config>, shape, params, sketch, masses, row_tiles, splits);
}

template <typename T, int CHUNKS, int BITS>
Status launch_by_rows(const SelectParams& params, const SketchView& sketch, float* masses) {
  constexpr bool kHasHalves = CHUNKS <= 2;  // larger groups leave no registers for it
  if constexpr (kHasHalves) {
    using Halves = SketchConfig<T, CHUNKS, BITS, 2>;
    if (params.group() * params.seq_q <= Halves::kRows) {
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
  return with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    switch (ceil_div(params.head_dim, kSketchChannels)) {
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
}

}  // namespace sparse_attn::cuda

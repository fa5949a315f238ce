// What an estimate multiplies: vectors that stand for rows and vectors that stand for keys, by
// selector. A vector is a slice of `slices` rows of tensors, whose products are added.
//   groups        means of groups                              1 slice
//   rows          every row_step-th row, every key             1 slice
//   antidiagonal  squares: row s of one, key stride-1-s of the other    `stride` slices
//   extremes      q > 0 with greatest, q < 0 with least        2 slices
#pragma once

#include "tools.h"

namespace sparse_attn::cuda {

enum class Vectors { kGroups, kRows, kAntidiagonal, kExtremes };

struct Estimate {
  Vectors kind = Vectors::kGroups;
  TensorView query, key;  // that hold the vectors
  int32_t rows = 1;       // of a query vector
  int32_t keys = 1;       // of a key vector
  int32_t slices = 1;
  int32_t per_block = 1;  // key vectors of a key block
  bool adds = false;      // to the shares that are there

  /// Query vectors of some blocks of `size` rows, of which `there` exist.
  __device__ Interval vectors(Interval blocks, int32_t size, int32_t there) const {
    const int32_t end = imin(blocks.end * size, there), first = blocks.begin * size / rows;
    return {first, imax(first, kind == Vectors::kRows ? end / rows : ceil_div(end, rows))};
  }
  __device__ Interval vectors(const SelectParams& params, int64_t batch, Interval blocks) const {
    return vectors(blocks, params.block_q, params.rows(batch));
  }
  /// The queries that a vector stands for.
  __device__ Interval queries(const SelectParams& params, int64_t batch, int32_t vector) const {
    if (kind == Vectors::kRows) return {(vector + 1) * rows - 1, (vector + 1) * rows};
    return {vector * rows, imin((vector + 1) * rows, params.rows(batch))};
  }
  /// The key vectors that a query vector sees, from the first to the last, of keys that are held.
  __device__ Interval seen(const SelectParams& params, int64_t batch, int64_t head,
                           int32_t vector) const {
    Interval own = params.keys_of_rows(batch, head, queries(params, batch, vector));
    own.end = imin(own.end, params.held_keys(batch));
    return SelectParams::blocks_of(own, keys);
  }
  /// Row of the tensor of queries, and of keys, that is a slice of a vector.
  __device__ int32_t query_row(int32_t vector, int32_t slice) const {
    if (kind == Vectors::kRows) return (vector + 1) * rows - 1;
    return kind == Vectors::kAntidiagonal ? vector * rows + slice : vector;
  }
  __device__ int32_t key_row(int32_t vector, int32_t slice) const {
    if (kind == Vectors::kAntidiagonal) return (vector + 1) * keys - 1 - slice;
    return kind == Vectors::kExtremes ? 2 * vector + slice : vector;
  }
};

/// A tile of query vectors and a tile of key vectors of one head, as products read them: addresses
/// of rows, null where there is none.
template <typename T>
struct VectorTile {
  const SelectParams& params;
  const Estimate& estimate;
  const int32_t* marks;
  const T* query;
  const T* key;
  int64_t batch;
  Interval query_vectors, key_vectors;

  __device__ const T* query_at(int row, int slice) const {
    const int32_t vector = query_vectors.begin + row;
    if (vector >= query_vectors.end) return nullptr;
    const int32_t i = estimate.query_row(vector, slice);
    if (estimate.kind == Vectors::kAntidiagonal && i >= params.rows(batch)) return nullptr;
    return query + i * estimate.query.stride_s;
  }
  __device__ const T* key_at(int column, int slice) const {
    const int32_t vector = key_vectors.begin + column;
    if (vector >= key_vectors.end) return nullptr;
    const int32_t j = estimate.key_row(vector, slice);
    if (estimate.kind == Vectors::kAntidiagonal && !key_exists(params, marks, batch, j)) {
      return nullptr;
    }
    if (estimate.kind == Vectors::kRows && j >= params.problem.seq_kv) return nullptr;
    return key + j * estimate.key.stride_s;
  }
  /// Extremes: the part of a query element that meets a slice; negative scales turn the sign.
  __device__ float part(float x, int slice) const {
    if (estimate.kind != Vectors::kExtremes) return x;
    if (params.scores.scale < 0) x = -x;
    return slice == 0 ? fmaxf(x, 0.0f) : fminf(x, 0.0f);
  }
  __device__ float scale() const {
    return estimate.kind == Vectors::kExtremes ? fabsf(params.scores.scale) : params.scores.scale;
  }
};

}  // namespace sparse_attn::cuda

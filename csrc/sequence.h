// Which rows and keys a batch entry has and where they stand: entries of one length, entries with
// used lengths, or sequences packed one after the other. Plain data, read on the host and on the
// device.
#pragma once

#include <cstdint>

#include "interval.h"

namespace sparse_attn {

/// One batch entry.
struct Sequence {
  int32_t rows = 0;       // queries
  int32_t keys = 0;       // keys 0 .. keys - 1 exist
  int32_t offset = 0;     // key position of query 0
  int32_t origin = 0;     // key position at which its text begins, any number
  int32_t first_row = 0;  // of the packed queries and outputs
  int32_t first_key = 0;  // of the packed keys and values
};

/// Where queries stand unless a call says: the last one at the last key.
SPARSE_ATTN_HD constexpr int32_t lower_right(int32_t rows, int32_t keys) { return keys - rows; }

/// Where keys end for a query at position p, of those before `end`.
SPARSE_ATTN_HD constexpr int32_t end_of_keys(bool causal, int32_t p, int32_t end) {
  return causal ? imin(end, p + 1) : end;
}

/// How many keys of a sequence may be read: under causal none past its last query, where the tail
/// of a cache may hold anything.
SPARSE_ATTN_HD constexpr int32_t readable_keys(bool causal, const Sequence& sequence) {
  const int32_t last = sequence.rows - 1 + sequence.offset;
  return imax(0, end_of_keys(causal, last, sequence.keys));
}

/// All batch entries. Sizes that only the device knows are cut to the upper bounds `rows` and
/// `keys`, so that nothing outside the tensors is read, whatever they say.
struct Sequences {
  int32_t rows = 0, keys = 0;                // of each entry, at most
  int32_t query_offset = 0;                  // key position of query 0 ...
  const int32_t* query_offsets = nullptr;    // [B], ... or one for each entry
  const int32_t* key_origins = nullptr;      // [B]; null: 0
  const int32_t* first_rows = nullptr;       // [B + 1], packed queries (cu_seq_q)
  const int32_t* first_keys = nullptr;       // [B + 1], packed keys (cu_seq_k)
  const int32_t* used_keys = nullptr;        // [B], keys that exist (seqused_k)
  int32_t packed_rows = 0, packed_keys = 0;  // lengths of query and key, packed or not

  SPARSE_ATTN_HD constexpr bool packed() const { return first_rows != nullptr; }
  /// Whether every entry has `rows` rows and `keys` keys.
  SPARSE_ATTN_HD constexpr bool same_lengths() const {
    return first_rows == nullptr && first_keys == nullptr && used_keys == nullptr;
  }
  /// Whether the device alone knows where a query stands.
  SPARSE_ATTN_HD constexpr bool offsets_on_device() const {
    return query_offsets != nullptr || !same_lengths();
  }

  SPARSE_ATTN_HD int32_t offset(int64_t b) const {
    const int32_t offset = query_offsets == nullptr ? query_offset : query_offsets[b];
    return imax(-kMaxLength, imin(offset, kMaxLength));
  }
  SPARSE_ATTN_HD int32_t origin(int64_t b) const {
    return key_origins == nullptr ? 0 : key_origins[b];
  }
  /// An entry whose text begins with key 0, where all have the same lengths and the same offset:
  /// what the host may ask for, since it reads nothing that only the device can.
  SPARSE_ATTN_HD constexpr Sequence common() const { return {rows, keys, query_offset}; }
  SPARSE_ATTN_HD Sequence of(int64_t b) const {
    Sequence sequence = {rows, keys, offset(b), origin(b)};
    if (same_lengths()) return sequence;
    if (first_rows != nullptr) {
      const Interval packed = run(first_rows, b, packed_rows);
      sequence.first_row = packed.begin;
      sequence.rows = imin(packed.size(), rows);
    }
    if (first_keys != nullptr) {
      const Interval packed = run(first_keys, b, packed_keys);
      sequence.first_key = packed.begin;
      sequence.keys = imin(packed.size(), keys);
    }
    if (used_keys != nullptr) sequence.keys = imax(0, imin(used_keys[b], sequence.keys));
    if (query_offsets == nullptr) sequence.offset = lower_right(sequence.rows, sequence.keys);
    return sequence;
  }

 private:
  /// The packed rows of entry b, inside 0 .. size.
  SPARSE_ATTN_HD static Interval run(const int32_t* first, int64_t b, int32_t size) {
    const int32_t begin = imax(0, imin(first[b], size));
    return {begin, imax(begin, imin(first[b + 1], size))};
  }
};

}  // namespace sparse_attn

// A pattern as its user states it, and the dense truth: Case::allowed(i, j) says in 64-bit
// arithmetic, term by term, whether query i sees key j. It shares nothing with csrc/pattern.h;
// Case::pattern() is the other side, the plain data that ops/ makes of the same arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "params.h"

using Side = std::optional<int64_t>;  // a window side; none is unlimited

inline std::string text_of(Side side) { return side ? std::to_string(*side) : "None"; }

/// Which blocks are visited, as the layout's user sees it and as the lists that engines read.
struct Layout {
  int block_q = 0, block_kv = 0, num_q = 0, num_kv = 0;
  std::vector<bool> mask;        // [num_q, num_kv]
  std::vector<int32_t> counts;   // [num_q]
  std::vector<int32_t> indices;  // [num_q, num_kv]

  bool present() const { return block_q > 0; }
  bool block(int row, int column) const { return mask[row * num_kv + column]; }

  void build_lists() {
    counts.assign(num_q, 0);
    indices.assign(num_q * num_kv, 0);
    for (int row = 0; row < num_q; ++row) {
      for (int column = 0; column < num_kv; ++column) {
        if (block(row, column)) indices[row * num_kv + counts[row]++] = column;
      }
    }
  }
};

struct Case {
  const char* kind = "";
  int seq_q = 1, seq_kv = 1;
  int64_t offset = 0;
  int32_t origin = 0;  // of sinks, leading global tokens and strided columns
  bool causal = false;
  Side left, right;
  int64_t dilation = 1;
  int64_t sinks = 0;
  int64_t global_count = 0;
  std::vector<bool> global_token;  // [seq_kv], empty without an index tensor
  bool columns_alone = false;      // their columns as listed leading keys; no row is global
  int64_t local = 0, stride = 0;   // strided when stride > 0
  Layout layout;
  std::vector<int32_t> bounds;  // [seq_q, 2], empty without key_bounds
  int tile_q = 1, tile_kv = 8;  // the engine's BLOCK_Q and BLOCK_KV

  std::vector<uint32_t> global_bits;  // made by prepare()
  std::vector<int32_t> global_tiles;
  int32_t num_global_tiles = 0;

  bool is_global(int64_t position) const {
    if (position < 0) return false;
    if (position >= origin && position - origin < global_count) return true;
    return position < static_cast<int64_t>(global_token.size()) && global_token[position];
  }

  bool in_window(int64_t p, int64_t j) const {
    int64_t distance = j - p;
    if (distance % dilation != 0) return false;
    int64_t taps = distance / dilation;
    return (!left || taps >= -*left) && (!right || taps <= *right);
  }

  /// The truth: the rows of the semantics table, one after another.
  bool allowed(int64_t i, int64_t j) const {
    int64_t p = i + offset;
    if (!bounds.empty() && (j < bounds[2 * i] || j >= bounds[2 * i + 1])) return false;
    if (causal && j > p) return false;
    if (layout.present()) return layout.block(i / layout.block_q, j / layout.block_kv);
    if (stride > 0) {
      return (0 <= p - j && p - j < local) ||
             (j >= origin && (j - origin) % stride == stride - 1 && j <= p);
    }
    if ((j >= origin && j - origin < sinks) || is_global(j)) return true;
    if (is_global(p) && !columns_alone) return true;
    return in_window(p, j);
  }

  sparse_attn::Pattern pattern() const {
    using sparse_attn::kUnlimited;
    auto clip = [](int64_t x) { return static_cast<int32_t>(std::min<int64_t>(x, kUnlimited)); };
    sparse_attn::Pattern pattern;
    pattern.left = left ? clip(*left) : kUnlimited;
    pattern.right = right ? clip(*right) : kUnlimited;
    pattern.dilation = clip(dilation);
    pattern.causal = causal;
    pattern.lead = {0, 1, clip(std::max(sinks, global_count))};
    pattern.global_count = clip(global_count);
    if (columns_alone) {
      pattern.lead = {0, 1, seq_kv};
      pattern.lead_keys = global_tiles.data();
      pattern.num_lead_keys = &num_global_tiles;
    } else if (!global_token.empty()) {
      pattern.global_bits = global_bits.data();
      pattern.global_tiles = global_tiles.data();
      pattern.num_global_tiles = &num_global_tiles;
    }
    if (stride > 0) {
      pattern.causal = true;
      pattern.left = clip(local) - 1;
      pattern.right = 0;
      pattern.lead = {clip(stride) - 1, clip(stride), kUnlimited};
    }
    if (layout.present()) {
      sparse_attn::BlockList& list = pattern.list;
      list.counts = layout.counts.data();
      list.indices = layout.indices.data();
      list.index_stride_q = layout.num_kv;
      list.block_q = layout.block_q;
      list.block_kv = layout.block_kv;
      list.num_q = layout.num_q;
      list.num_kv = list.max_count = layout.num_kv;
    }
    return pattern;
  }

  sparse_attn::Sequence sequence() const {
    const int64_t limit = sparse_attn::kMaxLength;
    const auto near = static_cast<int32_t>(std::max(-limit, std::min(limit, offset)));
    return {seq_q, seq_kv, near, origin};
  }

  /// Fills what the device would build: bits of the global tokens and the tiles that hold one.
  void prepare() {
    if (layout.present()) layout.build_lists();
    if (global_token.empty()) return;
    global_bits.assign((seq_kv + 31) / 32, 0);
    global_tiles.clear();
    global_tiles.reserve(seq_kv);  // an address, even of none
    const int in_tile = columns_alone ? 1 : tile_kv;
    for (int j = 0; j < seq_kv; ++j) {
      if (!global_token[j]) continue;
      global_bits[j / 32] |= 1u << (j % 32);
      if (global_tiles.empty() || global_tiles.back() != j / in_tile) {
        global_tiles.push_back(j / in_tile);
      }
    }
    num_global_tiles = static_cast<int32_t>(global_tiles.size());
  }

  std::string text() const {
    std::string s = std::string(kind) + ": Sq " + std::to_string(seq_q) + ", Skv " +
                    std::to_string(seq_kv) + ", offset " + std::to_string(offset) + ", origin " +
                    std::to_string(origin) + (causal ? ", causal" : "") + ", window (" +
                    text_of(left) + ", " + text_of(right) + "), dilation " +
                    std::to_string(dilation) + ", sinks " + std::to_string(sinks) + ", global " +
                    std::to_string(global_count) + ", tiles " + std::to_string(tile_q) + " x " +
                    std::to_string(tile_kv);
    if (!global_token.empty()) {
      s += ", tokens";
      for (int j = 0; j < seq_kv; ++j) {
        if (global_token[j]) s += " " + std::to_string(j);
      }
    }
    if (stride > 0) {
      s += ", local " + std::to_string(local) + ", stride " + std::to_string(stride);
    }
    if (layout.present()) {
      s += ", blocks " + std::to_string(layout.block_q) + " x " + std::to_string(layout.block_kv);
    }
    if (!bounds.empty()) s += ", key bounds";
    return s;
  }
};

// The floats: K and V of every token in every layer. It knows slots and nothing of sequences.
//
// Layout of a layer's K, and of its V: [num_blocks, num_kv_heads, block_size, head_dim]. One head's part of a block is
// then a dense block_size x head_dim matrix. A contiguous arena is one block as large as all slots.
#pragma once

#include <cstdint>
#include <span>

#include "common/base/memory.h"
#include "common/base/tensor.h"
#include "kv_cache_manager.h"

namespace stage6 {

struct KvCacheShape {
  int num_layers = 0;
  int num_blocks = 0;
  int block_size = 0;  // slots in a block
  int num_heads = 0;
  int num_kv_heads = 0;  // divides num_heads
  int head_dim = 0;

  int num_queries_per_kv() const { return num_heads / num_kv_heads; }
  int num_slots() const { return num_blocks * block_size; }
  // K and V, all layers and heads, of one token.
  std::int64_t bytes_per_slot() const;
};

class KvCache {
 public:
  explicit KvCache(const KvCacheShape& shape);

  const KvCacheShape& shape() const { return shape_; }

  // k, v: [slots.size(), num_kv_heads * head_dim], row i for slots[i].
  void write(int layer, std::span<const int> slots, const common::Matrix& k, const common::Matrix& v);

  // Carries the copies out, in their order: K and V of all heads, in all layers.
  void copy_blocks(std::span<const BlockCopy> copies);

  // One head's K or V in the slots first_slot … first_slot + count - 1 of one block: [count, head_dim], no copy.
  common::MatrixView keys(int layer, int head, int first_slot, int count) const;
  common::MatrixView values(int layer, int head, int first_slot, int count) const;

  // Every float of every slot becomes `value`: tests put NaN there, so that reading an unwritten slot shows.
  void fill(float value);

 private:
  // Where the vector of a layer, head and slot begins: the one place that knows the layout.
  std::size_t offset(int layer, int head, int slot) const;
  common::MatrixView view(const float* data, int layer, int head, int first_slot, int count) const;

  KvCacheShape shape_;
  // [num_layers, num_blocks, num_kv_heads, block_size, head_dim] each; the system provides a page when it is first
  // written.
  common::FloatArray keys_;
  common::FloatArray values_;
};

}  // namespace

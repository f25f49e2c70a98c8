// The floats: K and V of every token in every layer. The cache knows slots, but no sequences.
//
// Layout of a layer's K, and of its V: [num_blocks, num_kv_heads, block_size, head_dim]. One head's part of a block is
// then a dense block_size x head_dim matrix. A contiguous arena is a single block that holds all slots.
#pragma once

#include <cstdint>
#include <span>

#include "block_copy.h"
#include "common/base/memory.h"
#include "common/base/tensor.h"

namespace stage7 {

struct KvCacheShape {
  int num_layers = 0;
  int num_blocks = 0;
  int block_size = 0;  // slots in a block
  int num_heads = 0;
  int num_kv_heads = 0;  // divides num_heads
  int head_dim = 0;

  int num_queries_per_kv() const { return num_heads / num_kv_heads; }
  int num_slots() const { return num_blocks * block_size; }
  // Bytes of one token's K and V, in all layers and heads.
  std::int64_t bytes_per_slot() const;
};

class KvCache {
 public:
  explicit KvCache(const KvCacheShape& shape);

  const KvCacheShape& shape() const { return shape_; }

  // Writes some tokens' K and V of one layer. k, v: [slots.size(), num_kv_heads * head_dim]; row i goes to slots[i].
  void write(int layer, std::span<const int> slots, const common::Matrix& k, const common::Matrix& v);

  // Carries out the copies in this order; a copy has K and V of all heads, in all layers.
  void copy_blocks(std::span<const BlockCopy> copies);

  // A view of one head's K or V in slots first_slot … first_slot + count - 1 of one block: [count, head_dim], not
  // copied.
  common::MatrixView keys(int layer, int head, int first_slot, int count) const;
  common::MatrixView values(int layer, int head, int first_slot, int count) const;

  // Sets every float to `value`: tests fill the cache with NaN, so that a read of an unwritten slot shows.
  void fill(float value);

 private:
  // Index of the first float of this layer, head and slot. No other function knows the layout.
  std::size_t offset(int layer, int head, int slot) const;
  common::MatrixView view(const float* data, int layer, int head, int first_slot, int count) const;

  KvCacheShape shape_;
  // [num_layers, num_blocks, num_kv_heads, block_size, head_dim] each; the operating system provides memory as it is
  // first written.
  common::FloatArray keys_;
  common::FloatArray values_;
};

}  // namespace

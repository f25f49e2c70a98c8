// Batches of random numbers in random pages, many of them side by side in one large piece of memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/cuda/runtime/device.h"
#include "common/paged/attention_launches.h"
#include "common/paged/production_kernels.h"
#include "stage7/kernels/kernels.h"

namespace stage7 {

struct HeadShape {
  int num_heads = 32;
  int num_kv_heads = 8;
  int head_dim = 128;
  int block_size = 16;
  ScalarType type = ScalarType::kBFloat16;
};

std::string name_of(const HeadShape& shape);  // "32/8 x 128", and the block size if it is not 16

// Sequences x tokens of context. The ragged mix has sequences of 250 to 32,765 tokens, in geometric steps, shuffled.
struct BenchCell {
  int batch = 1;
  int context = 0;  // 0: ragged
  int window = 0;   // of which a call sees the last tokens; 0: all
};

std::string name_of(const BenchCell& cell);  // "8x1024", "32xragged"
BenchCell parse_cell(const std::string& text);
std::vector<int> lengths_of(const BenchCell& cell);
std::int64_t kv_bytes_of(const HeadShape& shape, const BenchCell& cell);  // K and V of one call

// How large a pool must be for all batches of a cell: twice its keys, since float8 stores nothing else.
std::int64_t pool_bytes_of(const HeadShape& shape, const BenchCell& cell);

// How many batches it takes so that none is found in the cache: an even number.
int num_sets_of(const HeadShape& shape, const BenchCell& cell);

// A permutation of 0 … size - 1, the same each time.
std::vector<int> shuffled(std::int64_t size);

// Normally distributed bfloat16 numbers, repeated after a million: they only have to be unlike zeros, on which kernels
// run faster than on real data.
std::vector<std::uint16_t> random_bf16(std::size_t size, std::uint64_t seed = 2);

// One layer's K, or its V: random numbers in every slot.
common::DeviceMemory random_pages(const PageShape& shape, std::uint64_t seed);

// The memory for K and V of everything that is measured.
struct Pool {
  // Allocates `bytes` for K and V together, or what the device has if that is less.
  explicit Pool(std::int64_t bytes);
  bool has_room_for(const HeadShape& shape, const BenchCell& cell) const;

  common::DeviceMemory keys;
  common::DeviceMemory values;
};

enum class PageOrder { kShuffled, kInOrder };

// num_sets_of batches of a cell, which share lengths but no page.
class ColdBatches {
 public:
  ColdBatches(const Pool& pool, const HeadShape& shape, const BenchCell& cell, PageOrder order = PageOrder::kShuffled);

  int count() const { return count_; }
  const Pages& pages() const { return pages_; }
  BatchArrays batch(int set) const;
  // The same memory as a cache without blocks (contiguous_attention.h). For equal lengths and pages in order.
  Pages contiguous(int set) const;
  // Random numbers for the queries. The output's contents do not matter.
  const void* queries() const { return queries_.data() != nullptr ? queries_.data() : pages_.keys; }
  void* output() const { return output_.data(); }

 private:
  int count_;
  Pages pages_;
  BatchArrays first_;
  common::DeviceArray<int> tables_;
  common::DeviceArray<int> table_starts_;
  common::DeviceArray<int> lengths_;
  common::DeviceMemory output_;
  common::DeviceMemory queries_;  // for float8, whose keys are not bfloat16 numbers
};

}  // namespace

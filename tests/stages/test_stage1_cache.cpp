// Stage 1's storage, and attention over it.
#include "tests/support/catch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/tensor.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "stage1/attention.h"
#include "stage1/kv_cache.h"
#include "stage1/kv_cache_manager.h"

using common::CheckError;
using common::Matrix;
using common::Random;
using stage1::KvCache;
using stage1::KvCacheManager;
using stage1::KvCacheShape;
using stage1::SequenceId;

namespace {

const std::string kNoProblem;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

KvCacheShape small_shape() {
  KvCacheShape shape;
  shape.num_layers = 2;
  shape.num_blocks = 3;
  shape.block_size = 4;
  shape.num_heads = 6;
  shape.num_kv_heads = 2;
  shape.head_dim = 5;
  return shape;
}

// A different float for every layer, slot, kv head and dimension, and for K and V. All are small whole numbers.
float content(const KvCacheShape& shape, bool is_value, int layer, int slot, int kv_head, int d) {
  int index = is_value ? 1 : 0;
  index = index * shape.num_layers + layer;
  index = index * shape.num_slots() + slot;
  index = index * shape.num_kv_heads + kv_head;
  return static_cast<float>(index * shape.head_dim + d);
}

// The rows for these slots: [slots.size(), num_kv_heads * head_dim].
Matrix content_rows(const KvCacheShape& shape, bool is_value, int layer, std::span<const int> slots) {
  return Matrix::NullaryExpr(static_cast<Eigen::Index>(slots.size()), Eigen::Index{shape.num_kv_heads} * shape.head_dim,
                             [&](Eigen::Index row, Eigen::Index col) {
                               return content(shape, is_value, layer, slots[static_cast<std::size_t>(row)],
                                              static_cast<int>(col) / shape.head_dim,
                                              static_cast<int>(col) % shape.head_dim);
                             });
}

void write_content(KvCache& cache, std::span<const int> slots) {
  for (int layer = 0; layer < cache.shape().num_layers; ++layer) {
    cache.write(layer, slots, content_rows(cache.shape(), false, layer, slots),
                content_rows(cache.shape(), true, layer, slots));
  }
}

// K (or V) of one position of one sequence, any layer and head: a pure function, so that nothing has to be remembered.
Matrix token_rows(const KvCacheShape& shape, int sequence, int first_position, int count, int layer, bool is_value) {
  const Eigen::Index cols = Eigen::Index{shape.num_kv_heads} * shape.head_dim;
  Matrix rows(count, cols);
  for (int i = 0; i < count; ++i) {
    const std::int64_t key =
        ((std::int64_t{sequence} * 4096 + first_position + i) * 16 + layer) * 2 + (is_value ? 1 : 0);
    Random random(static_cast<std::uint64_t>(key));
    for (Eigen::Index col = 0; col < cols; ++col) {
      rows(i, col) = static_cast<float>(random.uniform());
    }
  }
  return rows;
}

// Empty if the cache holds all of the sequence's tokens in all layers and heads, bit for bit.
std::string read_back(const KvCache& cache, const KvCacheManager& manager, SequenceId sequence) {
  const KvCacheShape& shape = cache.shape();
  const int length = manager.length(sequence);
  const int first_slot = manager.region(sequence).first;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    const Matrix k = token_rows(shape, sequence, 0, length, layer, false);
    const Matrix v = token_rows(shape, sequence, 0, length, layer, true);
    for (int head = 0; head < shape.num_heads; ++head) {
      const Eigen::Index column = Eigen::Index{head / shape.num_queries_per_kv()} * shape.head_dim;
      // NaN differs from everything, so a poisoned row cannot pass as equal.
      if (cache.keys(layer, head, first_slot, length) != k.middleCols(column, shape.head_dim) ||
          cache.values(layer, head, first_slot, length) != v.middleCols(column, shape.head_dim)) {
        return common::format("sequence %d, layer %d, head %d differs", sequence, layer, head);
      }
    }
  }
  return "";
}

// Random allocations, writes and frees over one cache; every live sequence is read back now and then. A sequence that
// ends leaves NaN in all its slots, and no id is used twice.
std::string fuzz_content(std::uint64_t seed, int num_operations) {
  KvCacheShape shape = small_shape();
  shape.num_blocks = 1;
  shape.block_size = 40;
  KvCacheManager manager(shape.num_slots());
  KvCache cache(shape);
  cache.fill(kNaN);
  Random random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random.below(static_cast<std::uint64_t>(bound))); };
  int next_id = 0;
  for (int operation = 0; operation < num_operations; ++operation) {
    const std::vector<SequenceId> live = manager.sequences();
    const int choice = below(10);
    if (live.empty() || choice < 3) {
      manager.allocate(next_id++, 1 + below(12));
    } else if (choice < 8) {
      const SequenceId sequence = live[static_cast<std::size_t>(below(static_cast<int>(live.size())))];
      const int length = manager.length(sequence);
      const int count = below(manager.capacity(sequence) - length + 1);
      const std::vector<int> slots = manager.slots(sequence, length, count);
      for (int layer = 0; layer < shape.num_layers; ++layer) {
        cache.write(layer, slots, token_rows(shape, sequence, length, count, layer, false),
                    token_rows(shape, sequence, length, count, layer, true));
      }
      manager.commit(sequence, count);
    } else {
      const SequenceId sequence = live[static_cast<std::size_t>(below(static_cast<int>(live.size())))];
      const std::vector<int> slots = manager.slots(sequence, 0, manager.capacity(sequence));
      manager.free(sequence);
      const Matrix poison = Matrix::Constant(static_cast<Eigen::Index>(slots.size()),
                                             Eigen::Index{shape.num_kv_heads} * shape.head_dim, kNaN);
      for (int layer = 0; layer < shape.num_layers; ++layer) {
        cache.write(layer, slots, poison, poison);
      }
    }
    if (below(8) == 0) {
      for (const SequenceId sequence : manager.sequences()) {
        const std::string problem = read_back(cache, manager, sequence);
        if (!problem.empty()) {
          return common::format("seed %llu, operation %d: ", static_cast<unsigned long long>(seed), operation) +
                 problem;
        }
      }
    }
  }
  return "";
}

}  // namespace

TEST_CASE("cache: one head's part of a block is dense, and the arrays are laid out as the header says") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  cache.fill(0.0F);
  const auto key_at = [&](int layer, int head, int slot) { return cache.keys(layer, head, slot, 1).data(); };
  const float* origin = key_at(0, 0, 0);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int head = 0; head < shape.num_heads; ++head) {
      for (int slot = 0; slot < shape.num_slots(); ++slot) {
        // [num_layers, num_blocks, num_heads, block_size, head_dim]
        const int block = layer * shape.num_blocks + slot / shape.block_size;
        const int row = (block * shape.num_heads + head) * shape.block_size + slot % shape.block_size;
        CAPTURE(layer, head, slot);
        CHECK(key_at(layer, head, slot) - origin == Eigen::Index{row} * shape.head_dim);
        CHECK(cache.values(layer, head, slot, 1).data() - cache.values(0, 0, 0, 1).data() ==
              Eigen::Index{row} * shape.head_dim);
      }
    }
  }
  CHECK(cache.keys(1, 2, 4, 4).rows() == 4);
  CHECK(cache.keys(1, 2, 4, 4).cols() == shape.head_dim);
  CHECK(cache.keys(1, 2, 4, 4).outerStride() == shape.head_dim);
}

TEST_CASE("cache: every slot, layer and head gives back what was written, K and V apart") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  cache.fill(kNaN);
  std::vector<int> slots(static_cast<std::size_t>(shape.num_slots()));
  std::iota(slots.begin(), slots.end(), 0);
  Random random(2);
  for (std::size_t i = slots.size(); i > 1; --i) {
    std::swap(slots[i - 1], slots[random.below(i)]);
  }
  write_content(cache, slots);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int head = 0; head < shape.num_heads; ++head) {
      for (int block = 0; block < shape.num_blocks; ++block) {
        const int first_slot = block * shape.block_size;
        const common::MatrixView k = cache.keys(layer, head, first_slot, shape.block_size);
        const common::MatrixView v = cache.values(layer, head, first_slot, shape.block_size);
        for (int row = 0; row < shape.block_size; ++row) {
          for (int d = 0; d < shape.head_dim; ++d) {
            const int kv_head = head / 3;  // 6 query heads, 2 kv heads: each is stored three times
            INFO("layer " << layer << ", head " << head << " (of kv head " << kv_head << "), block " << block
                          << ", row " << row << ", d " << d << "; what was written is numbered, K from 0, V from "
                          << content(shape, true, 0, 0, 0, 0));
            CHECK(k(row, d) == content(shape, false, layer, first_slot + row, kv_head, d));
            CHECK(v(row, d) == content(shape, true, layer, first_slot + row, kv_head, d));
          }
        }
      }
    }
  }
}

TEST_CASE("cache: a write touches its slots and its layer, nothing else") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  cache.fill(kNaN);
  const std::vector<int> slots = {5, 11, 0};
  cache.write(1, slots, content_rows(shape, false, 1, slots), content_rows(shape, true, 1, slots));
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int slot = 0; slot < shape.num_slots(); ++slot) {
      const bool written = layer == 1 && std::find(slots.begin(), slots.end(), slot) != slots.end();
      for (int head = 0; head < shape.num_heads; ++head) {
        CAPTURE(layer, slot, head);
        CHECK(cache.keys(layer, head, slot, 1).hasNaN() == !written);
        CHECK(cache.values(layer, head, slot, 1).hasNaN() == !written);
      }
    }
  }
  cache.fill(2.5F);
  CHECK((cache.keys(1, 0, 4, 4) == Matrix::Constant(4, shape.head_dim, 2.5F)));
  CHECK((cache.values(1, 5, 8, 4) == Matrix::Constant(4, shape.head_dim, 2.5F)));
}

TEST_CASE("cache: a view stays inside one block") {
  const KvCache cache(small_shape());  // 3 blocks of 4
  CHECK_NOTHROW(cache.keys(0, 0, 4, 4));
  CHECK_NOTHROW(cache.keys(0, 0, 11, 1));
  CHECK_THROWS_AS(cache.keys(0, 0, 0, 5), CheckError);
  CHECK_THROWS_AS(cache.keys(0, 0, 3, 2), CheckError);
  CHECK_THROWS_AS(cache.values(0, 0, 7, 2), CheckError);
  CHECK_THROWS_AS(cache.values(0, 0, 12, 1), CheckError);
  CHECK_THROWS_AS(cache.keys(0, 0, -1, 1), CheckError);
  CHECK_THROWS_AS(cache.keys(0, 0, 0, -1), CheckError);
}

TEST_CASE("cache: wrong shapes and slots are noticed") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  const Matrix right = Matrix::Zero(2, 10);  // two tokens, 2 kv heads of 5
  const std::vector<int> slots = {1, 2};
  CHECK_NOTHROW(cache.write(0, slots, right, right));
  CHECK_THROWS_AS(cache.write(0, slots, Matrix::Zero(2, 30), right), CheckError);  // all query heads
  CHECK_THROWS_AS(cache.write(0, slots, right, Matrix::Zero(2, 30)), CheckError);
  CHECK_THROWS_AS(cache.write(0, slots, Matrix::Zero(3, 10), Matrix::Zero(3, 10)), CheckError);
  CHECK_THROWS_AS(cache.write(0, slots, right, Matrix::Zero(1, 10)), CheckError);
  CHECK_THROWS_AS(cache.write(0, std::vector<int>{1, 12}, right, right), CheckError);
  CHECK_THROWS_AS(cache.write(0, std::vector<int>{-1, 1}, right, right), CheckError);

  KvCacheShape uneven = shape;
  uneven.num_kv_heads = 4;
  CHECK_THROWS_AS(KvCache(uneven), CheckError);
  KvCacheShape empty = shape;
  empty.num_blocks = 0;
  CHECK_THROWS_AS(KvCache(empty), CheckError);
}

TEST_CASE("cache: bytes of a slot, by hand") {
  // K and V, 2 layers, 6 heads of 5 floats of 4 bytes: the copies for query heads count.
  CHECK(small_shape().bytes_per_slot() == std::int64_t{2} * 2 * 6 * 5 * 4);
  CHECK(small_shape().num_slots() == 12);
  CHECK(small_shape().num_queries_per_kv() == 3);
}

TEST_CASE("cache: what sequences hold survives any order of writes and frees") {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CHECK(fuzz_content(seed, 3000) == kNoProblem);
  }
}

TEST_CASE("attention: wrong shapes are noticed") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  cache.fill(1.0F);
  CHECK_NOTHROW(stage1::attention(cache, 0, Matrix::Zero(2, 30), 0, 4));
  CHECK_THROWS_AS(stage1::attention(cache, 0, Matrix::Zero(2, 10), 0, 4), CheckError);  // kv heads' width
  CHECK_THROWS_AS(stage1::attention(cache, 0, Matrix::Zero(5, 30), 0, 4), CheckError);  // more queries than tokens
  CHECK_THROWS_AS(stage1::attention(cache, 0, Matrix::Zero(2, 30), 2, 4), CheckError);  // leaves the block
}

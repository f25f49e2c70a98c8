// How often attention reads: its source is compiled once more, over a cache that counts.
#include "tests/support/catch.h"

#include <array>
#include <atomic>
#include <vector>

#include "common/base/tensor.h"
#include "stage4/kv_cache.h"

namespace stage4 {

// A KvCache of zeros, as attention sees it. Heads are divided among threads.
class CountingCache {
 public:
  explicit CountingCache(const KvCacheShape& shape) : cache_(shape) {}

  const KvCacheShape& shape() const { return cache_.shape(); }
  common::MatrixView keys(int layer, int head, int first_slot, int count) const {
    key_rows_ += count;
    return cache_.keys(layer, head, first_slot, count);
  }
  common::MatrixView values(int layer, int head, int first_slot, int count) const {
    value_rows_ += count;
    return cache_.values(layer, head, first_slot, count);
  }

  int key_rows() const { return key_rows_; }
  int value_rows() const { return value_rows_; }

 private:
  KvCache cache_;
  mutable std::atomic<int> key_rows_ = 0;
  mutable std::atomic<int> value_rows_ = 0;
};

}  // namespace

#define KvCache CountingCache
#define OnlineSoftmax CountedSoftmax
#define attention counted_attention
#include "stage4/attention.cpp"  // NOLINT(bugprone-suspicious-include)
#undef KvCache
#undef OnlineSoftmax
#undef attention

TEST_CASE("a block is read once for all query heads of its group") {
  constexpr int kLength = 11;
  constexpr int kHeadDim = 8;
  const std::vector<int> block_table = {2, 0, 3};
  for (const std::array<int, 2> heads : {std::array{8, 2}, {6, 2}, {5, 1}, {4, 4}}) {
    for (const int num_queries : {1, 5, kLength}) {
      const auto [num_heads, num_kv_heads] = heads;
      const stage4::CountingCache cache({.num_layers = 1,
                                         .num_blocks = 4,
                                         .block_size = 4,
                                         .num_heads = num_heads,
                                         .num_kv_heads = num_kv_heads,
                                         .head_dim = kHeadDim});
      const common::Matrix q = common::Matrix::Zero(num_queries, Eigen::Index{num_heads} * kHeadDim);
      stage4::counted_attention(cache, 0, q, block_table, kLength);
      // Rows of K and of V, a token's in one kv head each.
      const int rows_read_once = num_kv_heads * kLength;
      const int key_rows = cache.key_rows();
      const int value_rows = cache.value_rows();
      CAPTURE(num_heads, num_kv_heads, num_queries);
      CHECK(key_rows == rows_read_once);
      CHECK(value_rows == rows_read_once);
    }
  }
}

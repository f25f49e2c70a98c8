#include "kv_cache.h"

#include <algorithm>
#include <string>

#include "common/base/check.h"

namespace stage3 {

std::int64_t KvCacheShape::bytes_per_slot() const {
  return std::int64_t{2} * num_layers * num_heads * head_dim * static_cast<std::int64_t>(sizeof(float));
}

KvCache::KvCache(const KvCacheShape& shape) : shape_(shape) {
  COMMON_CHECK(shape.num_layers > 0 && shape.num_blocks > 0 && shape.block_size > 0 && shape.head_dim > 0,
               "a size of the cache's shape is not positive");
  COMMON_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0,
               "num_heads is not a multiple of num_kv_heads");
  const std::size_t size = offset(shape.num_layers, 0, 0);
  keys_ = common::allocate_floats(size);
  values_ = common::allocate_floats(size);
}

std::size_t KvCache::offset(int layer, int head, int slot) const {
  const auto block_size = static_cast<std::size_t>(shape_.block_size);
  const auto head_dim = static_cast<std::size_t>(shape_.head_dim);
  const auto num_heads = static_cast<std::size_t>(shape_.num_heads);
  const std::size_t block = static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.num_blocks) +
                            static_cast<std::size_t>(slot) / block_size;
  const std::size_t row = static_cast<std::size_t>(slot) % block_size;
  return ((block * num_heads + static_cast<std::size_t>(head)) * block_size + row) * head_dim;
}

void KvCache::write(int layer, std::span<const int> slots, const common::Matrix& k, const common::Matrix& v) {
  const Eigen::Index kv_cols = Eigen::Index{shape_.num_kv_heads} * shape_.head_dim;
  COMMON_CHECK(k.rows() == static_cast<Eigen::Index>(slots.size()) && k.cols() == kv_cols, "k has the wrong shape");
  COMMON_CHECK(v.rows() == k.rows() && v.cols() == kv_cols, "v has the wrong shape");
  COMMON_CHECK(layer >= 0 && layer < shape_.num_layers, "no such layer");
  for (std::size_t token = 0; token < slots.size(); ++token) {
    const int slot = slots[token];
    COMMON_CHECK(slot >= 0 && slot < shape_.num_slots(), "slot " + std::to_string(slot) + " is not in the cache");
    const float* k_row = k.row(static_cast<Eigen::Index>(token)).data();
    const float* v_row = v.row(static_cast<Eigen::Index>(token)).data();
    for (int head = 0; head < shape_.num_heads; ++head) {
      const int kv_head = head / shape_.num_queries_per_kv();
      std::copy_n(k_row + kv_head * shape_.head_dim, shape_.head_dim, keys_.get() + offset(layer, head, slot));
      std::copy_n(v_row + kv_head * shape_.head_dim, shape_.head_dim, values_.get() + offset(layer, head, slot));
    }
  }
}

common::MatrixView KvCache::keys(int layer, int head, int first_slot, int count) const {
  return view(keys_.get(), layer, head, first_slot, count);
}

common::MatrixView KvCache::values(int layer, int head, int first_slot, int count) const {
  return view(values_.get(), layer, head, first_slot, count);
}

void KvCache::fill(float value) {
  const std::size_t size = offset(shape_.num_layers, 0, 0);
  std::fill_n(keys_.get(), size, value);
  std::fill_n(values_.get(), size, value);
}

common::MatrixView KvCache::view(const float* data, int layer, int head, int first_slot, int count) const {
  COMMON_CHECK(layer >= 0 && layer < shape_.num_layers && head >= 0 && head < shape_.num_heads,
               "no such layer or head");
  COMMON_CHECK(first_slot >= 0 && count >= 0 && count <= shape_.block_size - first_slot % shape_.block_size &&
                   first_slot <= shape_.num_slots() - count,
               "a view stays inside one block");
  return {data + offset(layer, head, first_slot), count, shape_.head_dim};
}

}  // namespace

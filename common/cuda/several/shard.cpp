#include "common/cuda/several/shard.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {

std::string why_not_shared(const LlamaConfig& config, int count) {
  const std::array<std::pair<int, const char*>, 4> sizes = {{{config.num_heads, "query heads"},
                                                             {config.num_kv_heads, "kv heads"},
                                                             {config.feed_forward_size, "feed-forward columns"},
                                                             {config.vocab_size, "tokens of the vocabulary"}}};
  for (const auto& [size, what] : sizes) {
    if (size % count != 0) {
      return format("%d GPUs can't share %d %s evenly", count, size, what);
    }
  }
  return "";
}

LlamaConfig shard_config(const LlamaConfig& config, int count) {
  LlamaConfig own = config;
  own.num_heads /= count;
  own.num_kv_heads /= count;
  own.feed_forward_size /= count;
  own.vocab_size /= count;
  return own;
}

LlamaWeights shard_rows(const LlamaWeights& weights, const LlamaConfig& config, const Shard& shard) {
  COMMON_CHECK(why_not_shared(config, shard.count).empty(), "the model can be shared out");
  // The shard's rows of each of the parts that lie below each other.
  const auto rows_of = [&](const WeightMatrix& whole, const auto&... part_rows) {
    WeightMatrix own;
    Eigen::Index first = 0;
    for (const Eigen::Index rows : {Eigen::Index{part_rows}...}) {
      own.append_rows(whole, first + rows / shard.count * shard.rank, rows / shard.count);
      first += rows;
    }
    return own;
  };
  const Eigen::Index q_rows = Eigen::Index{config.num_heads} * config.head_dim;
  const Eigen::Index kv_rows = Eigen::Index{config.num_kv_heads} * config.head_dim;
  LlamaWeights own = weights;
  own.embedding = rows_of(weights.embedding, config.vocab_size);
  own.output = rows_of(weights.output, config.vocab_size);
  for (std::size_t i = 0; i < own.layers.size(); ++i) {
    const LlamaLayer& whole = weights.layers[i];
    own.layers[i].qkv = rows_of(whole.qkv, q_rows, kv_rows, kv_rows);
    own.layers[i].gate_up = rows_of(whole.gate_up, config.feed_forward_size, config.feed_forward_size);
    if (config.qkv_bias) {
      const Eigen::Index q = q_rows / shard.count;
      const Eigen::Index kv = kv_rows / shard.count;
      own.layers[i].qkv_bias.resize(q + 2 * kv);
      own.layers[i].qkv_bias << whole.qkv_bias.segment(q * shard.rank, q),
          whole.qkv_bias.segment(q_rows + kv * shard.rank, kv),
          whole.qkv_bias.segment(q_rows + kv_rows + kv * shard.rank, kv);
    }
  }
  return own;
}

}  // namespace common

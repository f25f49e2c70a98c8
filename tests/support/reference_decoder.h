// Generation without a cache of blocks: keys and values are plain growing matrices, attention is in float64. Tests of
// the model use it, so that their results do not depend on any stage.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "common/base/tensor.h"
#include "common/math/sampling.h"
#include "common/model/llama.h"
#include "tests/support/reference_attention.h"

namespace tests {

// Appends the rows of `tail` to `matrix`, which may be empty.
inline void append_rows(common::Matrix& matrix, const common::Matrix& tail) {
  const Eigen::Index rows = matrix.rows();
  matrix.conservativeResize(rows + tail.rows(), tail.cols());
  matrix.bottomRows(tail.rows()) = tail;
}

// One sequence's keys and values of all layers.
class ReferenceCache {
 public:
  explicit ReferenceCache(const common::LlamaConfig& config)
      : config_(config),
        keys_(static_cast<std::size_t>(config.num_layers)),
        values_(static_cast<std::size_t>(config.num_layers)) {}

  // The q, k and v of an AttentionFn: appends k and v, then attends, so that a token sees itself.
  common::Matrix attend(int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
    common::Matrix& keys = keys_.at(static_cast<std::size_t>(layer));
    common::Matrix& values = values_.at(static_cast<std::size_t>(layer));
    append_rows(keys, k);
    append_rows(values, v);
    const std::vector<double> attended = tests::reference_attention(
        q, keys, values, config_.num_heads, config_.num_kv_heads, config_.head_dim, config_.window_of(layer));
    common::Matrix result(q.rows(), q.cols());
    std::transform(attended.begin(), attended.end(), result.data(), [](double x) { return static_cast<float>(x); });
    return result;
  }

  // Tokens whose keys and values are here. During a forward pass, the last layer's lag behind.
  int length() const { return static_cast<int>(keys_.back().rows()); }

 private:
  common::LlamaConfig config_;
  std::vector<common::Matrix> keys_;    // per layer: [length, num_kv_heads * head_dim]
  std::vector<common::Matrix> values_;  // per layer: [length, num_kv_heads * head_dim]
};

// The logits of the next tokens of a sequence: [tokens.size(), vocab_size]. The first one's position is cache.length().
inline common::Matrix next_logits(const common::Llama& model, ReferenceCache& cache,
                                  std::span<const common::Token> tokens) {
  std::vector<int> positions;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    positions.push_back(cache.length() + static_cast<int>(i));
  }
  const auto attention = [&cache](int layer, const common::Matrix& q, const common::Matrix& k,
                                  const common::Matrix& v) { return cache.attend(layer, q, k, v); };
  return model.logits(model.forward(tokens, positions, attention));
}

// Row-major and without gaps, so a row is a span.
inline std::span<const float> row_of(const common::Matrix& matrix, Eigen::Index row) {
  return {matrix.row(row).data(), static_cast<std::size_t>(matrix.cols())};
}

// The gap between the largest and the second-largest logit: how far a greedy choice is from going the other way.
inline double top_margin(std::span<const float> logits) {
  float first = -std::numeric_limits<float>::infinity();
  float second = first;
  for (const float logit : logits) {
    second = std::max(second, std::min(first, logit));
    first = std::max(first, logit);
  }
  return static_cast<double>(first) - static_cast<double>(second);
}

struct GreedyStep {
  common::Token token = 0;
  double margin = 0.0;
};

// The greedy continuation, one token at a time. A stop token ends it and is its last step.
inline std::vector<GreedyStep> decode_greedily(const common::Llama& model, std::span<const common::Token> prompt,
                                               int max_new_tokens, std::optional<common::Token> stop = {}) {
  ReferenceCache cache(model.config());
  std::vector<GreedyStep> steps;
  common::Matrix logits = next_logits(model, cache, prompt);
  while (true) {
    const std::span<const float> last = row_of(logits, logits.rows() - 1);
    steps.push_back({common::argmax(last), top_margin(last)});
    if (static_cast<int>(steps.size()) == max_new_tokens || steps.back().token == stop) {
      return steps;
    }
    logits = next_logits(model, cache, std::span(&steps.back().token, 1));
  }
}

}  // namespace tests

// Two neighbouring stages in one program: the same tokens go through both, and what comes out is compared.
//
// The stages' types have the same names in two namespaces, so that one template drives either of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/tensor.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/attention_inputs.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"

// TESTS_STAGE(Blocks, stage2) makes a type Blocks that carries what the templates below need of stage 2.
#define TESTS_STAGE(name, stage_namespace)                           \
  struct name {                                                      \
    using KvCache = stage_namespace::KvCache;                        \
    using KvCacheManager = stage_namespace::KvCacheManager;          \
    using KvCacheShape = stage_namespace::KvCacheShape;              \
    using Engine = stage_namespace::Engine;                          \
    using EngineOptions = stage_namespace::EngineOptions;            \
    template <typename... Arguments>                                 \
    static common::Matrix attention(const Arguments&... arguments) { \
      return stage_namespace::attention(arguments...);               \
    }                                                                \
  }

namespace tests {

// Stage 1 knows regions; from stage 2 on a sequence has a block table.
template <typename Stage>
inline constexpr bool kIsContiguous = requires(const typename Stage::KvCacheManager& manager) {
  manager.region(0);
};

// One sequence in a cache of its own, with blocks in an order without pattern, and NaN in slots that were not written.
template <typename Stage>
class OneSequence {
 public:
  OneSequence(const AttentionShape& shape, int block_size, int max_length)
      : OneSequence(shape, (max_length + block_size - 1) / block_size + 3, block_size, max_length) {}

  // Returns the outputs, layer by layer.
  std::vector<common::Matrix> append(const TokenInputs& inputs) {
    const auto num_tokens = static_cast<int>(inputs.front().q.rows());
    REQUIRE(manager_.reserve(0, num_tokens));
    const int length = manager_.length(0);
    const std::vector<int> slots = manager_.slots(0, length, num_tokens);
    std::vector<common::Matrix> outputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto& [q, k, v] = inputs[i];
      const auto layer = static_cast<int>(i);
      cache_.write(layer, slots, k, v);
      if constexpr (kIsContiguous<Stage>) {
        outputs.push_back(Stage::attention(cache_, layer, q, manager_.region(0).first, length + num_tokens));
      } else {
        outputs.push_back(Stage::attention(cache_, layer, q, manager_.block_table(0), length + num_tokens));
      }
    }
    manager_.commit(0, num_tokens);
    return outputs;
  }

 private:
  OneSequence(const AttentionShape& shape, int num_blocks, int block_size, int max_length)
      : manager_(make_manager(num_blocks, block_size)), cache_(cache_shape(shape, num_blocks, block_size)) {
    cache_.fill(std::numeric_limits<float>::quiet_NaN());
    if constexpr (kIsContiguous<Stage>) {
      REQUIRE(manager_.allocate(1, 3));  // so that the region does not begin at slot 0
      REQUIRE(manager_.allocate(0, max_length));
    } else {
      shuffle_free_blocks(num_blocks);
      REQUIRE(manager_.allocate(0, 1));
    }
  }

  static typename Stage::KvCacheManager make_manager(int num_blocks, int block_size) {
    if constexpr (kIsContiguous<Stage>) {
      return typename Stage::KvCacheManager(num_blocks * block_size + 3);
    } else {
      return {num_blocks, block_size};
    }
  }

  static typename Stage::KvCacheShape cache_shape(const AttentionShape& shape, int num_blocks, int block_size) {
    return kIsContiguous<Stage> ? cache_shape_of<typename Stage::KvCacheShape>(shape, 1, num_blocks * block_size + 3)
                                : cache_shape_of<typename Stage::KvCacheShape>(shape, num_blocks, block_size);
  }

  void shuffle_free_blocks(int num_blocks) {
    std::vector<int> order;
    for (int sequence = 0; sequence < num_blocks; ++sequence) {
      REQUIRE(manager_.allocate(sequence, 1));
      order.push_back(sequence);
    }
    common::Random random(static_cast<std::uint64_t>(num_blocks));
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[random.below(i)]);
    }
    for (const int sequence : order) {
      manager_.free(sequence);
    }
  }

  typename Stage::KvCacheManager manager_;
  typename Stage::KvCache cache_;
};

inline std::span<const float> values_of(const common::Matrix& matrix) {
  return {matrix.data(), static_cast<std::size_t>(matrix.size())};
}

// Empty if all layers agree: bit for bit if there is no tolerance, otherwise within it.
inline std::string compare_layers(const std::vector<common::Matrix>& actual,
                                  const std::vector<common::Matrix>& expected,
                                  const std::optional<tests::Tolerance>& tolerance, const char* what = "layer") {
  for (std::size_t layer = 0; layer < expected.size(); ++layer) {
    const std::string difference =
        tolerance.has_value() ? tests::compare(values_of(actual[layer]), values_of(expected[layer]), *tolerance)
                              : tests::compare_bits(values_of(actual[layer]), values_of(expected[layer]));
    if (!difference.empty()) {
      return common::format("%s %zu: ", what, layer) + difference;
    }
  }
  return "";
}

// The same for what engine_logits returns.
inline std::string compare_logits(const std::vector<common::Matrix>& actual,
                                  const std::vector<common::Matrix>& expected,
                                  const std::optional<tests::Tolerance>& tolerance) {
  const std::string difference = compare_layers(actual, expected, tolerance, "logits of append");
  return difference.empty() ? "" : difference + " (append 0 is the prompt, each further one a token)";
}

// How a sequence arrives: a prompt in chunks, then one token at a time.
struct Arrival {
  int prompt = 0;
  int chunk_size = 0;
  int num_decoded = 0;

  int length() const { return prompt + num_decoded; }
  std::vector<int> chunks() const {
    std::vector<int> result;
    for (int first = 0; first < prompt; first += chunk_size) {
      result.push_back(std::min(chunk_size, prompt - first));
    }
    result.insert(result.end(), static_cast<std::size_t>(num_decoded), 1);
    return result;
  }
};

// Runs the same random tokens through both stages. Empty if every output agreed.
template <typename Before, typename After>
std::string compare_stages(const AttentionShape& shape, int block_size, const Arrival& arrival, bool bits) {
  OneSequence<Before> before(shape, block_size, arrival.length());
  OneSequence<After> after(shape, block_size, arrival.length());
  common::Random random(static_cast<std::uint64_t>(arrival.length()) * 100 + static_cast<std::uint64_t>(block_size));
  int length = 0;
  for (const int num_tokens : arrival.chunks()) {
    const TokenInputs inputs = random_inputs(shape, num_tokens, random);
    length += num_tokens;
    const std::vector<common::Matrix> expected = before.append(inputs);
    std::optional<tests::Tolerance> tolerance;
    if (!bits) {
      // Each stage may be off by that much, and in different directions.
      tolerance = rounding_tolerance(shape, length);
      tolerance->absolute *= 2.0;
    }
    const std::string difference = compare_layers(after.append(inputs), expected, tolerance);
    if (!difference.empty()) {
      return common::format("%d heads on %d of %d, block size %d, %d new tokens of %d, ", shape.num_heads,
                            shape.num_kv_heads, shape.head_dim, block_size, num_tokens, length) +
             difference;
    }
  }
  return "";
}

// Attention is the same to the last bit, for prompts in chunks of any size and blocks of any size.
template <typename Before, typename After>
void check_same_attention() {
  for (const AttentionShape& shape : {AttentionShape{4, 2, 32, 1}, AttentionShape{3, 1, 33, 2}}) {
    for (const int block_size : {1, 3, 16, 64}) {
      for (const int chunk_size : {37, 1, 7}) {
        CHECK(compare_stages<Before, After>(shape, block_size, Arrival{37, chunk_size, 2}, true) == std::string());
      }
    }
  }
}

// Random operations in a pool that is too small give the same blocks and the same refusals.
template <typename Before, typename After>
void check_same_blocks() {
  typename Before::KvCacheManager before(7, 3);
  typename After::KvCacheManager after(7, 3);
  common::Random random(11);
  for (int step = 0; step < 2000; ++step) {
    const auto sequence = static_cast<int>(random.below(4));
    const auto count = static_cast<int>(random.below(6)) + 1;
    if (!before.contains(sequence)) {
      REQUIRE(before.allocate(sequence, count) == after.allocate(sequence, count));
    } else if (random.below(4) == 0) {
      before.free(sequence);
      after.free(sequence);
    } else {
      const bool reserved = before.reserve(sequence, count);
      REQUIRE(after.reserve(sequence, count) == reserved);
      if (reserved) {
        before.commit(sequence, count);
        after.commit(sequence, count);
      }
    }
    REQUIRE(after.pending_copies().empty());
    REQUIRE(after.free_blocks() == before.free_blocks());
    if (before.contains(sequence)) {
      REQUIRE(after.block_table(sequence) == before.block_table(sequence));
    }
    REQUIRE(after.usage().used == before.usage().used);
    REQUIRE(after.usage().reserved == before.usage().reserved);
  }
}

// The K and V of an engine: its own up to stage 6, its runner's from then on.
template <typename Stage>
typename Stage::KvCache& kv_cache(typename Stage::Engine& engine) {
  if constexpr (requires { typename Stage::CpuRunner; }) {
    return dynamic_cast<typename Stage::CpuRunner&>(engine.runner()).kv_cache();
  } else {
    return engine.cache();
  }
}

// The logits of a prompt and of some tokens after it, computed through Engine::append.
template <typename Stage>
std::vector<common::Matrix> engine_logits(const typename Stage::EngineOptions& options, int prompt, int num_decoded) {
  typename Stage::Engine engine(small_model(), options);
  kv_cache<Stage>(engine).fill(std::numeric_limits<float>::quiet_NaN());
  REQUIRE(engine.manager().allocate(0, prompt + num_decoded));
  const std::vector<common::Token> tokens = make_request(prompt + num_decoded, 1).prompt;
  std::vector<common::Matrix> result;
  for (int first = 0, count = prompt; first < prompt + num_decoded; first += count, count = 1) {
    const std::span<const common::Token> all(tokens);
    const std::optional<common::Matrix> logits =
        engine.append(0, all.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
    REQUIRE(logits.has_value());
    result.push_back(*logits);
  }
  return result;
}

}  // namespace tests

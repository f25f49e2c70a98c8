// A tiny model and requests for it, for tests of engines: its texts are nonsense, and always the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/generation.h"
#include "common/model/llama.h"
#include "tests/support/messages.h"

namespace tests {

inline constexpr int kSmallVocabulary = 61;
inline constexpr int kSmallContext = 48;

// Few random weights, with the vocabulary and context of this configuration; two query heads share a kv head.
inline common::Llama narrow_model(common::LlamaConfig config) {
  config.hidden_size = 32;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.feed_forward_size = 48;
  return common::Llama(config, 1);
}

inline const common::Llama& small_model() {
  static const common::Llama model = narrow_model({.vocab_size = kSmallVocabulary, .context_length = kSmallContext});
  return model;
}

// num_tokens tokens that depend on `salt`.
inline common::Request make_request(int num_tokens, int max_new_tokens, int salt = 0) {
  common::Request request;
  for (int i = 0; i < num_tokens; ++i) {
    request.prompt.push_back((7 * i + 13 * salt + 3) % kSmallVocabulary);
  }
  request.max_new_tokens = max_new_tokens;
  return request;
}

// Where two texts differ first: "differs from token 4 on (17, expected 23)". Empty if they are equal.
inline std::string first_difference(const std::vector<common::Token>& actual,
                                    const std::vector<common::Token>& expected) {
  const auto [left, right] = std::mismatch(actual.begin(), actual.end(), expected.begin(), expected.end());
  if (left == actual.end() && right == expected.end()) {
    return "";
  }
  if (left == actual.end() || right == expected.end()) {
    return common::format("has %zu tokens, expected %zu", actual.size(), expected.size());
  }
  return common::format("differs from token %td on (%d, expected %d)", left - actual.begin(), *left, *right);
}

// "1 preemption", "2 preemptions".
inline std::string count_of(int count, const std::string& thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
}

// What a wrong text points to, after this many preemptions.
inline std::string text_hint(int num_preemptions) {
  if (num_preemptions == 0) {
    return ", without a preemption: do all its positions lead to its own slots?";
  }
  return ", after " + count_of(num_preemptions, "preemption") + ": are its generated tokens computed again?";
}

template <typename Action>
bool is_refused_as_a_bug(const Action& action) {
  try {
    action();
  } catch (const common::CheckError&) {
    return true;
  }
  return false;
}

}  // namespace tests

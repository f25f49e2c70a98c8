// A tiny model and requests for it, for tests of engines: what it writes is nonsense, and always the same.
#pragma once

#include <string>

#include "common/base/check.h"
#include "common/model/generation.h"
#include "common/model/llama.h"

namespace tests {

inline constexpr int kSmallVocabulary = 61;
inline constexpr int kSmallContext = 48;

// Random weights; two query heads share a kv head.
inline const common::Llama& small_model() {
  static const common::Llama model = [] {
    common::LlamaConfig config;
    config.vocab_size = kSmallVocabulary;
    config.context_length = kSmallContext;
    config.hidden_size = 32;
    config.num_layers = 2;
    config.num_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim = 8;
    config.feed_forward_size = 48;
    return common::Llama(config, 1);
  }();
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

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

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

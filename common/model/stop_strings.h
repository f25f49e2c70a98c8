// Texts that end a reply and are no part of it. They are texts, not tokens: one may begin and end within tokens.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/tensor.h"

namespace common {

// Copies share the texts: each request, text and stream of a reply has one.
class StopStrings {
 public:
  // The bytes of tokens, as Tokenizer::decode gives them.
  using Decode = std::function<std::string(std::span<const Token>)>;

  StopStrings() = default;  // none
  // As in vLLM, no string counts that ends within the text of the reply's first min_tokens tokens.
  // Throws InputError on an empty string, which would end every reply.
  StopStrings(std::vector<std::string> strings, Decode decode, int min_tokens = 0);

  bool empty() const { return strings_ == nullptr; }
  // Whether the reply's last token completes one of them. To be asked after every token.
  bool found_after(std::span<const Token> reply) const;
  int min_tokens() const { return min_tokens_; }
  // The bytes of the reply's text in which no end of a string counts.
  std::size_t num_passed(std::span<const Token> reply) const;
  // Of the strings that end after the text's first num_passed bytes, the first in the text; of several that begin at
  // the same place, the first that was given.
  std::optional<std::string> first_in(std::string_view text, std::size_t num_passed = 0) const;
  // The text up to the first of them.
  std::string cut(std::string_view text, std::size_t num_passed = 0) const;
  // How many bytes of the text may be shown while more may follow: all but an end that may turn out to be the beginning
  // of a stop string.
  std::size_t safe_length(std::string_view text) const;

 private:
  const std::vector<std::string>& strings() const;

  std::shared_ptr<const std::vector<std::string>> strings_;  // null: none
  std::size_t max_size_ = 0;
  Decode decode_;
  int min_tokens_ = 0;
};

// A reply's text while it is generated. What may be part of a stop string, or is the first part of a character, is held
// back until later tokens decide.
class ReplyStream {
 public:
  ReplyStream(StopStrings stop_strings, StopStrings::Decode decode)
      : stop_strings_(std::move(stop_strings)), decode_(std::move(decode)) {}

  // The text that the token adds to what may be shown. Empty once a stop string is complete.
  std::string add(Token token);
  // To be called at the end: what was held back, unless a stop string has ended the reply.
  std::string finish();
  bool is_stopped() const { return is_stopped_; }

 private:
  StopStrings stop_strings_;
  StopStrings::Decode decode_;
  std::string held_;
  int num_tokens_ = 0;
  std::size_t num_passed_ = 0;  // bytes of held_ in which no stop string ends
  bool is_stopped_ = false;
};

}  // namespace common

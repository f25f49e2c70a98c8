// What a tokenizer makes of a text, to be read in a test.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/tokenizer.h"

namespace tests {

// The spellings of a text's tokens, with a bar between two. vocabulary: all spellings, by token.
inline std::string spellings_of(const common::Tokenizer& tokenizer, const std::vector<std::string>& vocabulary,
                                std::string_view text, bool parse_special) {
  std::string result;
  for (const common::Token token : tokenizer.encode(text, parse_special)) {
    result += (result.empty() ? "" : "|") + vocabulary[static_cast<std::size_t>(token)];
  }
  return result;
}

}  // namespace tests

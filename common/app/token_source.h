// Prompts of any length for demonstrations: a session's prompts, joined and repeated.
#pragma once

#include <cstddef>
#include <vector>

#include "common/app/cli.h"

namespace common {

class TokenSource {
 public:
  // vocab_size: of the model that is to read the tokens.
  TokenSource(const Session& session, int vocab_size) : vocab_size_(vocab_size) {
    for (const Request& request : session.requests) {
      tokens_.insert(tokens_.end(), request.prompt.begin(), request.prompt.end());
    }
  }

  // `count` tokens. The first one depends on the index, so that no two prompts begin alike.
  std::vector<Token> take(int index, int count) const {
    std::vector<Token> result = {index % vocab_size_};
    for (std::size_t i = 1; i < static_cast<std::size_t>(count); ++i) {
      result.push_back(tokens_[(i + 31 * static_cast<std::size_t>(index)) % tokens_.size()] % vocab_size_);
    }
    return result;
  }

 private:
  int vocab_size_;
  std::vector<Token> tokens_;
};

}  // namespace common

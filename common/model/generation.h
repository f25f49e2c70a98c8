// What goes into an engine and what comes out, the same in all stages.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/tensor.h"
#include "common/math/sampling.h"

namespace common {

struct Request {
  std::vector<Token> prompt;  // at least one token
  int max_new_tokens = 0;     // at least 1
  SamplingOptions sampling;
  int sample_index = 0;            // which of the texts that can be drawn from this prompt and seed
  std::vector<Token> stop_tokens;  // ends the text; not part of it
  std::uint64_t cache_salt = 0;    // requests of different salts never share what a prefix cache holds
};

enum class FinishReason {
  kLength,     // max_new_tokens were generated
  kStop,       // a stop token came
  kRejected,   // never ran: `error` says why
  kCancelled,  // somebody wished so
  kFailed,     // something went wrong on the way: `error` says what
};

struct Completion {
  std::vector<Token> tokens;  // generated ones only
  FinishReason finish_reason = FinishReason::kRejected;
  std::string error;
};

// A number that a run reports; the name is its key in JSON ("slots_used") and, with spaces, its row in the report.
struct Counter {
  std::string name;
  double value = 0.0;
};

// The value of that name, which must be there.
double counter(const std::vector<Counter>& counters, std::string_view name);

// Where the time went: a prompt is computed many tokens a pass, a reply one token a pass.
struct Timing {
  std::int64_t prefill_tokens = 0;
  std::int64_t decode_tokens = 0;
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;

  // Books one computation of num_tokens new tokens of a sequence.
  void add(std::size_t num_tokens, double seconds) {
    (num_tokens > 1 ? prefill_tokens : decode_tokens) += static_cast<std::int64_t>(num_tokens);
    (num_tokens > 1 ? prefill_seconds : decode_seconds) += seconds;
  }

  double milliseconds_per_token() const {  // of a reply
    return decode_tokens == 0 ? 0.0 : 1e3 * decode_seconds / static_cast<double>(decode_tokens);
  }
};

// Called for each generated token as it comes: index of the request, the token.
using OnToken = std::function<void(int request, Token token)>;

}  // namespace common

// The input and output of an engine, the same in all stages.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/tensor.h"
#include "common/math/sampling.h"
#include "common/model/stop_strings.h"

namespace common {

inline constexpr int kMaxDrafts = 8;  // of a text, in a step

struct Request {
  std::vector<Token> prompt;  // at least one token
  int max_new_tokens = 0;     // at least 1
  SamplingOptions sampling;
  int sample_index = 0;            // distinguishes several samples of one prompt with one seed
  std::vector<Token> stop_tokens;  // each ends the text and is not part of it
  std::uint64_t cache_salt = 0;    // requests with different salts never share blocks of a prefix cache
  StopStrings stop_strings = {};   // each ends the text: the token that completes it is the last one
  int num_logprobs = 0;            // log-probabilities of each token and of this many most likely ones; 0: none
  int min_tokens = 0;              // no stop token is drawn before this many tokens; stop_strings have their own
  // The reply begins with these, whatever the logits say: so a given text's log-probabilities are found.
  std::vector<Token> forced = {};
  // So many of the prompt's last tokens get log-probabilities too: the first ones of Completion::logprobs. For an
  // engine that scores a prompt with the steps that compute it.
  int num_scored = 0;
  // Max drafts of a step, up to kMaxDrafts, by an engine that speculates; absent: its default.
  std::optional<int> num_speculative_tokens = std::nullopt;
};

// Whether the next token is always the one with the largest logit, and nothing else of the logits is wanted.
bool is_greedy(const Request& request);

// How each token is drawn: the request's options, with its stop tokens as late ones if it has min_tokens.
SamplingOptions sampling_options(const Request& request);

// Whether each token has to be drawn by next_token(), from the logits: a runner's own sampler does not know how.
bool needs_logits(const Request& request);

enum class FinishReason {
  kLength,     // max_new_tokens were generated
  kStop,       // a stop token was generated
  kRejected,   // never ran: `error` says why
  kCancelled,  // stopped on request
  kFailed,     // an error while it ran: `error` says which
};
std::string_view to_string(FinishReason reason);  // "length", "stop", "rejected", "cancelled", "failed"

struct Completion {
  std::vector<Token> tokens;  // without the prompt
  FinishReason finish_reason = FinishReason::kRejected;
  std::string error;
  // One entry for each token, then one for a stop token if one was drawn. Empty unless the request asks for them.
  std::vector<TokenLogprobs> logprobs = {};
  // The stop token that ended the text, from an engine that serves clients: they are told. Others leave it empty.
  std::optional<Token> stop_token = std::nullopt;
};

// Draws the next token of the text that the completion has so far, and adds its log-probabilities to the completion if
// the request asks for them; does not append the token. sample: which of the request's texts it is.
Token next_token(const Request& request, std::span<const float> logits, Completion& completion, int sample = 0);

// A number that a run reports. The name is its key in JSON ("slots_used") and, with spaces, its label in the report.
struct Counter {
  std::string name;
  double value = 0.0;
};

// The value of the counter of that name. Throws CheckError if there is none.
double counter(const std::vector<Counter>& counters, std::string_view name);

// Where the time went. A prompt is computed many tokens at a time (prefill), a reply one token at a time (decode).
struct Timing {
  std::int64_t prefill_tokens = 0;
  std::int64_t decode_tokens = 0;
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;

  // Adds the time in which num_tokens new tokens of a sequence were computed, in all chunks together: a chunk of one
  // token, added by itself, would pass for a token of the reply.
  void add(std::size_t num_tokens, double seconds) {
    (num_tokens > 1 ? prefill_tokens : decode_tokens) += static_cast<std::int64_t>(num_tokens);
    (num_tokens > 1 ? prefill_seconds : decode_seconds) += seconds;
  }

  double milliseconds_per_token() const {  // in replies
    return decode_tokens == 0 ? 0.0 : 1e3 * decode_seconds / static_cast<double>(decode_tokens);
  }
};

// Called for each token as soon as it is generated, with the index of its request.
using OnToken = std::function<void(int request, Token token)>;

}  // namespace common

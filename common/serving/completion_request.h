// What a request to /v1/completions or /v1/chat/completions asks for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/base/json.h"
#include "common/math/sampling.h"
#include "common/serving/served_engine.h"
#include "common/serving/served_model.h"

namespace common {

// A reply with an error: 400 if the request is wrong.
class ApiError : public std::runtime_error {
 public:
  ApiError(int status, const std::string& message, std::string param = "", std::string code = "")
      : std::runtime_error(message), status_(status), param_(std::move(param)), code_(std::move(code)) {}
  int status() const { return status_; }
  const std::string& param() const { return param_; }
  const std::string& code() const { return code_; }

 private:
  int status_;
  std::string param_;
  std::string code_;
};

// Throws ApiError unless the request names the model that is served.
void check_model(const std::string& wanted, const std::string& served);

struct CompletionRequest {
  std::vector<GenerationRequest> requests;  // one for each prompt
  // For the log-probabilities of the prompts' own tokens: a request for each prompt, whose reply is forced to be the
  // prompt behind its first token. Empty: they are not wanted.
  std::vector<GenerationRequest> scores;
  std::vector<std::string> echoes;  // "echo": the prompts' texts, which the replies' follow; empty: not wanted
  int num_texts = 1;                // for each prompt
  bool is_chat = false;
  bool is_streamed = false;
  bool include_usage = false;      // whether the last event has the usage
  bool has_running_usage = false;  // and each other event its text's usage so far
  bool has_logprobs = false;
  int num_top_logprobs = 0;                               // how many of the most likely tokens, besides the drawn one
  std::optional<int> num_prompt_logprobs = std::nullopt;  // "prompt_logprobs": the same, for the prompt's tokens
  bool is_prompt_only = false;          // "max_tokens": 0. Only the scores are computed, and nothing if there are none
  std::size_t num_own_stop_tokens = 0;  // how many of a request's stop tokens, the first ones, are the model's own
  std::string max_tokens_field = {};    // which field said how long a reply may be; empty: none
};

// The fields of a JSON object that a client has sent, and their checks. Each function throws ApiError, which names the
// field; a field that is missing or null has its default.
class Fields {
 public:
  // Throws ApiError unless it is a JSON object.
  explicit Fields(const std::string& body);

  const Json* find(const std::string& name) const;  // null: missing, or null
  // Throws for a field that no function has read: it would have no effect, and may be misspelt.
  void refuse_others() const;
  bool boolean(const std::string& name, bool fallback) const;
  int integer(const std::string& name, int min, int max, int fallback) const;
  double number(const std::string& name, double min, double max, double fallback) const;
  std::string text(const std::string& name, const std::string& fallback) const;

 private:
  Json object_;
  mutable std::set<std::string> asked_for_;
};

// What requests are read with.
struct RequestDefaults {
  std::string model_name;         // the only one that requests may have
  SamplingOptions sampling = {};  // of requests that do not say
  std::string chat_format = {};   // as ChatOptions; empty: the model file's own
};

// The prompt of a chat: the model's template or, if there is none, the messages one after another, for the model to
// continue. Reads "messages" and "chat_template_kwargs".
std::vector<Token> chat_prompt(const ServedModel& model, const Fields& fields, const RequestDefaults& defaults);

// The tokens of a text. Reads "add_special_tokens", whether the model's first token is put in front, and
// "parse_special", whether control tokens that the text spells are those tokens; both are true by default, as in vLLM
// and llama.cpp.
std::vector<Token> text_prompt(const ServedModel& model, const Fields& fields, const std::string& text);

// The tokens of the field `name`, at least one.
std::vector<Token> token_list(const ServedModel& model, const Json& list, const std::string& name);

// max_context: the limit of one text, prompt included. max_sequences, token_budget: of one step, in which each
// text of a prompt has a token. num_slots, block_size: the whole cache's. max_drafts: of one step and text.
struct CompletionLimits {
  int max_context = 0;
  int max_sequences = 0;
  int token_budget = 0;
  int num_slots = 0;
  int block_size = 0;
  int max_drafts = 0;
};
// next_seed: for prompts whose request has no seed; each use increments it.
CompletionRequest parse_completion(const std::string& body, bool is_chat, const ServedModel& model,
                                   const RequestDefaults& defaults, const CompletionLimits& limits,
                                   std::atomic<std::uint64_t>& next_seed);

// Throws ApiError if the engine has rejected the prompt `index` because it and its reply are longer than max_context.
void check_context(const CompletionRequest& wanted, std::size_t index, int max_context);
// Throws ApiError unless the prompts alone are something that the engine could compute: for requests that it does not
// see, because nothing is to be written.
void check_prompts(const CompletionRequest& wanted, int max_context);
// What reading the body may take at the most, in bytes, the requests that are made of it included.
double bytes_to_read(const std::string& body);
// What the requests, their results and their reply may take at the most, in bytes.
double bytes_held(const CompletionRequest& wanted, int max_context);
// Throws ApiError if the requests together are more than the queue can ever hold.
void check_queue(const CompletionRequest& wanted, int max_queue);

}  // namespace common

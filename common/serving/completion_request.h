// What a request to /v1/completions or /v1/chat/completions asks for.
#pragma once

#include <atomic>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

struct CompletionRequest {
  std::vector<ServedRequest> requests;  // one for each prompt
  int num_texts = 1;                    // for each prompt
  bool is_chat = false;
  bool is_streamed = false;
  bool include_usage = false;  // whether the last event has the usage
  bool has_logprobs = false;
  int num_top_logprobs = 0;  // how many of the most likely tokens, besides the drawn one
};

// The fields of a JSON object that a client has sent, and their checks. Each function throws ApiError, which names the
// field; a field that is missing or null has its default.
class Fields {
 public:
  // Throws ApiError unless it is a JSON object.
  explicit Fields(const std::string& body);

  const nlohmann::json* find(const std::string& name) const;  // null: missing, or null
  // Throws for a field that no function has read: it would have no effect, and may be misspelt.
  void refuse_others() const;
  bool boolean(const std::string& name, bool fallback) const;
  int integer(const std::string& name, int min, int max, int fallback) const;
  double number(const std::string& name, double min, double max, double fallback) const;
  std::string text(const std::string& name, const std::string& fallback) const;

 private:
  nlohmann::json object_;
  mutable std::set<std::string> asked_for_;
};

// The prompt of a chat: the model's template or, if there is none, the messages one after another, for the model to
// continue.
std::vector<Token> chat_prompt(const ServedModel& model, const nlohmann::json& messages);

// The tokens of the field `name`: a text, or tokens.
std::vector<Token> text_prompt(const ServedModel& model, const nlohmann::json& prompt,
                               const std::string& name = "prompt");

// max_context: the limit of one text, prompt included. num_slots, block_size: the whole cache's.
struct CompletionLimits {
  int max_context = 0;
  int num_slots = 0;
  int block_size = 0;
};
// next_seed: for prompts whose request has no seed; each use increments it.
CompletionRequest parse_completion(const std::string& body, bool is_chat, const ServedModel& model,
                                   const std::string& model_name, const CompletionLimits& limits,
                                   std::atomic<std::uint64_t>& next_seed);

}  // namespace common

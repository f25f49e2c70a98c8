#include "common/serving/completion_request.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>

#include "common/base/check.h"
#include "common/base/hash.h"
#include "common/base/text.h"
#include "common/model/chat.h"

namespace common {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& name, const std::string& message) {
  throw ApiError(400, "'" + name + "' " + message, name);
}

// Refuses fields that are not supported, unless their value changes nothing.
void refuse_unsupported(const Fields& fields) {
  for (const char* const name : {"frequency_penalty", "presence_penalty"}) {
    if (fields.number(name, -2.0, 2.0, 0.0) != 0.0) {
      refuse(name, "is not supported");
    }
  }
  for (const char* const name : {"logit_bias", "tools", "functions", "response_format", "suffix", "guided_json",
                                 "prompt_logprobs", "logits_processors"}) {
    const json* const value = fields.find(name);
    const bool is_plain = value != nullptr && value->is_object() && value->value("type", json()) == "text";
    if (value != nullptr && !value->empty() && !is_plain) {
      refuse(name, "is not supported");
    }
  }
  if (fields.boolean("echo", false)) {
    refuse("echo", "is not supported");
  }
  // Clients of other servers send these; they change no text.
  for (const char* const name :
       {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "tool_choice",
        "function_call", "parallel_tool_calls", "cache_prompt", "priority", "request_id"}) {
    fields.find(name);
  }
}

// Refuses values that change a drawn text but not a beam search. Temperature 0 asks for the likeliest text, as a search
// does, and 1 is the default.
void refuse_with_beams(const SamplingOptions& sampling, bool has_logprobs) {
  const std::array<std::pair<const char*, bool>, 6> unused = {
      {{"temperature", sampling.temperature != 0.0F && sampling.temperature != 1.0F},
       {"top_p", sampling.top_p != 1.0F},
       {"top_k", sampling.top_k != 0},
       {"min_p", sampling.min_p != 0.0F},
       {"repetition_penalty", sampling.repetition_penalty != 1.0F},
       {"logprobs", has_logprobs}}};
  for (const auto& [name, is_given] : unused) {
    if (is_given) {
      refuse(name, "and 'use_beam_search' exclude each other");
    }
  }
}

std::string content_of(const json& message) {
  const json content = message.value("content", json());
  if (content.is_string()) {
    return content.get<std::string>();
  }
  if (!content.is_array()) {
    refuse("messages", "has a message whose content is neither text nor a list of parts");
  }
  std::string text;
  for (const json& part : content) {
    if (!part.is_object() || part.value("type", json()) != "text" || !part.value("text", json()).is_string()) {
      refuse("messages", "has a part that is not text");
    }
    text += part["text"].get<std::string>();
  }
  return text;
}

bool is_list_of_tokens(const json& value) {
  return value.is_array() && !value.empty() &&
         std::all_of(value.begin(), value.end(), [](const json& entry) { return entry.is_number_integer(); });
}

std::vector<std::vector<Token>> prompts_of(const ServedModel& model, const Fields& fields, bool is_chat) {
  const char* const name = is_chat ? "messages" : "prompt";
  const json* const value = fields.find(name);
  if (value == nullptr) {
    refuse(name, "is missing");
  }
  if (is_chat) {
    return {chat_prompt(model, *value)};
  }
  if (value->is_string() || is_list_of_tokens(*value)) {
    return {text_prompt(model, *value)};
  }
  if (!value->is_array() || value->empty()) {
    refuse(name, "must be a text, a list of tokens, or a list of these");
  }
  constexpr std::size_t kMaxPrompts = 1024;
  if (value->size() > kMaxPrompts) {
    refuse(name, format("must be at most %zu prompts", kMaxPrompts));
  }
  std::vector<std::vector<Token>> prompts;
  for (const json& prompt : *value) {
    prompts.push_back(text_prompt(model, prompt));
  }
  return prompts;
}

std::uint64_t salt_of(const std::string& text) {
  const std::uint64_t hash = hash_bytes(std::as_bytes(std::span(text)), 0);
  return text.empty() ? 0 : std::max<std::uint64_t>(hash, 1);
}

// "stop": a text, or several.
StopStrings stop_strings_of(const ServedModel& model, const Fields& fields) {
  constexpr std::size_t kMaxStopStrings = 16;
  constexpr std::size_t kMaxStopLength = 1024;  // in bytes; each prompt of the request has a copy
  const json* const value = fields.find("stop");
  if (value == nullptr) {
    return {};
  }
  const json list = value->is_string() ? json::array({*value}) : *value;
  if (!list.is_array() || list.size() > kMaxStopStrings) {
    refuse("stop", format("must be a text, or a list of at most %zu", kMaxStopStrings));
  }
  std::vector<std::string> strings;
  for (const json& entry : list) {
    if (!entry.is_string() || entry.get<std::string>().empty()) {
      refuse("stop", "must have texts that are not empty");
    }
    if (entry.get_ref<const std::string&>().size() > kMaxStopLength) {
      refuse("stop", format("must have texts of at most %zu bytes", kMaxStopLength));
    }
    strings.push_back(entry.get<std::string>());
  }
  return {strings, [&model](std::span<const Token> tokens) { return model.decode(tokens); }};
}

// For a text, "logprobs" is the number of best tokens. For a chat, it is a flag, and "top_logprobs" is the number.
void read_logprobs(const Fields& fields, CompletionRequest& result) {
  constexpr int kMaxLogprobs = 20;
  if (result.is_chat) {
    result.has_logprobs = fields.boolean("logprobs", false);
    result.num_top_logprobs = fields.integer("top_logprobs", 0, kMaxLogprobs, 0);
    if (result.num_top_logprobs > 0 && !result.has_logprobs) {
      refuse("top_logprobs", "needs \"logprobs\": true");
    }
  } else {
    result.has_logprobs = fields.find("logprobs") != nullptr;
    result.num_top_logprobs = fields.integer("logprobs", 0, kMaxLogprobs, 0);
  }
}

// How many tokens each of `num_texts` texts can have after the prompt, if nothing else is in the cache.
int max_new_tokens(const CompletionLimits& limits, int prompt_length, int num_texts) {
  const int shared = prompt_length / limits.block_size;
  const int blocks = limits.num_slots / limits.block_size;
  const int length = (shared + std::max(blocks - shared, 0) / num_texts) * limits.block_size;
  return std::max(std::min(length, limits.max_context) - prompt_length, 1);
}

}  // namespace

Fields::Fields(const std::string& body) {
  // Documents are parsed in a loop, but copied and compared recursively, and a thread's stack is small.
  constexpr int kMaxDepth = 32;
  const auto check_depth = [](int depth, json::parse_event_t, const json&) {
    if (depth > kMaxDepth) {
      throw ApiError(400, format("the body has lists and objects more than %d deep", kMaxDepth));
    }
    return true;
  };
  object_ = json::parse(body, check_depth, false);
  if (object_.is_discarded()) {
    throw ApiError(400, "the body is not JSON");
  }
  if (!object_.is_object()) {
    throw ApiError(400, "the body is not a JSON object");
  }
}

const json* Fields::find(const std::string& name) const {
  asked_for_.insert(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::refuse_others() const {
  for (const auto& [name, value] : object_.items()) {
    if (!value.is_null() && !asked_for_.contains(name)) {
      refuse(name, "is not a field of this request");
    }
  }
}

bool Fields::boolean(const std::string& name, bool fallback) const {
  const json* const value = find(name);
  if (value != nullptr && !value->is_boolean()) {
    refuse(name, "must be true or false");
  }
  return value != nullptr ? value->get<bool>() : fallback;
}

int Fields::integer(const std::string& name, int min, int max, int fallback) const {
  const json* const value = find(name);
  if (value == nullptr) {
    return fallback;
  }
  // Beyond 2^63 the number is unsigned, and out of any range.
  const bool is_small =
      value->is_number_integer() &&
      (!value->is_number_unsigned() || value->get<std::uint64_t>() <= std::numeric_limits<std::uint32_t>::max());
  if (!is_small || value->get<std::int64_t>() < min || value->get<std::int64_t>() > max) {
    refuse(name, format("must be a whole number from %d to %d", min, max));
  }
  return value->get<int>();
}

double Fields::number(const std::string& name, double min, double max, double fallback) const {
  const json* const value = find(name);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_number() || !(value->get<double>() >= min && value->get<double>() <= max)) {
    refuse(name, format("must be a number from %g to %g", min, max));
  }
  return value->get<double>();
}

std::string Fields::text(const std::string& name, const std::string& fallback) const {
  const json* const value = find(name);
  if (value != nullptr && !value->is_string()) {
    refuse(name, "must be a text");
  }
  return value != nullptr ? value->get<std::string>() : fallback;
}

std::vector<Token> chat_prompt(const ServedModel& model, const json& messages) {
  const Session& session = model.session();
  if (!messages.is_array() || messages.empty()) {
    refuse("messages", "must be a list of messages");
  }
  std::vector<ChatMessage> conversation;
  for (const json& message : messages) {
    const json role = message.is_object() ? message.value("role", json()) : json();
    const bool is_known = role == "system" || role == "developer" || role == "user" || role == "assistant";
    if (!is_known) {
      refuse("messages", "has a message whose role is not system, user or assistant");
    }
    conversation.push_back({role == "developer" ? "system" : role.get<std::string>(), content_of(message)});
  }
  return encode_chat(*session.file, session.tokenizer, conversation);
}

std::vector<Token> text_prompt(const ServedModel& model, const json& prompt, const std::string& name) {
  if (prompt.is_string()) {
    return model.session().tokenizer.encode_prompt(prompt.get<std::string>());
  }
  if (!is_list_of_tokens(prompt)) {
    refuse(name, "must be a text, a list of tokens, or a list of these");
  }
  std::vector<Token> tokens;
  for (const json& entry : prompt) {
    const auto vocabulary = static_cast<std::uint64_t>(model.get().config().vocab_size);
    if (entry.get<std::int64_t>() < 0 || entry.get<std::uint64_t>() >= vocabulary) {
      refuse(name, "has a token that is not in the vocabulary");
    }
    tokens.push_back(entry.get<Token>());
  }
  return tokens;
}

CompletionRequest parse_completion(const std::string& body, bool is_chat, const ServedModel& model,
                                   const std::string& model_name, const CompletionLimits& limits,
                                   std::atomic<std::uint64_t>& next_seed) {
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  constexpr int kMaxTexts = 1024;
  constexpr double kMinPenalty = 0.01;
  constexpr double kMaxPenalty = 100.0;
  constexpr int kDefaultMaxTokens = 16;  // OpenAI's, for a text; a chat may take all the room there is
  const Fields fields(body);
  if (const std::string name = fields.text("model", model_name); name != model_name) {
    throw ApiError(404, "the model '" + name + "' is not here; this is '" + model_name + "'", "model",
                   "model_not_found");
  }
  refuse_unsupported(fields);

  CompletionRequest result;
  result.is_chat = is_chat;
  result.num_texts = fields.integer("n", 1, kMaxTexts, 1);
  result.is_streamed = fields.boolean("stream", false);
  if (const json* const options = fields.find("stream_options"); options != nullptr) {
    const json usage = options->is_object() ? options->value("include_usage", json(false)) : json();
    if (!usage.is_boolean()) {
      refuse("stream_options", "must be {\"include_usage\": true or false}");
    }
    result.include_usage = usage.get<bool>();
  }

  Request request;
  const int max_tokens = fields.integer("max_tokens", 1, kMaxInt, is_chat ? 0 : kDefaultMaxTokens);
  request.max_new_tokens = fields.integer("max_completion_tokens", 1, kMaxInt, max_tokens);
  request.sampling.temperature = static_cast<float>(fields.number("temperature", 0.0, 100.0, 1.0));
  request.sampling.top_p = static_cast<float>(fields.number("top_p", 0.0, 1.0, 1.0));
  request.sampling.top_k = fields.integer("top_k", -1, kMaxInt, 0);
  request.sampling.top_k = std::max(request.sampling.top_k, 0);  // vLLM's -1: all
  request.sampling.min_p = static_cast<float>(fields.number("min_p", 0.0, 1.0, 0.0));
  request.sampling.repetition_penalty =
      static_cast<float>(fields.number("repetition_penalty", kMinPenalty, kMaxPenalty, 1.0));
  request.stop_strings = stop_strings_of(model, fields);
  read_logprobs(fields, result);
  request.num_logprobs = result.has_logprobs ? std::max(result.num_top_logprobs, 1) : 0;
  request.cache_salt = salt_of(fields.text("cache_salt", ""));
  if (!fields.boolean("ignore_eos", false)) {
    const Session& session = model.session();
    request.stop_tokens =
        is_chat ? chat_stop_tokens(*session.file, session.tokenizer) : session.requests.front().stop_tokens;
  }
  const json* const seed = fields.find("seed");
  if (seed != nullptr) {
    if (!seed->is_number_integer()) {
      refuse("seed", "must be a whole number");
    }
    request.sampling.seed =
        seed->is_number_unsigned() ? seed->get<std::uint64_t>() : static_cast<std::uint64_t>(seed->get<std::int64_t>());
  }
  ServedRequest wanted{request, result.num_texts};
  const double length_penalty = fields.number("length_penalty", 0.0, 10.0, 1.0);
  if (fields.boolean("use_beam_search", false)) {
    refuse_with_beams(request.sampling, result.has_logprobs);
    wanted.length_penalty = length_penalty;
  } else if (length_penalty != 1.0) {
    refuse("length_penalty", "needs \"use_beam_search\": true");
  }
  if (fields.integer("best_of", 1, kMaxTexts, result.num_texts) != result.num_texts) {
    refuse("best_of", "is not supported");
  }
  std::vector<std::vector<Token>> prompts = prompts_of(model, fields, is_chat);
  fields.refuse_others();
  for (std::vector<Token>& prompt : prompts) {
    ServedRequest added = wanted;
    if (seed == nullptr) {
      added.request.sampling.seed = next_seed++;
    }
    if (added.request.max_new_tokens == 0) {
      added.request.max_new_tokens = max_new_tokens(limits, static_cast<int>(prompt.size()), result.num_texts);
    }
    added.request.prompt = std::move(prompt);
    result.requests.push_back(std::move(added));
  }
  return result;
}

}  // namespace common

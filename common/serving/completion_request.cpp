#include "common/serving/completion_request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/base/check.h"
#include "common/base/hash.h"
#include "common/base/text.h"
#include "common/model/chat.h"

namespace common {
namespace {

constexpr std::size_t kMaxShown = 64;  // bytes of what a client has sent, in a message

// 'name', or "na\nme" if it would do something to a terminal.
std::string shown(const std::string& name) {
  const std::string quoted = quote(name, kMaxShown);
  return quoted == "\"" + name + "\"" ? "'" + name + "'" : quoted;
}

[[noreturn]] void refuse(const std::string& name, const std::string& message) {
  throw ApiError(400, shown(name) + " " + message, name.size() <= kMaxShown ? name : shown(name));
}

// Null, and an empty list, object or text.
bool says_nothing(const Json& value) { return value.empty() || value == ""; }

// Refuses an object's fields that are not known, unless they say nothing.
void refuse_unknown(const Json& object, const std::string& place, const std::set<std::string_view>& known) {
  for (const auto& [name, value] : object.items()) {
    if (!says_nothing(value) && !known.contains(name)) {
      throw ApiError(400, shown(place) + " has a field that is not known: " + quote(name, kMaxShown), place);
    }
  }
}

// Refuses fields that are not supported, unless their value changes nothing.
void refuse_unsupported(const Fields& fields) {
  for (const char* const name :
       {"tools", "functions", "response_format", "suffix", "guided_json", "logits_processors"}) {
    const Json* const value = fields.find(name);
    const bool is_plain = value != nullptr && value->is_object() && value->at("type") == "text";
    if (value != nullptr && !says_nothing(*value) && !is_plain) {
      refuse(name, "is not supported");
    }
  }
  // Clients of other servers send these; they change no text.
  for (const char* const name : {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                                 "tool_choice", "function_call", "parallel_tool_calls", "cache_prompt", "request_id"}) {
    fields.find(name);
  }
  if (const Json* const priority = fields.find("priority"); priority != nullptr && *priority != 0) {
    refuse("priority", "is not supported: requests are served in the order in which they come");
  }
}

// Refuses fields that change a drawn text, or how it is drawn, but not a beam search. Temperature 0 asks for the
// likeliest text, as a search does, and 1 is OpenAI's default.
void refuse_with_beams(const Fields& fields, const Request& request) {
  const SamplingOptions& sampling = request.sampling;
  const std::array<std::pair<const char*, bool>, 11> changes = {
      {{"temperature", sampling.temperature != 0.0F && sampling.temperature != 1.0F},
       {"top_p", sampling.top_p != 1.0F},
       {"top_k", sampling.top_k != 0},
       {"min_p", sampling.min_p != 0.0F},
       {"repetition_penalty", sampling.repetition_penalty != 1.0F},
       {"presence_penalty", sampling.presence_penalty != 0.0F},
       {"frequency_penalty", sampling.frequency_penalty != 0.0F},
       {"logit_bias", !sampling.logit_bias.empty()},
       {"min_tokens", request.min_tokens > 0},
       {"num_speculative_tokens", request.num_speculative_tokens.value_or(0) > 0},
       {"logprobs", request.num_logprobs > 0}}};
  for (const auto& [name, is_changed] : changes) {
    if (is_changed && fields.find(name) != nullptr) {
      refuse(name, "and 'use_beam_search' exclude each other");
    }
  }
}

// A list or an object with more entries is refused: each prompt of the request has a copy.
constexpr std::size_t kMaxBiases = 1024;
constexpr std::size_t kMaxStopTokens = 64;
constexpr std::size_t kMaxPrompts = 1024;
// Token probabilities, the most likely tokens' included, of a request's prompts, and of its replies.
constexpr std::size_t kMaxScores = 1 << 18;

int vocabulary_of(const ServedModel& model) { return model.get().config().vocab_size; }

// "logit_bias": {"50256": -100}
std::vector<TokenBias> logit_bias_of(const ServedModel& model, const Fields& fields) {
  constexpr double kMaxBias = 100.0;
  const Json* const value = fields.find("logit_bias");
  std::vector<TokenBias> result;
  if (value == nullptr) {
    return result;
  }
  if (!value->is_object() || value->size() > kMaxBiases) {
    refuse("logit_bias", format("must be an object with at most %zu tokens and their biases", kMaxBiases));
  }
  std::map<Token, float> biases;  // of a token that is there twice, the last one counts
  for (const auto& [key, bias] : value->items()) {
    Token token = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    // Only one spelling of each number, so that no token has two biases.
    const bool is_number = error == std::errc() && end == key.data() + key.size() && std::to_string(token) == key;
    if (!is_number || token < 0 || token >= vocabulary_of(model)) {
      refuse("logit_bias", "has a name that is no token of the vocabulary: " + quote(key));
    }
    if (!bias.is_number() || !(std::abs(bias.get<double>()) <= kMaxBias)) {
      refuse("logit_bias", format("must have biases from %g to %g", -kMaxBias, kMaxBias));
    }
    biases[token] = bias.get<float>();
  }
  for (const auto& [token, bias] : biases) {
    result.push_back({token, bias});
  }
  return result;
}

// "stop_token_ids": [2, 128001]
std::vector<Token> stop_tokens_of(const ServedModel& model, const Fields& fields) {
  const Json* const value = fields.find("stop_token_ids");
  if (value == nullptr) {
    return {};
  }
  if (!value->is_array() || value->size() > kMaxStopTokens) {
    refuse("stop_token_ids", format("must be a list of at most %zu tokens", kMaxStopTokens));
  }
  return value->empty() ? std::vector<Token>() : token_list(model, *value, "stop_token_ids");
}

std::string content_of(const Json& message, const std::string& place) {
  const Json& content = message.at("content");
  if (content.is_string()) {
    return content.get<std::string>();
  }
  if (content.is_null() && message.at("role") == "assistant") {  // as clients send back a reply that has no text
    return "";
  }
  if (!content.is_array()) {
    refuse(place + ".content", "must be a text or a list of parts");
  }
  std::string text;
  for (const Json& part : content) {
    if (!part.is_object() || part.at("type") != "text" || !part.at("text").is_string()) {
      refuse(place + ".content", "has a part that is not text");
    }
    text += part.at("text").text();
  }
  return text;
}

bool is_list_of_tokens(const Json& value) {
  return value.is_array() && !value.empty() &&
         std::all_of(value.begin(), value.end(), [](const Json& entry) { return entry.is_number_integer(); });
}

std::vector<Token> sent_tokens(const ServedModel& model, const Fields& fields, const Json& prompt) {
  const char* const name = "prompt";
  if (prompt.is_string()) {
    return text_prompt(model, fields, prompt.get<std::string>());
  }
  fields.boolean("parse_special", true);  // both change nothing
  fields.boolean("add_special_tokens", true);
  if (!is_list_of_tokens(prompt)) {
    refuse(name, "must be a text, a list of tokens, or a list of these");
  }
  return token_list(model, prompt, name);
}

// The prompts of a request for texts, each as it was sent: a text, or tokens.
std::vector<const Json*> sent_prompts(const Fields& fields) {
  const char* const name = "prompt";
  const Json* const value = fields.find(name);
  if (value == nullptr) {
    refuse(name, "is missing");
  }
  if (value->is_string() || is_list_of_tokens(*value)) {
    return {value};
  }
  if (!value->is_array() || value->empty()) {
    refuse(name, "must be a text, a list of tokens, or a list of these");
  }
  if (value->size() > kMaxPrompts) {
    refuse(name, format("must be at most %zu prompts", kMaxPrompts));
  }
  std::vector<const Json*> prompts;
  for (const Json& prompt : *value) {
    prompts.push_back(&prompt);
  }
  return prompts;
}

std::uint64_t salt_of(const std::string& text) {
  const std::uint64_t hash = hash_bytes(std::as_bytes(std::span(text)), 0);
  return text.empty() ? 0 : std::max<std::uint64_t>(hash, 1);
}

// "stop": a text, or several.
std::vector<std::string> stop_texts_of(const Fields& fields) {
  constexpr std::size_t kMaxStopStrings = 16;
  constexpr std::size_t kMaxStopLength = 1024;  // in bytes
  const Json* const value = fields.find("stop");
  if (value == nullptr) {
    return {};
  }
  const Json list = value->is_string() ? Json::array({*value}) : *value;
  if (!list.is_array() || list.size() > kMaxStopStrings) {
    refuse("stop", format("must be a text, or a list of at most %zu", kMaxStopStrings));
  }
  std::vector<std::string> strings;
  for (const Json& entry : list) {
    if (!entry.is_string() || entry.get<std::string>().empty()) {
      refuse("stop", "must have texts that are not empty");
    }
    if (entry.text().size() > kMaxStopLength) {
      refuse("stop", format("must have texts of at most %zu bytes", kMaxStopLength));
    }
    strings.push_back(entry.get<std::string>());
  }
  return strings;
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
  if (num_texts == 1 && limits.max_context > limits.num_slots) {  // the cache need not hold all of it
    return std::max(limits.max_context - prompt_length, 1);
  }
  const int shared = prompt_length / limits.block_size;
  const int blocks = limits.num_slots / limits.block_size;
  const int length = (shared + std::max(blocks - shared, 0) / num_texts) * limits.block_size;
  return std::max(std::min(length, limits.max_context) - prompt_length, 1);
}

// "n": no more than a step has room for.
int num_texts_of(const Fields& fields, const CompletionLimits& limits) {
  const Json* const value = fields.find("n");
  const bool is_whole = value == nullptr || value->is_number_unsigned();
  const auto wanted = value != nullptr && is_whole ? value->get<std::uint64_t>() : 1;
  const int most = std::min(limits.max_sequences, limits.token_budget);
  if (!is_whole || wanted < 1 || wanted > static_cast<std::uint64_t>(most)) {
    refuse("n", format("must be a whole number from 1 to %d (%s)", most,
                       most == limits.max_sequences ? "--max-sequences" : "--budget"));
  }
  return static_cast<int>(wanted);
}

SamplingOptions sampling_of(const ServedModel& model, const Fields& fields, const SamplingOptions& defaults) {
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  constexpr double kMinPenalty = 0.01;
  constexpr double kMaxPenalty = 100.0;
  constexpr double kMaxSubtracted = 2.0;  // OpenAI's
  const auto number = [&](const char* name, double min, double max, float fallback) {
    return fields.find(name) == nullptr ? fallback : static_cast<float>(fields.number(name, min, max, 0.0));
  };
  SamplingOptions result = defaults;
  result.temperature = number("temperature", 0.0, 100.0, defaults.temperature);
  result.top_p = number("top_p", 0.0, 1.0, defaults.top_p);
  result.top_k = std::max(fields.integer("top_k", -1, kMaxInt, defaults.top_k), 0);  // vLLM's -1: all
  result.min_p = number("min_p", 0.0, 1.0, defaults.min_p);
  result.repetition_penalty = number("repetition_penalty", kMinPenalty, kMaxPenalty, defaults.repetition_penalty);
  result.presence_penalty = number("presence_penalty", -kMaxSubtracted, kMaxSubtracted, 0.0F);
  result.frequency_penalty = number("frequency_penalty", -kMaxSubtracted, kMaxSubtracted, 0.0F);
  result.logit_bias = logit_bias_of(model, fields);
  return result;
}

ChatOptions chat_options(const ServedModel& model, const Fields& fields, const RequestDefaults& defaults) {
  const char* const name = "chat_template_kwargs";
  ChatOptions options{.format = defaults.chat_format};
  const std::string effort = fields.text("reasoning_effort", "medium");
  const std::array<std::string_view, 5> efforts = {"none", "minimal", "low", "medium", "high"};
  if (std::find(efforts.begin(), efforts.end(), effort) == efforts.end()) {
    refuse("reasoning_effort", "must be none, minimal, low, medium or high");
  }
  options.enable_thinking = options.enable_thinking && effort != "none";  // no template knows more or less of it
  const Json* const value = fields.find(name);
  if (value == nullptr) {
    return options;
  }
  if (!value->is_object()) {
    refuse(name, "must be an object");
  }
  for (const auto& [key, entry] : value->items()) {
    if (key != "enable_thinking" || !entry.is_boolean()) {
      refuse(name, "must be {\"enable_thinking\": true or false}");
    }
    options.enable_thinking = entry.get<bool>();
    if (options.enable_thinking && !can_switch_thinking(*model.session().file, options)) {
      refuse(name, "asks for thoughts, and this model's chat template has none");
    }
  }
  return options;
}

// A request whose reply is forced to be the prompt behind its first token, and has the tokens' log-probabilities.
GenerationRequest scoring_request(const std::vector<Token>& prompt, int num_logprobs, std::uint64_t cache_salt,
                                  Counted counted) {
  Request request;
  request.prompt = {prompt.front()};
  request.forced.assign(prompt.begin() + 1, prompt.end());
  request.max_new_tokens = std::max(static_cast<int>(request.forced.size()), 1);
  request.num_logprobs = std::max(num_logprobs, 1);
  request.cache_salt = cache_salt;
  return {.request = request, .counted = counted};
}

// What is asked of the prompt itself: "echo", "prompt_logprobs", and log-probabilities for what is echoed.
void read_prompt_wishes(const Fields& fields, CompletionRequest& result, bool& is_echoed) {
  constexpr int kMaxLogprobs = 20;
  is_echoed = !result.is_chat && fields.boolean("echo", false);
  if (fields.find("prompt_logprobs") != nullptr) {
    result.num_prompt_logprobs = fields.integer("prompt_logprobs", 0, kMaxLogprobs, 0);
    if (result.is_streamed) {
      refuse("prompt_logprobs", "and 'stream' exclude each other");
    }
  }
  if (is_echoed && result.has_logprobs && result.is_streamed) {
    refuse("echo", "with 'logprobs' and 'stream' exclude each other");
  }
}

}  // namespace

void check_model(const std::string& wanted, const std::string& served) {
  if (wanted != served) {
    throw ApiError(404, "the model " + quote(wanted) + " is not here; this is " + quote(served), "model",
                   "model_not_found");
  }
}

Fields::Fields(const std::string& body) {
  constexpr int kMaxDepth = 32;  // values are copied and taken down recursively, and a thread's stack is small
  try {
    object_ = Json::parse(body, kMaxDepth);
  } catch (const JsonError& error) {
    throw ApiError(400, std::string("the body ") + error.what());
  }
  if (!object_.is_object()) {
    throw ApiError(400, "the body is not a JSON object");
  }
}

const Json* Fields::find(const std::string& name) const {
  asked_for_.insert(name);
  const Json* const found = object_.find(name);
  return found == nullptr || found->is_null() ? nullptr : found;
}

void Fields::refuse_others() const {
  for (const auto& [name, value] : object_.items()) {
    if (!value.is_null() && !asked_for_.contains(name)) {
      refuse(name, "is not a field of this request");
    }
  }
}

bool Fields::boolean(const std::string& name, bool fallback) const {
  const Json* const value = find(name);
  if (value != nullptr && !value->is_boolean()) {
    refuse(name, "must be true or false");
  }
  return value != nullptr ? value->get<bool>() : fallback;
}

int Fields::integer(const std::string& name, int min, int max, int fallback) const {
  const Json* const value = find(name);
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
  const Json* const value = find(name);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_number() || !(value->get<double>() >= min && value->get<double>() <= max)) {
    refuse(name, format("must be a number from %g to %g", min, max));
  }
  return value->get<double>();
}

std::string Fields::text(const std::string& name, const std::string& fallback) const {
  const Json* const value = find(name);
  if (value != nullptr && !value->is_string()) {
    refuse(name, "must be a text");
  }
  return value != nullptr ? value->get<std::string>() : fallback;
}

std::vector<Token> chat_prompt(const ServedModel& model, const Fields& fields, const RequestDefaults& defaults) {
  const Session& session = model.session();
  const Json* const messages = fields.find("messages");
  if (messages == nullptr) {
    refuse("messages", "is missing");
  }
  if (!messages->is_array()) {
    refuse("messages", "must be a list of messages");
  }
  if (messages->empty()) {
    refuse("messages", "must have at least one message");
  }
  std::vector<ChatMessage> conversation;
  for (const Json& message : *messages) {
    const std::string place = format("messages[%zu]", conversation.size());
    if (!message.is_object()) {
      refuse(place, "must be a message");
    }
    const Json& role = message.at("role");
    const bool is_known = role == "system" || role == "developer" || role == "user" || role == "assistant";
    if (!is_known) {
      refuse(place + ".role", "must be system, developer, user or assistant");
    }
    refuse_unknown(message, place, {"role", "content", "name"});
    conversation.push_back({role == "developer" ? "system" : role.get<std::string>(), content_of(message, place)});
  }
  return encode_chat(*session.file, session.tokenizer, conversation, chat_options(model, fields, defaults));
}

std::vector<Token> text_prompt(const ServedModel& model, const Fields& fields, const std::string& text) {
  const Tokenizer& tokenizer = model.session().tokenizer;
  const bool parses = fields.boolean("parse_special", true);
  return fields.boolean("add_special_tokens", true) ? tokenizer.encode_prompt(text, parses)
                                                    : tokenizer.encode(text, parses);
}

std::vector<Token> token_list(const ServedModel& model, const Json& list, const std::string& name) {
  if (!is_list_of_tokens(list)) {
    refuse(name, "must be a list of tokens");
  }
  std::vector<Token> tokens;
  for (const Json& entry : list) {
    const auto vocabulary = static_cast<std::uint64_t>(vocabulary_of(model));
    if (entry.get<std::int64_t>() < 0 || entry.get<std::uint64_t>() >= vocabulary) {
      refuse(name, "has a token that is not in the vocabulary");
    }
    tokens.push_back(entry.get<Token>());
  }
  return tokens;
}

CompletionRequest parse_completion(const std::string& body, bool is_chat, const ServedModel& model,
                                   const RequestDefaults& defaults, const CompletionLimits& limits,
                                   std::atomic<std::uint64_t>& next_seed) {
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  constexpr int kDefaultMaxTokens = 16;  // OpenAI's, for a text; a chat may take all the room there is
  const Fields fields(body);
  check_model(fields.text("model", defaults.model_name), defaults.model_name);
  refuse_unsupported(fields);

  CompletionRequest result;
  result.is_chat = is_chat;
  result.num_texts = num_texts_of(fields, limits);
  result.is_streamed = fields.boolean("stream", false);
  if (const Json* const options = fields.find("stream_options"); options != nullptr) {
    const auto flag = [&](const char* name) {
      const Json* const value = options->is_object() ? options->find(name) : options;
      return value == nullptr ? Json(false) : *value;
    };
    const Json usage = flag("include_usage");
    const Json running = flag("continuous_usage_stats");
    if (!options->is_object() || !usage.is_boolean() || !running.is_boolean()) {
      refuse("stream_options", "must be {\"include_usage\": true or false}, or with \"continuous_usage_stats\" too");
    }
    refuse_unknown(*options, "stream_options", {"include_usage", "continuous_usage_stats"});
    if (!result.is_streamed) {
      refuse("stream_options", "needs \"stream\": true");
    }
    result.include_usage = usage.get<bool>();
    result.has_running_usage = running.get<bool>();
  }
  read_logprobs(fields, result);
  bool is_echoed = false;
  read_prompt_wishes(fields, result, is_echoed);

  Request request;
  const int least = is_echoed || result.num_prompt_logprobs.has_value() ? 0 : 1;  // 0: the prompt alone is wanted
  const auto num_tokens_of = [&](const char* name, int fallback) {
    if (const Json* const value = fields.find(name); least > 0 && value != nullptr && *value == 0) {
      refuse(name, std::string("can be 0 only with ") + (is_chat ? "" : "'echo' or ") + "'prompt_logprobs'");
    }
    return fields.integer(name, least, kMaxInt, fallback);
  };
  const int max_tokens = num_tokens_of("max_tokens", is_chat ? -1 : kDefaultMaxTokens);
  request.max_new_tokens = num_tokens_of("max_completion_tokens", max_tokens);
  for (const char* const name : {"max_tokens", "max_completion_tokens"}) {
    result.max_tokens_field = fields.find(name) != nullptr ? name : result.max_tokens_field;
  }
  result.is_prompt_only = request.max_new_tokens == 0;
  request.max_new_tokens = result.is_prompt_only ? 1 : request.max_new_tokens;
  request.sampling = sampling_of(model, fields, defaults.sampling);
  request.min_tokens = fields.integer("min_tokens", 0, kMaxInt, 0);
  if (request.max_new_tokens > 0 && request.min_tokens > request.max_new_tokens) {
    refuse("min_tokens", "must be at most 'max_tokens'");
  }
  const std::vector<std::string> stop_texts = stop_texts_of(fields);
  request.stop_strings = {stop_texts, [&model](std::span<const Token> tokens) { return model.decode(tokens); },
                          request.min_tokens};
  request.num_logprobs = result.has_logprobs ? std::max(result.num_top_logprobs, 1) : 0;
  request.cache_salt = salt_of(fields.text("cache_salt", ""));
  if (!fields.boolean("ignore_eos", false)) {
    const Session& session = model.session();
    request.stop_tokens = is_chat ? chat_stop_tokens(*session.file, session.tokenizer, {defaults.chat_format})
                                  : session.requests.front().stop_tokens;
    result.num_own_stop_tokens = request.stop_tokens.size();
  }
  const std::vector<Token> stop_tokens = stop_tokens_of(model, fields);
  request.stop_tokens.insert(request.stop_tokens.end(), stop_tokens.begin(), stop_tokens.end());
  for (const std::string& text : stop_texts) {  // a control token is in no text
    if (const std::optional<Token> token = model.session().tokenizer.find(text); token.has_value()) {
      request.stop_tokens.push_back(*token);
    }
  }
  if (const char* const name = "num_speculative_tokens"; fields.find(name) != nullptr) {
    request.num_speculative_tokens = fields.integer(name, 0, limits.max_drafts, 0);
  }
  const Json* const seed = fields.find("seed");
  if (seed != nullptr) {
    if (!seed->is_number_integer()) {
      refuse("seed", "must be a whole number from -9223372036854775808 to 18446744073709551615");
    }
    request.sampling.seed =
        seed->is_number_unsigned() ? seed->get<std::uint64_t>() : static_cast<std::uint64_t>(seed->get<std::int64_t>());
  }
  GenerationRequest wanted{request, result.num_texts};
  const double length_penalty = fields.number("length_penalty", 0.0, 10.0, 1.0);
  if (fields.boolean("use_beam_search", false)) {
    refuse_with_beams(fields, request);
    wanted.request.sampling = {};
    wanted.length_penalty = length_penalty;
  } else if (length_penalty != 1.0) {
    refuse("length_penalty", "needs \"use_beam_search\": true");
  }
  const Json* const modalities = fields.find("modalities");
  if (modalities != nullptr && modalities->dump() != R"(["text"])") {
    refuse("modalities", "must be [\"text\"]");
  }
  if (fields.integer("best_of", 1, kMaxInt, result.num_texts) != result.num_texts) {
    refuse("best_of", "is not supported");
  }
  std::vector<std::vector<Token>> prompts;
  if (is_chat) {
    prompts.push_back(chat_prompt(model, fields, defaults));
  } else {
    for (const Json* const sent : sent_prompts(fields)) {
      prompts.push_back(sent_tokens(model, fields, *sent));
      if (is_echoed) {
        result.echoes.push_back(sent->is_string() ? sent->text() : model.decode(prompts.back()));
      }
    }
  }
  fields.refuse_others();
  const bool has_scores = result.num_prompt_logprobs.has_value() || (is_echoed && result.has_logprobs);
  // All of them are in memory at once, and in the reply some hundred bytes each.
  std::size_t num_tokens = 0;
  for (const std::vector<Token>& prompt : prompts) {
    num_tokens += prompt.size();
  }
  const int num_logprobs = std::max(result.num_prompt_logprobs.value_or(0), result.num_top_logprobs);
  if (has_scores && num_tokens * static_cast<std::size_t>(num_logprobs + 1) > kMaxScores) {
    refuse(is_echoed && result.has_logprobs ? "logprobs" : "prompt_logprobs",
           format("asks for more than %zu probabilities of the prompts' tokens", kMaxScores));
  }
  std::size_t num_reply_scores = 0;
  for (std::vector<Token>& prompt : prompts) {
    if (has_scores && !prompt.empty()) {
      result.scores.push_back(scoring_request(prompt, num_logprobs, request.cache_salt,
                                              result.is_prompt_only ? Counted::kPrompt : Counted::kNothing));
    }
    GenerationRequest added = wanted;
    if (seed == nullptr) {
      added.request.sampling.seed = next_seed++;
    }
    if (added.request.max_new_tokens < 0) {
      const auto length = static_cast<int>(prompt.size());
      added.request.max_new_tokens = max_new_tokens(limits, length, result.num_texts);
      if (length < limits.max_context && request.min_tokens > added.request.max_new_tokens) {
        refuse("min_tokens", format("must be at most %d: a reply has no more room", added.request.max_new_tokens));
      }
    }
    if (result.has_logprobs && !result.is_prompt_only) {
      // A reply whose length the request leaves open is as long as its probabilities have room.
      const auto for_token =
          static_cast<std::size_t>(result.num_texts) * static_cast<std::size_t>(result.num_top_logprobs + 1);
      const std::size_t room = (kMaxScores - num_reply_scores) / for_token;
      const auto length = static_cast<std::size_t>(std::min(added.request.max_new_tokens, limits.max_context));
      if (length > room && (request.max_new_tokens > 0 || room == 0)) {
        refuse("logprobs", format("asks for more than %zu probabilities of the replies' tokens", kMaxScores));
      }
      if (length > room) {
        added.request.max_new_tokens = static_cast<int>(room);
      }
      num_reply_scores += std::min(length, room) * for_token;
    }
    added.request.prompt = std::move(prompt);
    result.requests.push_back(std::move(added));
  }
  return result;
}

double bytes_to_read(const std::string& body) {
  constexpr double kPerValue = 96;  // in a list that grows; an empty list or object, or a text, has a part on the heap
  constexpr double kPerByte = 48;   // texts, and what a tokenizer makes of them
  const auto [num_values, text_bytes] = json_size(body);
  const auto num_prompts = static_cast<double>(std::min(num_values, kMaxPrompts));
  const auto num_listed = static_cast<double>(std::min(num_values, kMaxBiases + kMaxStopTokens));
  return kPerValue * static_cast<double>(num_values) + kPerByte * static_cast<double>(text_bytes) +
         num_prompts * (sizeof(GenerationRequest) + num_listed * sizeof(TokenBias));
}

double bytes_held(const CompletionRequest& wanted, int max_context) {
  constexpr double kCopies = 3;            // of a prompt: the reply's, the queue's and the engine's
  constexpr double kPerChoice = 2048;      // an empty choice of a reply, read or streamed
  constexpr double kPerToken = 64;         // in the engine, in its result, to be streamed, and as text
  constexpr double kPerProbability = 640;  // likewise, and as an entry of the reply
  constexpr double kPerEchoed = 24;        // a byte as JSON, in the document, its text, and what is sent
  double bytes = 0.0;
  for (std::size_t i = 0; i < wanted.requests.size(); ++i) {
    const Request& request = wanted.requests[i].request;
    const auto prompt_tokens = static_cast<double>(request.prompt.size());
    const auto listed = static_cast<double>(request.sampling.logit_bias.size() * sizeof(TokenBias) +
                                            request.stop_tokens.size() * sizeof(Token));
    const double tokens = wanted.is_prompt_only ? 0.0 : std::min(request.max_new_tokens, max_context);
    const double probabilities = wanted.has_logprobs ? tokens * (wanted.num_top_logprobs + 1) : 0.0;
    const double echoed = wanted.echoes.empty() ? 0.0 : static_cast<double>(wanted.echoes[i].size());
    const double scores =
        wanted.scores.empty()
            ? 0.0
            : prompt_tokens * (std::max(wanted.num_prompt_logprobs.value_or(0), wanted.num_top_logprobs) + 1);
    const double copies = wanted.scores.empty() ? kCopies : 2 * kCopies;
    bytes += copies * (sizeof(GenerationRequest) + prompt_tokens * sizeof(Token) + listed) + kPerProbability * scores;
    bytes +=
        wanted.num_texts * (kPerChoice + kPerToken * tokens + kPerProbability * probabilities + kPerEchoed * echoed);
  }
  return bytes;
}

void check_context(const CompletionRequest& wanted, std::size_t index, int max_context) {
  const Request& request = wanted.requests.at(index).request;
  const auto length = static_cast<std::int64_t>(request.prompt.size());
  if (length + (wanted.is_prompt_only ? 0 : request.max_new_tokens) <= max_context) {
    return;
  }
  const std::string field = wanted.is_chat ? "messages" : "prompt";
  const std::string name = wanted.requests.size() > 1 ? format("%s[%zu]", field.c_str(), index) : field;
  // litellm, LangChain and others look for OpenAI's words.
  const std::string limit =
      format("This model's maximum context length is %d tokens. However, you requested ", max_context);
  if (length >= max_context) {
    throw ApiError(400,
                   limit + format("%lld tokens in '%s'%s", static_cast<long long>(length), name.c_str(),
                                  length == max_context ? ", which leaves no room for a reply" : ""),
                   field, "context_length_exceeded");
  }
  const bool is_default = wanted.max_tokens_field.empty();
  const std::string limiting = is_default ? "max_tokens" : wanted.max_tokens_field;
  throw ApiError(400,
                 limit + format("%lld tokens (%lld in '%s', %d in '%s'%s): '%s' can be at most %lld",
                                static_cast<long long>(length) + request.max_new_tokens, static_cast<long long>(length),
                                name.c_str(), request.max_new_tokens, limiting.c_str(), is_default ? " by default" : "",
                                limiting.c_str(), static_cast<long long>(max_context - length)),
                 limiting, "context_length_exceeded");
}

void check_prompts(const CompletionRequest& wanted, int max_context) {
  for (std::size_t i = 0; i < wanted.requests.size(); ++i) {
    if (wanted.requests[i].request.prompt.empty()) {
      throw ApiError(400, "the prompt is empty");  // as the engine says it
    }
    check_context(wanted, i, max_context);
  }
}

void check_queue(const CompletionRequest& wanted, int max_queue) {
  const std::size_t num_prompts = wanted.requests.size();
  const std::size_t num_written = wanted.is_prompt_only ? 0 : num_prompts;
  // A request that submits nothing, an echo alone, is no way around the limit: its prompts count.
  if (std::max(num_written + wanted.scores.size(), num_prompts) <= static_cast<std::size_t>(max_queue)) {
    return;
  }
  const std::string limit = format("this server's queue has room for %d (--max-queue)", max_queue);
  if (num_prompts == 1) {
    throw ApiError(400, "the prompt's log-probabilities need a second request, and " + limit, "prompt_logprobs");
  }
  throw ApiError(
      400,
      format("'prompt' has %zu prompts%s, and ", num_prompts,
             wanted.scores.empty() || num_written == 0 ? "" : ", whose log-probabilities need as many requests again") +
          limit,
      "prompt");
}

}  // namespace common

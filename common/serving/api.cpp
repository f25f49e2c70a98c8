#include "common/serving/api.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <map>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "common/base/check.h"
#include "common/base/json.h"
#include "common/base/text.h"
#include "common/base/utf8.h"
#include "common/model/chat.h"
#include "common/model/recommended_sampling.h"
#include "common/serving/completion_request.h"
#include "common/serving/http_request.h"
#include "common/serving/page.h"

namespace common {
namespace {

constexpr std::chrono::milliseconds kWait{100};
constexpr double kBytesPerListed = 64;  // a token in a reply of tokens, or the text of one

std::string dump(const Json& document) { return document.dump(); }

ApiReply json_reply(const Json& document) { return {.body = dump(document)}; }

// Erases the condition that COMMON_CHECK puts behind a message, " (x >= 0)", from the part that begins at `begin`.
void erase_condition(std::string& message, std::size_t begin) {
  for (std::size_t at = message.find(" (", begin); at != std::string::npos; at = message.find(" (", at + 1)) {
    std::size_t end = at + 1;
    for (int depth = 0; end < message.size(); ++end) {
      depth += message[end] == '(' ? 1 : message[end] == ')' ? -1 : 0;
      if (depth == 0) {
        break;
      }
    }
    if (end + 1 == message.size() || (end < message.size() && message[end + 1] == ';')) {
      message.erase(at, end + 1 - at);
      return;
    }
  }
}

// The message of a failed COMMON_CHECK, wherever it stands, without the place in this program's source and the
// condition, "/home/me/common/base/a.cpp:12: ... (x >= 0)": they are not for clients.
std::string without_places(std::string message) {
  for (const char* const ending : {".cpp:", ".h:", ".cu:", ".cuh:"}) {
    for (std::size_t at = message.find(ending); at != std::string::npos; at = message.find(ending, at)) {
      const std::size_t number = at + std::string_view(ending).size();
      const std::size_t after = message.find_first_not_of("0123456789", number);
      const std::size_t begin = message.rfind(' ', at) + 1;  // 0: there is no blank
      if (after == number || after == std::string::npos || message.compare(after, 2, ": ") != 0) {
        at = number;
        continue;
      }
      message.erase(begin, after + 2 - begin);
      erase_condition(message, begin);
      at = begin;
    }
  }
  return message;
}

Json error_json(int status, const std::string& message, const std::string& param, const std::string& code) {
  const char* const type = status == 401   ? "authentication_error"
                           : status == 429 ? "rate_limit_error"
                           : status >= 500 ? "server_error"
                                           : "invalid_request_error";
  // An error that is the client's fault quotes the client.
  Json error = {{"message", status >= 500 ? without_places(message) : message},
                {"type", type},
                {"param", nullptr},
                {"code", nullptr}};
  if (!param.empty()) {
    error["param"] = param;
  }
  if (!code.empty()) {
    error["code"] = code;
  }
  return {{"error", error}};
}

std::string event(const Json& document) { return "data: " + dump(document) + "\n\n"; }

// Compares all bytes, so that the time does not depend on where the texts differ.
bool is_equal_secret(std::string_view left, std::string_view right) {
  unsigned difference = left.size() == right.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    difference |= static_cast<unsigned>(static_cast<unsigned char>(left[i]) ^ static_cast<unsigned char>(right[i]));
  }
  return difference == 0;
}

// "127.0.0.1:8080" of "http://127.0.0.1:8080"
std::string_view authority_of(std::string_view origin) {
  const std::size_t begin = origin.find("://");
  return begin == std::string_view::npos ? origin : origin.substr(begin + 3);
}

// Whether a Host header names this machine itself, with any port. Browsers always send one.
bool is_local_name(std::string host) {
  const std::size_t colon = host.rfind(':');
  if (colon != std::string::npos && host.find_first_not_of("0123456789", colon + 1) == std::string::npos) {
    host.resize(colon);
  }
  host = to_lower(host);
  const bool is_v4 = host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string::npos;
  return host.empty() || host == "localhost" || host == "[::1]" || is_v4;
}

// Whether it is an address, or localhost: nothing that a site can have as its own name.
bool is_address(const std::string& host) {
  return is_local_name(host) || host.starts_with('[') || host.find_first_not_of("0123456789.:") == std::string::npos;
}

// Whether a client's own id of a request may stand in a header and in the log.
bool is_plain_id(std::string_view id) {
  constexpr std::size_t kMaxLength = 128;
  return !id.empty() && id.size() <= kMaxLength && std::all_of(id.begin(), id.end(), [](char c) {
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    return is_letter || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  });
}

bool is_failed(const RequestResult& output) {
  return output.finish_reason == FinishReason::kFailed || output.finish_reason == FinishReason::kCancelled ||
         output.finish_reason == FinishReason::kRejected;
}

int status_of(const RequestResult& output) {
  return output.finish_reason == FinishReason::kRejected    ? 400
         : output.finish_reason == FinishReason::kCancelled ? 503
                                                            : 500;
}

// How many characters UTF-8 text has. Bytes that continue a character count with the one before.
std::size_t num_characters(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U; }));
}

const char* finish_reason_of(const Completion& completion) {
  return completion.finish_reason == FinishReason::kStop ? "stop" : "length";
}

// The texts of one reply: as they come, or all at the end.
class Completions : public ReplyBody {
 public:
  Completions(const ServedModel& model, CompletionRequest wanted, std::unique_ptr<Ticket> ticket, Json head)
      : model_(model), wanted_(std::move(wanted)), ticket_(std::move(ticket)), head_(std::move(head)) {}

  bool read(std::string& text) override {
    if (!has_begun_) {
      has_begun_ = true;
      begin(text);
    }
    std::map<std::size_t, Piece> added;  // by choice
    for (const TokenEvent& event : ticket_->wait(kWait)) {
      const auto index = static_cast<std::size_t>(event.index);
      if (index >= num_written()) {
        continue;
      }
      const std::size_t choice = choice_of(index, event.sample);
      num_streamed_ += 1;
      StreamedText& streamed = stream_of(choice);
      streamed.num_tokens += 1;
      added[choice].text += streamed.stream.add(event.token);
      if (event.logprobs.has_value()) {
        added[choice].logprobs.push_back(*event.logprobs);
      }
    }
    for (auto& [choice, piece] : added) {
      add_piece(text, choice, std::move(piece));
    }
    if (!ticket_->has_ended()) {
      return true;
    }
    end(text);
    return false;
  }

  // All texts, once all requests have ended.
  ApiReply reply() const {
    Json document = head_;
    document["object"] = wanted_.is_chat ? "chat.completion" : "text_completion";
    document["choices"] = Json::array();
    for (std::size_t i = 0; i < ticket_->size(); ++i) {
      if (const RequestResult& output = ticket_->result(i); is_failed(output)) {
        ApiReply failed = error_reply(status_of(output), output.error);
        failed.figures = figures();
        return failed;
      }
    }
    const std::vector<Completion> none(static_cast<std::size_t>(wanted_.num_texts));
    for (std::size_t i = 0; i < num_prompts(); ++i) {
      const std::vector<Completion>& completions = wanted_.is_prompt_only ? none : ticket_->result(i).completions;
      for (std::size_t sample = 0; sample < completions.size(); ++sample) {
        document["choices"].push_back(choice_json(i, static_cast<int>(sample), completions[sample]));
      }
    }
    if (wanted_.is_chat && wanted_.num_prompt_logprobs.has_value()) {
      document["prompt_logprobs"] = prompt_logprobs(0);
    }
    document["usage"] = usage();
    ApiReply reply = json_reply(document);
    reply.figures = figures();
    return reply;
  }

  std::optional<ReplyFigures> figures() const override {
    ReplyFigures figures;
    std::set<std::string> ends;
    for (const GenerationRequest& prompt : wanted_.requests) {
      figures.prompt_tokens += prompt.request.prompt.size();
    }
    if (wanted_.is_prompt_only) {
      ends = {"length"};
    }
    for (std::size_t i = 0; i < ticket_->size(); ++i) {
      if (!ticket_->has_ended(i)) {
        continue;
      }
      const RequestResult& output = ticket_->result(i);
      if (i < num_written()) {
        figures.cached_tokens += static_cast<std::size_t>(output.cached_tokens);
        for (const Completion& completion : output.completions) {
          figures.output_tokens += completion.tokens.size();
          ends.insert(finish_reason_of(completion));
        }
      }
      if (is_failed(output)) {
        ends = {output.finish_reason == FinishReason::kRejected ? "rejected" : "failed"};
      }
    }
    if (!ticket_->has_ended()) {
      figures.output_tokens = num_streamed_;
      return figures;
    }
    for (const std::string& end : ends) {
      figures.end += (figures.end.empty() ? "" : ", ") + end;
    }
    return figures;
  }

  const Ticket& ticket() const { return *ticket_; }
  std::string id() const { return head_.at("id").text(); }
  // Throws ApiError if the request was rejected because its context is too long.
  void check_context(std::size_t index, int max_context) const {
    if (index < num_written() && ticket_->result(index).finish_reason == FinishReason::kRejected) {
      common::check_context(wanted_, index, max_context);
    }
  }
  // Waits for something to happen, and keeps nothing of it.
  void wait() { ticket_->wait(kWait); }

 private:
  // The part of a text since the last event.
  struct Piece {
    std::string text;
    std::vector<TokenLogprobs> logprobs;
  };

  std::size_t choice_of(std::size_t index, int sample) const {
    return index * static_cast<std::size_t>(wanted_.num_texts) + static_cast<std::size_t>(sample);
  }

  // One choice, as far as it has been streamed.
  struct StreamedText {
    ReplyStream stream;
    std::string begun = {};  // the bytes so far of a character that an echo has begun
    std::size_t offset = 0;  // the characters whose tokens' log-probabilities have been sent
    std::size_t num_tokens = 0;
  };

  // Made with the choice's first text: replies that are not streamed have none.
  StreamedText& stream_of(std::size_t choice) {
    const auto found = streamed_.find(choice);
    if (found != streamed_.end()) {
      return found->second;
    }
    const Request& request = wanted_.requests[choice / static_cast<std::size_t>(wanted_.num_texts)].request;
    const auto decode = [&model = model_](std::span<const Token> tokens) { return model.decode(tokens); };
    return streamed_.emplace(choice, StreamedText{ReplyStream(request.stop_strings, decode)}).first->second;
  }

  std::size_t num_prompts() const { return wanted_.requests.size(); }
  std::size_t num_choices() const { return num_prompts() * static_cast<std::size_t>(wanted_.num_texts); }
  // How many of the ticket's requests write texts: one for each prompt, or none. The others are scores.
  std::size_t num_written() const { return wanted_.is_prompt_only ? 0 : num_prompts(); }

  std::string bytes_of(Token token) const { return model_.decode({&token, 1}, true); }

  // A token's bytes, or "bytes:\xf0\x9f" as OpenAI writes what is no text.
  std::string name_of(Token token) const {
    std::string bytes = bytes_of(token);
    try {
      check_utf8(bytes);
      return bytes;
    } catch (const InputError&) {
      std::string name = "bytes:";
      for (const char byte : bytes) {
        name += format("\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
      }
      return name;
    }
  }

  // The names of a drawn token and of the most likely ones in its place. Tokens may have the same bytes: then all but
  // the first are "token_id:65", vLLM's other way to name them.
  std::vector<std::string> names_of(const TokenLogprobs& token, std::span<const TokenLogprob> best) const {
    std::vector<std::string> names = {name_of(token.drawn.token)};
    std::map<std::string, Token> owners = {{names.front(), token.drawn.token}};
    for (const TokenLogprob& other : best) {
      const auto& [name, owner] = *owners.emplace(name_of(other.token), other.token).first;
      names.push_back(owner == other.token ? name : format("token_id:%d", other.token));
    }
    return names;
  }

  Json choice_json(std::size_t index, int sample, const Completion& completion) const {
    const Request& request = wanted_.requests[index].request;
    const StopStrings& stop = request.stop_strings;
    const std::string text = (wanted_.echoes.empty() ? "" : wanted_.echoes[index]) +
                             stop.cut(model_.decode(completion.tokens), stop.num_passed(completion.tokens));
    Json choice = {{"index", choice_of(index, sample)}};
    if (wanted_.is_chat) {
      choice["message"] = {{"role", "assistant"}, {"content", text}};
    } else {
      choice["text"] = text;
    }
    // A stop token is no part of the text.
    const std::size_t count = std::min(completion.logprobs.size(), completion.tokens.size());
    const auto tokens = std::span(completion.logprobs).first(count);
    choice["logprobs"] =
        wanted_.has_logprobs && !wanted_.echoes.empty() ? echoed_logprobs(index, tokens) : logprobs_json(tokens, 0);
    choice["finish_reason"] = finish_reason_of(completion);
    choice["stop_reason"] = stop_reason_of(index, completion);
    if (!wanted_.is_chat && wanted_.num_prompt_logprobs.has_value()) {
      choice["prompt_logprobs"] = prompt_logprobs(index);
    }
    return choice;
  }

  // vLLM's: the request's stop text or stop token that has ended the text; null: something else has, such as the
  // model's own end.
  Json stop_reason_of(std::size_t index, const Completion& completion) const {
    if (completion.finish_reason != FinishReason::kStop) {
      return nullptr;
    }
    const Request& request = wanted_.requests[index].request;
    const StopStrings& strings = request.stop_strings;
    if (completion.stop_token.has_value()) {
      const auto own = std::span(request.stop_tokens).first(wanted_.num_own_stop_tokens);
      const bool is_own = std::find(own.begin(), own.end(), *completion.stop_token) != own.end();
      const std::string spelled = bytes_of(*completion.stop_token);  // "stop" may name it
      return is_own                                 ? Json(nullptr)
             : strings.first_in(spelled) == spelled ? Json(spelled)
                                                    : Json(*completion.stop_token);
    }
    const std::optional<std::string> stop =
        strings.first_in(model_.decode(completion.tokens), strings.num_passed(completion.tokens));
    return stop.has_value() ? Json(*stop) : Json(nullptr);
  }

  // The prompt's tokens except the first, which has no probability.
  std::span<const TokenLogprobs> scores_of(std::size_t index) const {
    const std::size_t count = wanted_.requests[index].request.prompt.size() - 1;
    return std::span(ticket_->result(num_written() + index).completions.at(0).logprobs).first(count);
  }

  // vLLM's: for each token of the prompt, by token, its probability and the most likely tokens'.
  Json prompt_logprobs(std::size_t index) const {
    const auto entry_of = [&](const TokenLogprob& entry, std::size_t rank) {
      return Json{{"logprob", entry.logprob}, {"rank", rank}, {"decoded_token", name_of(entry.token)}};
    };
    Json result = Json::array({nullptr});
    for (const TokenLogprobs& token : scores_of(index)) {
      Json entries = {{std::to_string(token.drawn.token), entry_of(token.drawn, static_cast<std::size_t>(token.rank))}};
      const std::span<const TokenLogprob> best = best_of(token, *wanted_.num_prompt_logprobs);
      for (std::size_t i = 0; i < best.size(); ++i) {
        entries.emplace(std::to_string(best[i].token), entry_of(best[i], i + 1));
      }
      result.push_back(std::move(entries));
    }
    return result;
  }

  Json echoed_logprobs(std::size_t index, std::span<const TokenLogprobs> reply) const {
    const std::span<const Token> prompt = wanted_.requests[index].request.prompt;
    const std::string& echo = wanted_.echoes[index];
    const auto is_echo = [&](const std::string& text) { return text == echo || text == " " + echo; };
    std::string decoded = model_.decode(prompt);
    // The text that was sent may spell control tokens, but not the token that was put in front.
    const bool is_spelled = !is_echo(decoded);
    const bool has_added = is_spelled && !is_echo(model_.decode(prompt, true));
    decoded = is_spelled ? model_.decode(prompt.subspan(has_added ? 1 : 0), true) : decoded;
    const Token first = prompt.front();
    Json result;
    result["tokens"].push_back(name_of(first));
    result["token_logprobs"].push_back(nullptr);
    result["top_logprobs"].push_back(nullptr);
    result["text_offset"].push_back(0);
    std::size_t offset = num_characters(model_.decode({&first, 1}, is_spelled && !has_added));
    for (const auto& [tokens, spells] : {std::pair(scores_of(index), is_spelled), std::pair(reply, false)}) {
      Json added = text_logprobs(tokens, offset, spells);
      for (auto& [name, values] : result.items()) {
        for (Json& value : added[name]) {
          values.push_back(std::move(value));
        }
      }
      offset = offset_after(tokens, offset, spells);
    }
    // A blank that a tokenizer puts in front of a text is the first token's, and is not in what was sent.
    const std::size_t num_added = decoded == " " + echo ? 1 : 0;
    for (Json& position : result["text_offset"]) {
      position = std::max(position.get<std::size_t>(), num_added) - num_added;
    }
    return result;
  }

  // offset: where the first token's text begins, in characters.
  Json logprobs_json(std::span<const TokenLogprobs> tokens, std::size_t offset) const {
    if (!wanted_.has_logprobs) {
      return nullptr;
    }
    return wanted_.is_chat ? chat_logprobs(tokens) : text_logprobs(tokens, offset);
  }

  // spells: whether control tokens are in the text by their names.
  std::size_t offset_after(std::span<const TokenLogprobs> tokens, std::size_t offset, bool spells = false) const {
    for (const TokenLogprobs& token : tokens) {
      offset += num_characters(model_.decode({&token.drawn.token, 1}, spells));
    }
    return offset;
  }

  static std::span<const TokenLogprob> best_of(const TokenLogprobs& token, int max_count) {
    return std::span(token.best).first(std::min(static_cast<std::size_t>(max_count), token.best.size()));
  }

  Json chat_logprobs(std::span<const TokenLogprobs> tokens) const {
    const auto entry_of = [&](const TokenLogprob& entry, const std::string& name) {
      const std::string bytes = bytes_of(entry.token);
      return Json{{"token", name},
                  {"logprob", entry.logprob},
                  {"bytes", std::vector<unsigned char>(bytes.begin(), bytes.end())}};
    };
    Json content = Json::array();
    for (const TokenLogprobs& token : tokens) {
      const std::span<const TokenLogprob> best = best_of(token, wanted_.num_top_logprobs);
      const std::vector<std::string> names = names_of(token, best);
      Json entry = entry_of(token.drawn, names.front());
      entry["top_logprobs"] = Json::array();
      for (std::size_t i = 0; i < best.size(); ++i) {
        entry["top_logprobs"].push_back(entry_of(best[i], names[i + 1]));
      }
      content.push_back(std::move(entry));
    }
    return {{"content", std::move(content)}};
  }

  Json text_logprobs(std::span<const TokenLogprobs> tokens, std::size_t offset, bool spells = false) const {
    Json result = {{"tokens", Json::array()},
                   {"token_logprobs", Json::array()},
                   {"top_logprobs", Json::array()},
                   {"text_offset", Json::array()}};
    for (const TokenLogprobs& token : tokens) {
      const std::span<const TokenLogprob> best = best_of(token, wanted_.num_top_logprobs);
      const std::vector<std::string> names = names_of(token, best);
      result["tokens"].push_back(names.front());
      result["token_logprobs"].push_back(token.drawn.logprob);
      Json top = {{names.front(), token.drawn.logprob}};
      for (std::size_t i = 0; i < best.size(); ++i) {
        top[names[i + 1]] = best[i].logprob;
      }
      result["top_logprobs"].push_back(std::move(top));
      // A token inside a character is where the character is, which is counted with its first byte.
      const std::string text = model_.decode({&token.drawn.token, 1}, spells);
      const bool is_inside = offset > 0 && !text.empty() && num_characters(text.substr(0, 1)) == 0;
      result["text_offset"].push_back(is_inside ? offset - 1 : offset);
      offset = offset_after({&token, 1}, offset, spells);
    }
    return result;
  }

  // end: {"finish_reason": ..., "stop_reason": ...}; empty: the text goes on.
  Json chunk(std::size_t index, Json delta, const Json& end = Json::object(),
             std::span<const TokenLogprobs> logprobs = {}, std::size_t offset = 0) const {
    Json document = head_;
    document["object"] = wanted_.is_chat ? "chat.completion.chunk" : "text_completion";
    Json choice = {{"index", index}};
    if (wanted_.is_chat) {
      choice["delta"] = std::move(delta);
    } else {
      const Json* const content = delta.find("content");
      choice["text"] = content != nullptr ? *content : "";
    }
    choice["logprobs"] = logprobs.empty() ? Json(nullptr) : logprobs_json(logprobs, offset);
    choice["finish_reason"] = end.at("finish_reason");
    choice["stop_reason"] = end.at("stop_reason");
    document["choices"] = Json::array({choice});
    if (wanted_.include_usage) {
      document["usage"] = wanted_.has_running_usage ? running_usage(index) : Json(nullptr);
    }
    return document;
  }

  void begin(std::string& text) {
    for (std::size_t choice = 0; wanted_.is_chat && choice < num_choices(); ++choice) {
      text += event(chunk(choice, {{"role", "assistant"}, {"content", ""}}));
    }
    for (std::size_t choice = 0; !wanted_.echoes.empty() && choice < num_choices(); ++choice) {
      add_piece(text, choice, {wanted_.echoes[choice / static_cast<std::size_t>(wanted_.num_texts)], {}});
    }
  }

  // A character that an echo has begun waits for the reply, or for the end.
  void add_piece(std::string& text, std::size_t choice, Piece piece, bool is_last = false) {
    StreamedText& streamed = stream_of(choice);
    piece.text.insert(0, streamed.begun);
    const std::size_t size = is_last ? piece.text.size() : whole_characters(piece.text);
    streamed.begun = piece.text.substr(size);
    piece.text.resize(size);
    if (!piece.text.empty() || !piece.logprobs.empty()) {
      text += event(chunk(choice, {{"content", piece.text}}, Json::object(), piece.logprobs, streamed.offset));
      streamed.offset = offset_after(piece.logprobs, streamed.offset);
    }
  }

  void end(std::string& text) {
    for (std::size_t i = 0; i < ticket_->size(); ++i) {
      const RequestResult& output = ticket_->result(i);
      if (is_failed(output)) {
        text += event(error_json(status_of(output), output.error, "", ""));
        continue;
      }
      for (std::size_t sample = 0; sample < output.completions.size(); ++sample) {
        const Completion& completion = output.completions[sample];
        const std::size_t choice = choice_of(i, static_cast<int>(sample));
        StreamedText& streamed = stream_of(choice);
        streamed.num_tokens = completion.tokens.size();
        if (wanted_.requests[i].length_penalty.has_value()) {  // a beam search knows its texts only now
          std::string whole;
          for (const Token token : completion.tokens) {
            whole += streamed.stream.add(token);
          }
          add_piece(text, choice, {whole, {}});
        }
        add_piece(text, choice, {streamed.stream.finish(), {}}, true);
        text += event(
            chunk(choice, Json::object(),
                  {{"finish_reason", finish_reason_of(completion)}, {"stop_reason", stop_reason_of(i, completion)}}));
      }
    }
    for (std::size_t choice = 0; wanted_.is_prompt_only && choice < num_choices(); ++choice) {
      add_piece(text, choice, {}, true);
      text += event(chunk(choice, Json::object(), {{"finish_reason", "length"}}));
    }
    if (wanted_.include_usage) {
      Json last = chunk(0, Json::object());
      last["choices"] = Json::array();
      last["usage"] = usage();
      text += event(last);
    }
    text += "data: [DONE]\n\n";
  }

  // vLLM's "continuous_usage_stats": of one text, so far.
  Json running_usage(std::size_t choice) const {
    const std::size_t index = choice / static_cast<std::size_t>(wanted_.num_texts);
    const std::size_t prompt_tokens = wanted_.requests[index].request.prompt.size();
    const auto streamed = streamed_.find(choice);
    const std::size_t num_tokens = streamed == streamed_.end() ? 0 : streamed->second.num_tokens;
    return {{"prompt_tokens", prompt_tokens},
            {"completion_tokens", num_tokens},
            {"total_tokens", prompt_tokens + num_tokens}};
  }

  Json usage() const {
    const ReplyFigures counted = figures().value();
    return {{"prompt_tokens", counted.prompt_tokens},
            {"completion_tokens", counted.output_tokens},
            {"total_tokens", counted.prompt_tokens + counted.output_tokens},
            {"prompt_tokens_details", {{"cached_tokens", counted.cached_tokens}}}};
  }

  const ServedModel& model_;
  CompletionRequest wanted_;
  std::unique_ptr<Ticket> ticket_;
  Json head_;  // the fields that all parts of the reply have
  bool has_begun_ = false;
  std::map<std::size_t, StreamedText> streamed_;  // by choice
  std::size_t num_streamed_ = 0;                  // tokens
};

// The pool's records, as they come: many steps take less time than one draws on a screen.
class PoolRecords : public ReplyBody {
 public:
  PoolRecords(PoolView& view, EngineThread& engine) : engine_(engine), watcher_(view) {}
  bool read(std::string& text) override {
    constexpr std::chrono::milliseconds kBetweenReads{33};
    std::this_thread::sleep_until(next_read_);
    if (watcher_.needs_whole()) {
      engine_.refresh();
    }
    const bool is_over = engine_.is_draining() && engine_.drained();  // until then, the page shows the drain
    const std::vector<std::string> records = watcher_.read(kWait);
    for (const std::string& record : records) {
      text += "data: " + record + "\n\n";
    }
    next_read_ = std::chrono::steady_clock::now() + kBetweenReads;
    // The last records may be more than are read at once, and a client that was late gets a whole one.
    return !is_over || !records.empty() || watcher_.needs_whole();
  }

 private:
  EngineThread& engine_;
  PoolView::Watcher watcher_;
  std::chrono::steady_clock::time_point next_read_ = {};
};

std::int64_t seconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string random_digits() {
  std::random_device random;
  return format("%08x%08x", random(), random());
}

struct Route {
  const char* path;
  const char* method;
  bool is_open = false;     // without a key
  bool is_control = false;  // whether it controls the pool
};
constexpr std::string_view kModels = "/v1/models/";  // a model's name follows
constexpr std::array<Route, 17> kRoutes = {{
    {.path = "/", .method = "GET", .is_open = true},
    {.path = "/health", .method = "GET", .is_open = true},
    {.path = "/metrics", .method = "GET", .is_open = true},
    {.path = "/favicon.ico", .method = "GET", .is_open = true},
    {.path = "/version", .method = "GET", .is_open = true},
    {.path = "/v1/models", .method = "GET"},
    {.path = kModels.data(), .method = "GET"},
    {.path = "/v1/completions", .method = "POST"},
    {.path = "/v1/chat/completions", .method = "POST"},
    {.path = "/tokenize", .method = "POST"},
    {.path = "/detokenize", .method = "POST"},
    {.path = "/pool/events", .method = "GET"},
    {.path = "/pool/pause", .method = "POST", .is_control = true},
    {.path = "/pool/run", .method = "POST", .is_control = true},
    {.path = "/pool/step", .method = "POST", .is_control = true},
    {.path = "/pool/restart", .method = "POST", .is_control = true},
    {.path = "/pool/demo", .method = "POST", .is_control = true},
}};

// Null: there is none.
const Route* find_route(std::string_view path) {
  const std::string_view known = path.starts_with(kModels) && path.size() > kModels.size() ? kModels : path;
  const auto* const found =
      std::find_if(kRoutes.begin(), kRoutes.end(), [&](const Route& route) { return known == route.path; });
  return found == kRoutes.end() || path == kModels ? nullptr : found;
}

std::string allowed_methods(const Route& route) { return route.method == std::string("GET") ? "GET, HEAD" : "POST"; }

// "a/b" of "a%2Fb". Anything else stays.
std::string unescaped(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    unsigned char byte = 0;
    const char* const digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() && std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      result += static_cast<char>(byte);
      i += 2;
    } else {
      result += text[i];
    }
  }
  return result;
}

// For load balancers: requests are sent to a server with 200, and to none with 503.
ApiReply health_reply(const char* state, const std::string& failure = "") {
  Json document = {{"status", state}};
  if (!failure.empty()) {
    document["error"] = without_places(failure);
  }
  ApiReply reply = json_reply(document);
  if (state != std::string_view("ready")) {
    reply.status = 503;
    reply.headers.emplace_back("Retry-After", "1");
    reply.problem = failure.empty() ? state : failure;
  }
  return reply;
}

// Four blocks, three of them with an owner.
constexpr const char* kIcon =
    R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#2a6fb0" d="M1 1h6v6H1z"/>)"
    R"(<path fill="#d9822b" d="M9 1h6v6H9z"/><path fill="#3d8f5f" d="M1 9h6v6H1z"/>)"
    R"(<path fill="none" stroke="#888" d="M9.5 9.5h5v5h-5z"/></svg>)";

// The page, what it may offer, and how tokens are drawn where a request does not say.
std::string page_text(bool has_controls, bool has_chat, const SamplingOptions& sampling) {
  std::string text = page();
  const std::string body = "<body>";
  text.replace(text.find(body), body.size(),
               format("<body data-controls=\"%d\" data-chat=\"%d\" data-sampling='{\"temperature\": %g, \"top_k\": %d, "
                      "\"top_p\": %g, \"min_p\": %g, \"repetition_penalty\": %g, \"presence_penalty\": 0, "
                      "\"frequency_penalty\": 0}'>",
                      has_controls ? 1 : 0, has_chat ? 1 : 0, static_cast<double>(sampling.temperature), sampling.top_k,
                      static_cast<double>(sampling.top_p), static_cast<double>(sampling.min_p),
                      static_cast<double>(sampling.repetition_penalty)));
  return text;
}

}  // namespace

ApiReply error_reply(int status, const std::string& message, const std::string& param, const std::string& code) {
  ApiReply reply = json_reply(error_json(status, message, param, code));
  reply.status = status;
  reply.problem = message;
  if (status == 429 || status == 503) {
    reply.headers.emplace_back("Retry-After", "1");
  } else if (status == 401) {
    reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  }
  return reply;
}

ApiReply starting_reply(const std::string& path) {
  return path == "/health" ? health_reply("starting") : error_reply(503, "the server is starting");
}

Api::Api(const ServedModel& model, EngineThread& engine, PoolView& view, const ApiOptions& options)
    : model_(model),
      engine_(engine),
      view_(view),
      options_(options),
      defaults_{options.model_name, recommended_sampling(*model.session().file), options.chat_format},
      chat_problem_(chat_problem(model, options.chat_format)),
      demo_(options.make_demo_pool),
      next_seed_(model.session().requests.front().sampling.seed),
      reply_ids_(random_digits()),
      created_(seconds_since_1970()) {
  if (options_.memory == nullptr) {
    options_.memory = MemoryAccount::of_this_machine();
  }
  const bool has_chat = chat_problem_.empty() && chat_format(*model.session().file, {options.chat_format}) != "none";
  page_ = std::make_shared<const std::string>(page_text(options.pool_controls, has_chat, defaults_.sampling));
}

ApiReply Api::handle(ApiRequest request, const std::function<bool()>& is_gone) {
  ApiReply reply = reply_to(request, is_gone);
  return with_headers(request, std::move(reply));
}

std::optional<ApiReply> Api::refusal(const ApiRequest& request) const {
  std::optional<ApiReply> reply = refused(request);
  return reply.has_value() ? std::optional(with_headers(request, std::move(*reply))) : std::nullopt;
}

ApiReply Api::reply_to(ApiRequest& request, const std::function<bool()>& is_gone) {
  try {
    std::optional<ApiReply> reply = refused(request);
    return reply.has_value() ? std::move(*reply) : route(request, is_gone);
  } catch (const ApiError& error) {
    return error_reply(error.status(), error.what(), error.param(), error.code());
  } catch (const InputError& error) {
    return error_reply(400, error.what());
  } catch (const std::bad_alloc&) {
    return error_reply(503, "out of memory");
  } catch (const std::exception& error) {
    return error_reply(500, error.what());
  }
}

void Api::restore_unwatched(std::chrono::milliseconds after) {
  const auto now = std::chrono::steady_clock::now();
  if (!has_changes_ || view_.num_watchers() > 0) {
    last_watched_ = now;
  } else if (now - last_watched_ >= after) {
    has_changes_ = false;  // first: what is changed meanwhile is a change
    if (!engine_.restore()) {
      has_changes_ = true;
    }
  }
}

bool Api::is_allowed_origin(const std::string& origin) const {
  return std::any_of(options_.cors_origins.begin(), options_.cors_origins.end(),
                     [&](const std::string& allowed) { return allowed == "*" || allowed == origin; });
}

// Lets the browser show the reply to a page of another site, if the site is one of --cors.
// And adds the request's id, if the client has given it one.
ApiReply Api::with_headers(const ApiRequest& request, ApiReply reply) const {
  if (!options_.cors_origins.empty()) {
    reply.headers.emplace_back("Vary", "Origin");
  }
  if (!request.origin.empty() && is_allowed_origin(request.origin)) {
    reply.headers.emplace_back("Access-Control-Allow-Origin", request.origin);
    reply.headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, X-Request-Ids, Retry-After");
  }
  if (is_plain_id(request.request_id)) {
    reply.headers.emplace_back(kRequestId, request.request_id);
  }
  return reply;
}

std::optional<ApiReply> Api::refused(const ApiRequest& request) const {
  // A site can point its own name at 127.0.0.1. To the browser, its page and this server are then one site.
  if (request.is_on_loopback && options_.api_key.empty() && !is_local_name(request.host)) {
    return error_reply(403, "the host " + quote(request.host) +
                                " is refused: without --api-key, this address is localhost, 127.0.0.1 or [::1]");
  }
  const Route* const found = find_route(request.path);
  if (found == nullptr) {
    return error_reply(404, request.path == "/v1/embeddings" ? "there are no embeddings: this server writes texts"
                                                             : "there is no " + quote(request.path));
  }
  if (request.method == "OPTIONS" && !options_.cors_origins.empty()) {  // a browser asks before it sends, without a key
    ApiReply reply{.content_type = "text/plain", .headers = {{"Allow", allowed_methods(*found) + ", OPTIONS"}}};
    if (is_allowed_origin(request.origin)) {
      reply.headers.emplace_back("Access-Control-Allow-Methods", allowed_methods(*found));
      reply.headers.emplace_back("Access-Control-Allow-Headers", request.requested_headers.empty()
                                                                     ? "Authorization, Content-Type"
                                                                     : request.requested_headers);
      reply.headers.emplace_back("Access-Control-Max-Age", "600");
    }
    return reply;
  }
  if (request.method != found->method && !(request.method == "HEAD" && found->method == std::string("GET"))) {
    ApiReply reply = error_reply(405, request.path + " is for " + allowed_methods(*found));
    reply.headers.emplace_back("Allow", allowed_methods(*found));
    return reply;
  }
  if (!found->is_open && !is_authorized(request)) {
    return error_reply(401, "the API key is missing or wrong", "", "invalid_api_key");
  }
  if (found->is_control && !options_.pool_controls) {
    return error_reply(403, std::string(found->path) + " is off: it needs a server with --pool-controls");
  }
  if (request.method == "POST") {
    // A page of another site can make a browser send a request, but only with types like text/plain or after asking.
    const std::string type = to_lower(request.content_type.substr(0, request.content_type.find_first_of("; \t")));
    const bool is_foreign = !request.origin.empty() && authority_of(request.origin) != request.host;
    if (is_foreign && found->is_control) {
      return error_reply(403, "requests of other sites' pages are refused: --cors lets none of them steer the pool");
    }
    // Beyond this machine, too, a site can point its own name at this address.
    if (!request.origin.empty() && found->is_control && options_.api_key.empty() && !is_address(request.host)) {
      return error_reply(403, "a page under the name " + quote(request.host) +
                                  " steers no pool: without --api-key, open it under the server's IP address");
    }
    if (is_foreign && !is_allowed_origin(request.origin)) {
      return error_reply(403,
                         "requests of other sites' pages are refused: this server's --cors names none of that site");
    }
    if (type != "application/json") {
      return error_reply(415, "the body must be of the type application/json");
    }
  }
  return std::nullopt;
}

ApiReply Api::route(ApiRequest& request, const std::function<bool()>& is_gone) {
  const std::string& path = request.path;
  if (path == "/") {
    // Whatever a text of a model or a client might smuggle in, the page reaches no other server.
    const char* const policy =
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    return {.content_type = "text/html; charset=utf-8",
            .shared_body = page_,
            .headers = {{"Content-Security-Policy", policy}}};
  }
  if (path == "/health") {
    return health();
  }
  if (path == "/metrics") {
    return {.content_type = "text/plain; version=0.0.4", .body = metrics_text(engine_.state(), options_.model_name)};
  }
  if (path == "/favicon.ico") {
    return {.content_type = "image/svg+xml", .body = kIcon, .headers = {{"Cache-Control", "max-age=86400"}}};
  }
  if (path == "/version") {
    return json_reply({{"version", COURSE_VERSION}});
  }
  if (path.starts_with("/v1/models")) {
    return models(path);
  }
  if (path == "/v1/completions" || path == "/v1/chat/completions") {
    return complete(request, path == "/v1/chat/completions", is_gone);
  }
  if (path == "/tokenize") {
    return tokenize(request);
  }
  if (path == "/detokenize") {
    return detokenize(request);
  }
  if (path == "/pool/events") {
    constexpr int kMaxWatchers = 128;  // each one keeps a thread that completions could use
    if (view_.num_watchers() >= kMaxWatchers) {
      return error_reply(503, "too many clients watch the pool");
    }
    return {.content_type = "text/event-stream",
            .headers = {{"Cache-Control", "no-store"}},
            .stream = std::make_unique<PoolRecords>(view_, engine_)};
  }
  return pool(request);
}

bool Api::is_authorized(const ApiRequest& request) const {
  const std::string scheme = "bearer ";
  return options_.api_key.empty() || (to_lower(request.authorization).starts_with(scheme) &&
                                      is_equal_secret(request.authorization.substr(scheme.size()), options_.api_key));
}

// Makes the share this large. Throws ApiError, with the limit that is in the way.
void Api::reserve(MemoryAccount::Share& share, double bytes) const {
  constexpr double kMebibyte = 1 << 20;
  constexpr double kMost = 1e18;
  const MemoryAccount& account = *options_.memory;
  switch (share.resize(static_cast<std::size_t>(std::min(bytes, kMost)))) {
    case MemoryAccount::Answer::kNeverFits:
      throw ApiError(413,
                     format("the request and its reply would take %.1f MiB of memory, and one request may take %.1f "
                            "(half of --request-memory)",
                            bytes / kMebibyte, static_cast<double>(account.per_request()) / kMebibyte),
                     "", "request_too_large");
    case MemoryAccount::Answer::kNotNow:
      throw ApiError(429,
                     format("other requests have the memory that all may take, %.1f MiB (--request-memory)",
                            static_cast<double>(account.in_all()) / kMebibyte),
                     "", "memory_full");
    case MemoryAccount::Answer::kGranted:
      break;
  }
}

ApiReply Api::complete(ApiRequest& request, bool is_chat, const std::function<bool()>& is_gone) {
  const PoolSizes sizes = engine_.sizes();
  const CompletionLimits limits{engine_.max_context(), engine_.max_sequences(), sizes.token_budget,
                                sizes.num_slots,       sizes.block_size,        engine_.max_drafts()};
  if (is_chat) {
    check_chat();
  }
  MemoryAccount::Share memory(options_.memory);
  reserve(memory, bytes_to_read(request.body));
  CompletionRequest wanted = parse_completion(request.body, is_chat, model_, defaults_, limits, next_seed_);
  request.body = std::string();
  check_queue(wanted, engine_.max_queue());
  reserve(memory, bytes_held(wanted, limits.max_context));
  if (wanted.is_prompt_only) {
    check_prompts(wanted, limits.max_context);
  }
  std::vector<GenerationRequest> submitted = wanted.is_prompt_only ? std::vector<GenerationRequest>() : wanted.requests;
  submitted.insert(submitted.end(), wanted.scores.begin(), wanted.scores.end());
  EngineThread::Refusal refusal = EngineThread::Refusal::kNone;
  std::unique_ptr<Ticket> ticket = engine_.submit(std::move(submitted), refusal);
  switch (refusal) {
    case EngineThread::Refusal::kQueueFull:
      throw ApiError(429, "the queue is full", "", "queue_full");
    case EngineThread::Refusal::kDraining:
      throw ApiError(503, "the server is ending");
    case EngineThread::Refusal::kFailed:
      throw ApiError(503, "the engine has failed: " + engine_.failure());
    case EngineThread::Refusal::kNone:
      break;
  }
  // A request that can't be served gets an error, not the beginning of a reply.
  Json head = {{"id", format("%s-%s-%lld", is_chat ? "chatcmpl" : "cmpl", reply_ids_.c_str(),
                             static_cast<long long>(num_replies_++))},
               {"object", ""},
               {"created", seconds_since_1970()},
               {"model", options_.model_name}};
  const bool is_streamed = wanted.is_streamed;
  auto texts = std::make_unique<Completions>(model_, std::move(wanted), std::move(ticket), std::move(head));
  const std::string reply_id = texts->id();
  while (!texts->ticket().is_submitted(kWait)) {
    if (is_gone()) {
      return error_reply(499, "the client has gone");  // the reply is not read
    }
  }
  while (is_streamed && options_.streams_wait && !texts->ticket().has_news(kWait)) {
    if (is_gone()) {
      return error_reply(499, "the client has gone");  // the reply is not read
    }
  }
  std::string request_ids;
  for (std::size_t i = 0; i < texts->ticket().size(); ++i) {
    if (texts->ticket().has_ended(i) && is_failed(texts->ticket().result(i))) {
      texts->check_context(i, limits.max_context);
      return error_reply(status_of(texts->ticket().result(i)), texts->ticket().result(i).error);
    }
    request_ids += format("%s%d", i == 0 ? "" : ",", texts->ticket().id(i));
  }
  ApiReply reply;
  if (is_streamed) {
    reply = {.content_type = "text/event-stream", .headers = {{"Cache-Control", "no-store"}}};
    reply.stream = std::move(texts);
  } else {
    while (!texts->ticket().has_ended()) {
      if (is_gone()) {
        return error_reply(499, "the client has gone");  // the reply is not read
      }
      texts->wait();
    }
    reply = texts->reply();
  }
  reply.memory = std::move(memory);
  if (!request_ids.empty()) {
    reply.headers.emplace_back("X-Request-Ids", request_ids);  // the engine's, as they are on the page
  }
  if (!is_plain_id(request.request_id)) {
    reply.headers.emplace_back(kRequestId, reply_id);
  }
  return reply;
}

// A chat without a known template in the model's file. The reason was given to the operator at the start.
void Api::check_chat() const {
  if (!chat_problem_.empty()) {
    throw ApiError(400,
                   "this model's chat template is not one that this server knows, so it has no chats; there are texts "
                   "at /v1/completions; a template is chosen where the server is started (--chat-template)",
                   "messages");
  }
}

ApiReply Api::health() const {
  const std::string failure = engine_.failure();
  return health_reply(engine_.is_drain_announced() ? "draining" : failure.empty() ? "ready" : "failed", failure);
}

ApiReply Api::models(const std::string& path) const {
  const Json model = {{"id", options_.model_name},
                      {"object", "model"},
                      {"created", created_},
                      {"owned_by", "course"},
                      {"max_model_len", engine_.max_context()}};
  if (!path.starts_with(kModels)) {
    return json_reply({{"object", "list"}, {"data", Json::array({model})}});
  }
  check_model(unescaped(path.substr(kModels.size())), options_.model_name);
  return json_reply(model);
}

ApiReply Api::tokenize(const ApiRequest& request) const {
  MemoryAccount::Share memory(options_.memory);
  reserve(memory, bytes_to_read(request.body));
  const Fields fields(request.body);
  check_model(fields.text("model", options_.model_name), options_.model_name);
  std::vector<Token> tokens;
  if (fields.find("messages") != nullptr) {
    check_chat();
    tokens = chat_prompt(model_, fields, defaults_);
  } else if (fields.find("prompt") == nullptr) {
    throw ApiError(400, "'prompt' is missing", "prompt");
  } else {
    tokens = text_prompt(model_, fields, fields.text("prompt", ""));
  }
  fields.refuse_others();
  reserve(memory, bytes_to_read(request.body) + kBytesPerListed * static_cast<double>(tokens.size()));
  ApiReply reply = json_reply({{"count", tokens.size()}, {"max_model_len", engine_.max_context()}, {"tokens", tokens}});
  reply.memory = std::move(memory);
  return reply;
}

ApiReply Api::detokenize(const ApiRequest& request) const {
  MemoryAccount::Share memory(options_.memory);
  reserve(memory, bytes_to_read(request.body));
  const Fields fields(request.body);
  check_model(fields.text("model", options_.model_name), options_.model_name);
  const Json* const tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) {
    throw ApiError(400, "'tokens' must be a list of tokens", "tokens");
  }
  fields.refuse_others();
  std::string text;
  if (!tokens->empty()) {
    reserve(memory, bytes_to_read(request.body) + kBytesPerListed * static_cast<double>(tokens->size()));
    text = model_.decode_text(token_list(model_, *tokens, "tokens"));
  }
  ApiReply reply = json_reply({{"prompt", text}});
  reply.memory = std::move(memory);
  return reply;
}

ApiReply Api::pool(const ApiRequest& request) {
  MemoryAccount::Share memory(options_.memory);
  reserve(memory, bytes_to_read(request.body));
  const Fields fields(request.body.empty() ? "{}" : request.body);
  const bool lasts = !fields.boolean("while_watched", false);
  const auto accept = [&] {
    fields.refuse_others();
    if (!lasts) {
      has_changes_ = true;
    }
  };
  if (request.path == "/pool/pause") {
    accept();
    engine_.pause();
  } else if (request.path == "/pool/run") {
    accept();
    engine_.run();
  } else if (request.path == "/pool/step") {
    accept();
    engine_.step();
  } else if (request.path == "/pool/restart") {
    constexpr int kMaxSlots = 1 << 24;
    constexpr int kMaxBlockSize = 1 << 16;
    if (fields.boolean("as_started", false)) {
      accept();
      engine_.restart(std::nullopt, lasts);
      return json_reply({{"paused", engine_.is_paused()}});
    }
    PoolSizes sizes = engine_.sizes();
    sizes.num_slots = fields.integer("slots", 1, kMaxSlots, sizes.num_slots);
    sizes.block_size = fields.integer("block_size", 1, kMaxBlockSize, sizes.block_size);
    sizes.token_budget = fields.integer("budget", 1, kMaxBlockSize, sizes.token_budget);
    if (fields.find("swap") != nullptr) {
      sizes.swaps = fields.boolean("swap", false);
    }
    accept();
    engine_.restart(sizes, lasts);
  } else {
    constexpr int kMaxDemoBlocks = 1024;
    if (fields.find("blocks") != nullptr) {
      return {.body = demo_.reset(fields.integer("blocks", 1, kMaxDemoBlocks, 8),
                                  fields.integer("block_size", 1, kMaxDemoBlocks, 4))};
    }
    return {.body = demo_.run(fields.text("line", ""))};
  }
  return json_reply({{"paused", engine_.is_paused()}});
}

}  // namespace common

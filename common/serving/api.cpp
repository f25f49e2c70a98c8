#include "common/serving/api.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <span>
#include <string_view>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/serving/completion_request.h"
#include "common/serving/http_request.h"
#include "common/serving/page.h"

namespace common {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::chrono::milliseconds kWait{100};

// A reply may end in the middle of a character, and errors quote a client's text, which may be no UTF-8.
std::string dump(const ordered_json& document) {
  return document.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

ApiReply json_reply(const ordered_json& document) { return {.body = dump(document)}; }

ordered_json error_json(int status, const std::string& message, const std::string& param, const std::string& code) {
  const char* const type = status == 401   ? "authentication_error"
                           : status == 429 ? "rate_limit_error"
                           : status >= 500 ? "server_error"
                                           : "invalid_request_error";
  ordered_json error = {{"message", message}, {"type", type}, {"param", nullptr}, {"code", nullptr}};
  if (!param.empty()) {
    error["param"] = param;
  }
  if (!code.empty()) {
    error["code"] = code;
  }
  return {{"error", error}};
}

std::string event(const ordered_json& document) { return "data: " + dump(document) + "\n\n"; }

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

bool is_failed(const RequestResult& output) {
  return output.finish_reason == FinishReason::kFailed || output.finish_reason == FinishReason::kCancelled ||
         output.finish_reason == FinishReason::kRejected;
}

int status_of(const RequestResult& output) {
  return output.finish_reason == FinishReason::kRejected    ? 400
         : output.finish_reason == FinishReason::kCancelled ? 503
                                                            : 500;
}

const char* finish_reason_of(const Completion& completion) {
  return completion.finish_reason == FinishReason::kStop ? "stop" : "length";
}

// The texts of one reply: as they come, or all at the end.
class Completions : public ReplyBody {
 public:
  Completions(const ServedModel& model, CompletionRequest wanted, std::unique_ptr<Ticket> ticket, ordered_json head)
      : model_(model), wanted_(std::move(wanted)), ticket_(std::move(ticket)), head_(std::move(head)) {
    const auto decode = [&model](std::span<const Token> tokens) { return model.decode(tokens); };
    for (const ServedRequest& request : wanted_.requests) {
      texts_.insert(texts_.end(), static_cast<std::size_t>(wanted_.num_texts),
                    ReplyStream(request.request.stop_strings, decode));
    }
  }

  bool read(std::string& text) override {
    if (!has_begun_) {
      has_begun_ = true;
      begin(text);
    }
    std::map<std::size_t, Piece> added;  // by choice
    for (const TokenEvent& event : ticket_->wait(kWait)) {
      const std::size_t choice = choice_of(static_cast<std::size_t>(event.index), event.sample);
      added[choice].text += texts_[choice].add(event.token);
      if (event.logprobs.has_value()) {
        added[choice].logprobs.push_back(*event.logprobs);
      }
    }
    for (const auto& [choice, piece] : added) {
      add_piece(text, choice, piece);
    }
    if (!ticket_->has_ended()) {
      return true;
    }
    end(text);
    return false;
  }

  // All texts, once all requests have ended.
  ApiReply reply() const {
    ordered_json document = head_;
    document["object"] = wanted_.is_chat ? "chat.completion" : "text_completion";
    document["choices"] = ordered_json::array();
    for (std::size_t i = 0; i < ticket_->size(); ++i) {
      const RequestResult& output = ticket_->result(i);
      if (is_failed(output)) {
        return error_reply(status_of(output), output.error);
      }
      for (std::size_t sample = 0; sample < output.completions.size(); ++sample) {
        const Completion& completion = output.completions[sample];
        const std::string text = wanted_.requests[i].request.stop_strings.cut(model_.decode(completion.tokens));
        ordered_json choice = {{"index", choice_of(i, static_cast<int>(sample))}};
        if (wanted_.is_chat) {
          choice["message"] = {{"role", "assistant"}, {"content", text}};
        } else {
          choice["text"] = text;
        }
        // A stop token is no part of the text.
        choice["logprobs"] = logprobs_json(
            std::span(completion.logprobs).first(std::min(completion.logprobs.size(), completion.tokens.size())));
        choice["finish_reason"] = finish_reason_of(completion);
        document["choices"].push_back(choice);
      }
    }
    document["usage"] = usage();
    return json_reply(document);
  }

  const Ticket& ticket() const { return *ticket_; }
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

  std::string spelling(Token token) const { return model_.decode({&token, 1}, true); }

  ordered_json logprobs_json(std::span<const TokenLogprobs> tokens) const {
    if (!wanted_.has_logprobs) {
      return nullptr;
    }
    return wanted_.is_chat ? chat_logprobs(tokens) : text_logprobs(tokens);
  }

  std::span<const TokenLogprob> best_of(const TokenLogprobs& token) const {
    const auto count = static_cast<std::size_t>(wanted_.num_top_logprobs);
    return std::span(token.best).first(std::min(count, token.best.size()));
  }

  ordered_json chat_logprobs(std::span<const TokenLogprobs> tokens) const {
    const auto entry_of = [&](const TokenLogprob& entry) {
      const std::string text = spelling(entry.token);
      return ordered_json{
          {"token", text}, {"logprob", entry.logprob}, {"bytes", std::vector<unsigned char>(text.begin(), text.end())}};
    };
    ordered_json content = ordered_json::array();
    for (const TokenLogprobs& token : tokens) {
      ordered_json entry = entry_of(token.drawn);
      entry["top_logprobs"] = ordered_json::array();
      for (const TokenLogprob& other : best_of(token)) {
        entry["top_logprobs"].push_back(entry_of(other));
      }
      content.push_back(std::move(entry));
    }
    return {{"content", std::move(content)}};
  }

  ordered_json text_logprobs(std::span<const TokenLogprobs> tokens) const {
    ordered_json result = {{"tokens", ordered_json::array()},
                           {"token_logprobs", ordered_json::array()},
                           {"top_logprobs", ordered_json::array()}};
    for (const TokenLogprobs& token : tokens) {
      result["tokens"].push_back(spelling(token.drawn.token));
      result["token_logprobs"].push_back(token.drawn.logprob);
      ordered_json best = {{spelling(token.drawn.token), token.drawn.logprob}};
      for (const TokenLogprob& other : best_of(token)) {
        best[spelling(other.token)] = other.logprob;
      }
      result["top_logprobs"].push_back(std::move(best));
    }
    return result;
  }

  ordered_json chunk(std::size_t index, ordered_json delta, const ordered_json& finish_reason,
                     std::span<const TokenLogprobs> logprobs = {}) const {
    ordered_json document = head_;
    document["object"] = wanted_.is_chat ? "chat.completion.chunk" : "text_completion";
    ordered_json choice = {{"index", index}};
    if (wanted_.is_chat) {
      choice["delta"] = std::move(delta);
    } else {
      choice["text"] = delta.value("content", "");
    }
    choice["logprobs"] = logprobs.empty() ? ordered_json(nullptr) : logprobs_json(logprobs);
    choice["finish_reason"] = finish_reason;
    document["choices"] = ordered_json::array({choice});
    if (wanted_.include_usage) {
      document["usage"] = nullptr;
    }
    return document;
  }

  void begin(std::string& text) const {
    for (std::size_t choice = 0; wanted_.is_chat && choice < texts_.size(); ++choice) {
      text += event(chunk(choice, {{"role", "assistant"}, {"content", ""}}, nullptr));
    }
  }

  void add_piece(std::string& text, std::size_t choice, const Piece& piece) const {
    if (!piece.text.empty() || !piece.logprobs.empty()) {
      text += event(chunk(choice, {{"content", piece.text}}, nullptr, piece.logprobs));
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
        if (wanted_.requests[i].length_penalty.has_value()) {  // a beam search knows its texts only now
          std::string whole;
          for (const Token token : completion.tokens) {
            whole += texts_[choice].add(token);
          }
          add_piece(text, choice, {whole, {}});
        }
        add_piece(text, choice, {texts_[choice].finish(), {}});
        text += event(chunk(choice, ordered_json::object(), finish_reason_of(completion)));
      }
    }
    if (wanted_.include_usage) {
      ordered_json last = chunk(0, ordered_json::object(), nullptr);
      last["choices"] = ordered_json::array();
      last["usage"] = usage();
      text += event(last);
    }
    text += "data: [DONE]\n\n";
  }

  ordered_json usage() const {
    std::size_t prompt_tokens = 0;
    std::size_t completion_tokens = 0;
    for (std::size_t i = 0; i < ticket_->size(); ++i) {
      prompt_tokens += wanted_.requests[i].request.prompt.size();
      for (const Completion& completion : ticket_->result(i).completions) {
        completion_tokens += completion.tokens.size();
      }
    }
    return {{"prompt_tokens", prompt_tokens},
            {"completion_tokens", completion_tokens},
            {"total_tokens", prompt_tokens + completion_tokens}};
  }

  const ServedModel& model_;
  CompletionRequest wanted_;
  std::unique_ptr<Ticket> ticket_;
  ordered_json head_;  // the fields that all parts of the reply have
  bool has_begun_ = false;
  std::vector<ReplyStream> texts_;  // by choice
};

// The pool's states, as they come.
class PoolStates : public ReplyBody {
 public:
  PoolStates(PoolView& view, EngineThread& engine) : view_(view), engine_(engine), watcher_(view) {
    version_ = view_.wait(-1, std::chrono::milliseconds(0)).version;
    engine_.refresh();
  }
  bool read(std::string& text) override {
    const PoolView::State state = view_.wait(version_, kWait);
    if (state.version != version_ && state.json != nullptr) {
      version_ = state.version;
      text += "data: " + *state.json + "\n\n";
    }
    return !engine_.is_draining();
  }

 private:
  PoolView& view_;
  EngineThread& engine_;
  PoolView::Watcher watcher_;
  std::int64_t version_ = 0;
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
constexpr std::array<Route, 14> kRoutes = {{
    {.path = "/", .method = "GET", .is_open = true},
    {.path = "/health", .method = "GET", .is_open = true},
    {.path = "/metrics", .method = "GET", .is_open = true},
    {.path = "/v1/models", .method = "GET"},
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

// The page, with or without the controls of the pool.
std::string page_text(bool has_controls) {
  std::string text(page());
  const std::string body = "<body>";
  if (const std::size_t at = text.find(body); !has_controls && at != std::string::npos) {
    text.replace(at, body.size(), "<body class=\"watch-only\">");
  }
  return text;
}

}  // namespace

ApiReply error_reply(int status, const std::string& message, const std::string& param, const std::string& code) {
  ApiReply reply = json_reply(error_json(status, message, param, code));
  reply.status = status;
  if (status == 429 || status == 503) {
    reply.headers.emplace_back("Retry-After", "1");
  } else if (status == 401) {
    reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  }
  return reply;
}

Api::Api(const ServedModel& model, EngineThread& engine, PoolView& view, const ApiOptions& options)
    : model_(model),
      engine_(engine),
      view_(view),
      options_(options),
      demo_(options.make_demo_pool),
      next_seed_(model.session().requests.front().sampling.seed),
      reply_ids_(random_digits()),
      created_(seconds_since_1970()) {}

ApiReply Api::handle(const ApiRequest& request, const std::function<bool()>& is_gone) {
  try {
    std::optional<ApiReply> refused = refusal(request);
    return refused.has_value() ? std::move(*refused) : route(request, is_gone);
  } catch (const ApiError& error) {
    return error_reply(error.status(), error.what(), error.param(), error.code());
  } catch (const InputError& error) {
    return error_reply(400, error.what());
  } catch (const std::exception& error) {
    return error_reply(500, error.what());
  }
}

std::optional<ApiReply> Api::refusal(const ApiRequest& request) const {
  // A site can point its own name at 127.0.0.1. To the browser, its page and this server are then one site.
  if (request.is_on_loopback && options_.api_key.empty() && !is_local_name(request.host)) {
    return error_reply(403, "the host " + quote(request.host) +
                                " is refused: without --api-key, this address is localhost, 127.0.0.1 or [::1]");
  }
  const auto* const found =
      std::find_if(kRoutes.begin(), kRoutes.end(), [&](const Route& known) { return request.path == known.path; });
  if (found == kRoutes.end()) {
    return error_reply(404, "there is no " + quote(request.path));
  }
  if (request.method != found->method && !(request.method == "HEAD" && found->method == std::string("GET"))) {
    ApiReply reply = error_reply(405, std::string(found->path) + " is for " + found->method);
    reply.headers.emplace_back("Allow", found->method);
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
    if (is_foreign) {
      return error_reply(403, "requests of other sites' pages are refused");
    }
    if (type != "application/json") {
      return error_reply(415, "the body must be of the type application/json");
    }
  }
  return std::nullopt;
}

ApiReply Api::route(const ApiRequest& request, const std::function<bool()>& is_gone) {
  const std::string& path = request.path;
  if (path == "/") {
    return {.content_type = "text/html; charset=utf-8", .body = page_text(options_.pool_controls)};
  }
  if (path == "/health") {
    const std::string failure = engine_.is_draining() ? "the server is ending" : engine_.failure();
    return failure.empty() ? ApiReply{.content_type = "text/plain"} : error_reply(503, failure);
  }
  if (path == "/metrics") {
    return {.content_type = "text/plain; version=0.0.4", .body = metrics_text(engine_.state(), options_.model_name)};
  }
  if (path == "/v1/models") {
    return models();
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
            .stream = std::make_unique<PoolStates>(view_, engine_)};
  }
  return pool(request);
}

bool Api::is_authorized(const ApiRequest& request) const {
  const std::string scheme = "bearer ";
  return options_.api_key.empty() || (to_lower(request.authorization).starts_with(scheme) &&
                                      is_equal_secret(request.authorization.substr(scheme.size()), options_.api_key));
}

ApiReply Api::complete(const ApiRequest& request, bool is_chat, const std::function<bool()>& is_gone) {
  const PoolSizes sizes = engine_.sizes();
  const CompletionLimits limits{engine_.max_context(), sizes.num_slots, sizes.block_size};
  CompletionRequest wanted = parse_completion(request.body, is_chat, model_, options_.model_name, limits, next_seed_);
  EngineThread::Refusal refusal = EngineThread::Refusal::kNone;
  std::unique_ptr<Ticket> ticket = engine_.submit(wanted.requests, refusal);
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
  ordered_json head = {{"id", format("%s-%s-%lld", is_chat ? "chatcmpl" : "cmpl", reply_ids_.c_str(),
                                     static_cast<long long>(num_replies_++))},
                       {"object", ""},
                       {"created", seconds_since_1970()},
                       {"model", options_.model_name}};
  const bool is_streamed = wanted.is_streamed;
  auto texts = std::make_unique<Completions>(model_, std::move(wanted), std::move(ticket), std::move(head));
  while (!texts->ticket().is_submitted(kWait)) {
    if (is_gone()) {
      return error_reply(499, "the client has gone");  // the reply is not read
    }
  }
  std::string request_ids;
  for (std::size_t i = 0; i < texts->ticket().size(); ++i) {
    if (texts->ticket().has_ended(i) && is_failed(texts->ticket().result(i))) {
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
  reply.headers.emplace_back("X-Request-Ids", request_ids);  // the server's, as they are on the page
  return reply;
}

ApiReply Api::models() const {
  return json_reply({{"object", "list"},
                     {"data", ordered_json::array({{{"id", options_.model_name},
                                                    {"object", "model"},
                                                    {"created", created_},
                                                    {"owned_by", "course"},
                                                    {"max_model_len", engine_.max_context()}}})}});
}

ApiReply Api::tokenize(const ApiRequest& request) const {
  const Fields fields(request.body);
  std::vector<Token> tokens;
  if (const json* const messages = fields.find("messages"); messages != nullptr) {
    tokens = chat_prompt(model_, *messages);
  } else if (fields.find("prompt") == nullptr) {
    throw ApiError(400, "'prompt' is missing", "prompt");
  } else {
    const std::string text = fields.text("prompt", "");
    tokens = fields.boolean("add_special_tokens", true) ? model_.session().tokenizer.encode_prompt(text)
                                                        : model_.session().tokenizer.encode(text);
  }
  return json_reply({{"count", tokens.size()}, {"max_model_len", engine_.max_context()}, {"tokens", tokens}});
}

ApiReply Api::detokenize(const ApiRequest& request) const {
  const Fields fields(request.body);
  const json* const tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) {
    throw ApiError(400, "'tokens' must be a list of tokens", "tokens");
  }
  std::string text;
  if (!tokens->empty()) {
    text = model_.decode(text_prompt(model_, *tokens, "tokens"));
  }
  return json_reply({{"prompt", text}});
}

ApiReply Api::pool(const ApiRequest& request) {
  const Fields fields(request.body.empty() ? "{}" : request.body);
  if (request.path == "/pool/pause") {
    engine_.pause();
  } else if (request.path == "/pool/run") {
    engine_.run();
  } else if (request.path == "/pool/step") {
    engine_.step();
  } else if (request.path == "/pool/restart") {
    constexpr int kMaxSlots = 1 << 24;
    constexpr int kMaxBlockSize = 1 << 16;
    PoolSizes sizes = engine_.sizes();
    sizes.num_slots = fields.integer("slots", 1, kMaxSlots, sizes.num_slots);
    sizes.block_size = fields.integer("block_size", 1, kMaxBlockSize, sizes.block_size);
    sizes.token_budget = fields.integer("budget", 1, kMaxBlockSize, sizes.token_budget);
    fields.refuse_others();
    engine_.restart(sizes);
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

// The HTTP front end: what clients ask for and get, in the API alone and over sockets, and what becomes of the pool
// when they misbehave.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/model/llama.h"
#include "tests/stages/http_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/http_client.h"
#include "tests/support/sanitizers.h"

using nlohmann::json;
using tests::ApiFixture;
using tests::events_of;
using tests::http_get;
using tests::http_post;
using tests::HttpConnection;
using tests::HttpReply;
using tests::metric;
using tests::read_all;
using tests::read_reply;
using tests::streamed_text;
using tests::text_alone;

namespace {

const std::array<std::string, 4> kPrompts = {"Once upon a time", "The king had a garden", "A wolf",
                                             "The old woman opened the door and"};

// With no cuts: a value that is not given would be the model's recommendation.
json completion_body(const std::string& prompt, int max_tokens, double temperature = 0.0) {
  return {{"prompt", prompt}, {"max_tokens", max_tokens}, {"temperature", temperature}, {"top_k", 0}, {"top_p", 1}};
}

std::string text_of(const common::ApiReply& reply, std::size_t choice = 0) {
  return json::parse(reply.body)["choices"].at(choice)["text"].get<std::string>();
}

// The field that an error names.
std::string param_of(const common::ApiReply& reply) {
  const json param = json::parse(reply.body).at("error").at("param");
  return param.is_null() ? "" : param.get<std::string>();
}

bool has_header(const common::ApiReply& reply, const std::string& name) {
  return std::any_of(reply.headers.begin(), reply.headers.end(),
                     [&](const auto& header) { return header.first == name; });
}

// Reads a stream of the pool's, one record after the other.
class PoolReader {
 public:
  explicit PoolReader(ApiFixture& fixture) : reply_(fixture.get("/pool/events")) {}
  json next() {
    while (records_.empty()) {
      std::string text;
      REQUIRE(reply_.stream->read(text));
      for (json& record : events_of(text)) {
        records_.push_back(std::move(record));
      }
    }
    json record = std::move(records_.front());
    records_.pop_front();
    return record;
  }
  // The record of the next step: the others tell of a pause, or of a request that has come.
  json next_step() {
    json record = next();
    while (record["steps"].empty()) {
      record = next();
    }
    return record;
  }
  // Reads to the end.
  json last() {
    std::string text;
    while (reply_.stream->read(text)) {
    }
    return events_of(text).back();
  }

 private:
  common::ApiReply reply_;
  std::deque<json> records_;
};

// The whole state, which is a new stream's first record.
json pool_state(ApiFixture& fixture) { return PoolReader(fixture).next(); }

// The fixture behind a real socket.
struct HttpFixture : ApiFixture {
  explicit HttpFixture(const tests::HttpFixtureOptions& options = {}, int max_connections = 64,
                       std::chrono::milliseconds timeout = std::chrono::seconds(1))
      : ApiFixture(options),
        server(std::make_unique<common::HttpServer>(api, http_options(max_connections, timeout))) {}
  static common::HttpOptions http_options(int max_connections, std::chrono::milliseconds timeout) {
    common::HttpOptions options;
    options.port = 0;
    options.timeout = timeout;
    options.max_connections = max_connections;
    return options;
  }
  HttpReply ask(const std::string& text) const {
    HttpConnection connection(server->port());
    connection.send(text);
    return read_reply(connection);
  }
  bool is_alive() const { return ask(http_get("/health")).status == 200; }

  std::unique_ptr<common::HttpServer> server;
};

// Slots of a pool of 3 GiB, which takes address space and hardly any memory.
constexpr int kLargePool = 1 << 20;

// While it lives, there is no room for a second such pool, nor for the first one if it is given up.
class TooLittleMemory {
 public:
  TooLittleMemory() {
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    getrlimit(RLIMIT_AS, &before_);
    if (pages == 0) {
      WARN("the system does not say how large the program is: not tested");
      return;
    }
    rlimit limit = before_;
    limit.rlim_cur = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) - (rlim_t{3} << 29);
    is_set_ = setrlimit(RLIMIT_AS, &limit) == 0;
  }
  ~TooLittleMemory() { setrlimit(RLIMIT_AS, &before_); }
  TooLittleMemory(const TooLittleMemory&) = delete;
  TooLittleMemory& operator=(const TooLittleMemory&) = delete;

  bool is_set() const { return is_set_; }

 private:
  rlimit before_ = {};
  bool is_set_ = false;
};

}  // namespace

TEST_CASE("clients at the same time each get the text of a lone run, at once or streamed, greedy or sampled") {
  ApiFixture fixture;
  constexpr int kTokens = tests::kSanitized ? 8 : 24;
  std::vector<std::string> expected;
  for (std::size_t i = 0; i < 8; ++i) {
    common::SamplingOptions sampling;
    sampling.temperature = i % 4 < 2 ? 0.0F : 1.0F;
    sampling.top_p = 0.9F;
    sampling.seed = i;
    expected.push_back(text_alone(kPrompts[i % 4], kTokens, sampling));
  }
  std::vector<std::string> actual(expected.size());
  std::vector<std::thread> clients;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    clients.emplace_back([&, i] {
      json body = completion_body(kPrompts[i % 4], kTokens, i % 4 < 2 ? 0.0 : 1.0);
      body["top_p"] = 0.9F;
      body["seed"] = i;
      body["stream"] = i % 2 == 1;
      const common::ApiReply reply = fixture.post("/v1/completions", body);
      actual[i] = reply.stream ? streamed_text(read_all(*reply.stream)) : text_of(reply);
    });
  }
  for (std::thread& client : clients) {
    client.join();
  }
  CHECK(actual == expected);
  CHECK(ApiFixture::wait_for([&] { return fixture.is_pool_empty(); }));
}

TEST_CASE("each ticket is told all tokens of its samples, in order, and its end after them") {
  constexpr std::size_t kTickets = tests::kSanitized ? 16 : 64;
  constexpr int kTokens = 12;
  common::EngineThread engine(ApiFixture::engines({.num_slots = 4096, .token_budget = 256}), {.paused = true});
  std::vector<std::thread> clients;
  std::array<std::string, kTickets> problems;
  for (std::size_t i = 0; i < kTickets; ++i) {
    clients.emplace_back([&, i] {
      common::Request request;
      request.prompt = tests::default_session().tokenizer.encode_prompt(kPrompts[i % kPrompts.size()]);
      request.max_new_tokens = kTokens;
      request.sampling.temperature = 1.0F;
      request.sampling.seed = i;
      common::EngineThread::Refusal refusal = common::EngineThread::Refusal::kNone;
      const auto ticket = engine.submit({{request, 2}}, refusal);
      std::array<std::vector<common::Token>, 2> tokens;
      while (!ticket->has_ended()) {
        for (const common::TokenEvent& event : ticket->wait(std::chrono::milliseconds(100))) {
          tokens.at(static_cast<std::size_t>(event.sample)).push_back(event.token);
        }
      }
      for (std::size_t sample = 0; sample < 2; ++sample) {
        if (tokens[sample].size() != kTokens || tokens[sample] != ticket->result(0).completions[sample].tokens) {
          problems[i] = "not the tokens of sample " + std::to_string(sample);
        }
      }
    });
  }
  CHECK(ApiFixture::wait_for([&] { return engine.state().num_waiting() == static_cast<int>(kTickets); }));
  engine.run();
  for (std::thread& client : clients) {
    client.join();
  }
  CHECK(problems == std::array<std::string, kTickets>{});
}

TEST_CASE("several texts of a prompt, several prompts, beams, and the same seed twice") {
  ApiFixture fixture;
  common::SamplingOptions sampling;
  sampling.temperature = 1.0F;
  sampling.seed = 5;
  json body = completion_body(kPrompts[0], 12, 1.0);
  body["seed"] = 5;
  body["n"] = 3;
  const common::ApiReply several = fixture.post("/v1/completions", body);
  for (int i = 0; i < 3; ++i) {
    CHECK(text_of(several, static_cast<std::size_t>(i)) == text_alone(kPrompts[0], 12, sampling, i));
  }
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  const std::string events = read_all(*fixture.post("/v1/completions", body).stream);
  for (int i = 0; i < 3; ++i) {
    CHECK(streamed_text(events, i) == text_of(several, static_cast<std::size_t>(i)));
  }
  const std::vector<json> parsed = events_of(events);
  CHECK(parsed.back() == "[DONE]");
  CHECK(parsed[parsed.size() - 2]["usage"]["completion_tokens"] == 36);

  body["stream_options"]["continuous_usage_stats"] = true;
  std::array<int, 3> num_tokens = {};
  const std::vector<json> counted = events_of(read_all(*fixture.post("/v1/completions", body).stream));
  for (const json& event : std::span(counted).first(counted.size() - 2)) {
    int& before = num_tokens.at(event["choices"][0]["index"].get<std::size_t>());
    const int so_far = event["usage"]["completion_tokens"].get<int>();
    CHECK(so_far >= before);
    CHECK(event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"].get<int>() + so_far);
    before = so_far;
  }
  CHECK(num_tokens == std::array{12, 12, 12});
  CHECK(counted[counted.size() - 2]["usage"]["completion_tokens"] == 36);

  const json prompts = {{"prompt", {kPrompts[0], kPrompts[1]}}, {"max_tokens", 8}, {"temperature", 0}};
  const common::ApiReply both = fixture.post("/v1/completions", prompts);
  CHECK(text_of(both, 0) == text_alone(kPrompts[0], 8, {}));
  CHECK(text_of(both, 1) == text_alone(kPrompts[1], 8, {}));

  json beams = completion_body(kPrompts[2], 6);
  beams["n"] = 3;
  beams["use_beam_search"] = true;
  const common::ApiReply searched = fixture.post("/v1/completions", beams);
  REQUIRE(json::parse(searched.body)["choices"].size() == 3);
  beams["stream"] = true;
  CHECK(streamed_text(read_all(*fixture.post("/v1/completions", beams).stream), 2) == text_of(searched, 2));

  // Without a seed, two requests differ.
  const json seedless = completion_body(kPrompts[0], 12, 1.0);
  CHECK(text_of(fixture.post("/v1/completions", seedless)) != text_of(fixture.post("/v1/completions", seedless)));
}

TEST_CASE("stop strings end a text where they begin, streamed or not") {
  ApiFixture fixture;
  json body = completion_body(kPrompts[0], 40);
  const std::string whole = text_alone(kPrompts[0], 40, {});
  const std::string stop = whole.substr(20, 5);  // from the middle of one word to the middle of another
  body["stop"] = {"never", stop};
  const common::ApiReply reply = fixture.post("/v1/completions", body);
  CHECK(text_of(reply) == whole.substr(0, whole.find(stop)));
  CHECK(json::parse(reply.body)["choices"][0]["finish_reason"] == "stop");
  body["stream"] = true;
  CHECK(streamed_text(read_all(*fixture.post("/v1/completions", body).stream)) == text_of(reply));
}

TEST_CASE("log-probabilities have the shapes of a text and of a chat, streamed or not") {
  ApiFixture fixture;
  json body = completion_body(kPrompts[0], 4);
  body["logprobs"] = 2;
  const json text = json::parse(fixture.post("/v1/completions", body).body)["choices"][0];
  REQUIRE(text["logprobs"]["tokens"].size() == 4);
  CHECK(text["logprobs"]["top_logprobs"][0].size() == 2);
  // Greedy: the token drawn is the best one.
  CHECK(text["logprobs"]["token_logprobs"][0] == text["logprobs"]["top_logprobs"][0].begin().value());
  body["stream"] = true;
  std::vector<double> logprobs;
  for (const json& event : events_of(read_all(*fixture.post("/v1/completions", body).stream))) {
    if (event.is_object() && !event["choices"][0]["logprobs"].is_null()) {
      for (const json& logprob : event["choices"][0]["logprobs"]["token_logprobs"]) {
        logprobs.push_back(logprob.get<double>());
      }
    }
  }
  // The second request finds a block in the prefix cache: its logits are rounded differently.
  constexpr double kTolerance = 1e-5;
  REQUIRE(logprobs.size() == 4);
  for (std::size_t i = 0; i < logprobs.size(); ++i) {
    CHECK(std::abs(logprobs[i] - text["logprobs"]["token_logprobs"][i].get<double>()) < kTolerance);
  }
  const json chat = {{"messages", {{{"role", "user"}, {"content", kPrompts[0]}}}},
                     {"max_tokens", 4},
                     {"temperature", 0},
                     {"logprobs", true},
                     {"top_logprobs", 3}};
  const json reply = json::parse(fixture.post("/v1/chat/completions", chat).body)["choices"][0];
  REQUIRE(reply["logprobs"]["content"].size() == 4);
  CHECK(reply["logprobs"]["content"][0]["top_logprobs"].size() == 3);
  CHECK(std::abs(reply["logprobs"]["content"][1]["logprob"].get<double>() - logprobs[1]) < kTolerance);
}

TEST_CASE("a chat with the bundled model, which has no template: it goes on with the messages") {
  ApiFixture fixture;
  const json body = {
      {"messages", {{{"role", "user"}, {"content", kPrompts[0]}}}}, {"max_tokens", 8}, {"temperature", 0}};
  const json reply = json::parse(fixture.post("/v1/chat/completions", body).body);
  CHECK(reply["object"] == "chat.completion");
  CHECK(reply["choices"][0]["message"]["role"] == "assistant");
  CHECK(reply["choices"][0]["message"]["content"] == text_alone(kPrompts[0], 8, {}));
  CHECK(reply["choices"][0]["finish_reason"] == "length");
  json streamed = body;
  streamed["stream"] = true;
  const std::string events = read_all(*fixture.post("/v1/chat/completions", streamed).stream);
  CHECK(events_of(events)[0]["choices"][0]["delta"]["role"] == "assistant");
  CHECK(streamed_text(events) == reply["choices"][0]["message"]["content"].get<std::string>());
  // Without max_tokens, as long as there is room.
  ApiFixture small({.num_slots = 64});
  json unbounded = body;
  unbounded.erase("max_tokens");
  unbounded["ignore_eos"] = true;
  const json longest = json::parse(small.post("/v1/chat/completions", unbounded).body);
  CHECK(longest["usage"]["total_tokens"] == 64);
}

TEST_CASE("tokens, models, health") {
  ApiFixture fixture;
  const json tokens = json::parse(fixture.post("/tokenize", {{"prompt", "A wolf"}}).body);
  CHECK(tokens["count"] == tokens["tokens"].size());
  const json alone = json::parse(fixture.post("/tokenize", {{"prompt", "A wolf"}, {"add_special_tokens", false}}).body);
  CHECK(json::parse(fixture.post("/detokenize", {{"tokens", alone["tokens"]}}).body)["prompt"] == "A wolf");
  const json models = json::parse(fixture.get("/v1/models").body);
  CHECK(models["data"][0]["id"] == "tales-5m");
  CHECK(models["data"][0]["max_model_len"] == 1024);
  CHECK(fixture.get("/health").status == 200);
  CHECK(fixture.get("/").body_text().find("<html") != std::string::npos);
}

TEST_CASE("what is wrong with a request is said in OpenAI's shape, with the field") {
  ApiFixture fixture;
  const auto with = [](const char* name, const json& value) {
    json body = completion_body("x", 2);
    body[name] = value;
    return body;
  };
  const auto with_beams = [&](const char* name, const json& value) {
    json body = with(name, value);
    body["use_beam_search"] = true;
    return body;
  };
  const json long_prompt = std::vector<int>(2000, 5);
  const std::vector<std::tuple<json, int, std::string>> cases = {
      {json::array(), 400, ""},
      {json::object(), 400, "prompt"},
      {with("prompt", 7), 400, "prompt"},
      {with("prompt", json::array()), 400, "prompt"},
      {with("prompt", {1, 2, 1 << 30}), 400, "prompt"},
      {with("prompt", {-1}), 400, "prompt"},
      {with("prompt", {1, "x"}), 400, "prompt"},
      {with("prompt", long_prompt), 400, "prompt"},
      {with("max_tokens", 0), 400, "max_tokens"},
      {with("max_tokens", 1e300), 400, "max_tokens"},
      {with("max_tokens", 18446744073709551615ULL), 400, "max_tokens"},
      {with("max_tokens", "2"), 400, "max_tokens"},
      {with("max_tokens", 5000), 400, "max_tokens"},
      {with("temperature", -1), 400, "temperature"},
      {with("temperature", "hot"), 400, "temperature"},
      {with("top_p", 1.5), 400, "top_p"},
      {with("n", 0), 400, "n"},
      {with("n", 1000), 400, "n"},
      {with("seed", 1.5), 400, "seed"},
      {with("stream", "yes"), 400, "stream"},
      {with("stream_options", 1), 400, "stream_options"},
      {with("cache_salt", 1), 400, "cache_salt"},
      {with("model", "gpt-4"), 404, "model"},
      {with("tools", {{{"type", "function"}}}), 400, "tools"},
      {with("stop", 5), 400, "stop"},
      {with("stop", {"a", ""}), 400, "stop"},
      {with("min_p", 1.5), 400, "min_p"},
      {with("repetition_penalty", 0), 400, "repetition_penalty"},
      {with("logprobs", 21), 400, "logprobs"},
      {with("tempature", 0.5), 400, "tempature"},
      {with("max_token", 5), 400, "max_token"},
      {with("top_logprobs", 2), 400, "top_logprobs"},
      {with("best_of", 5), 400, "best_of"},
      {with("length_penalty", 2), 400, "length_penalty"},
      {with_beams("length_penalty", 99), 400, "length_penalty"},
      {with_beams("length_penalty", -1), 400, "length_penalty"},
      {with_beams("temperature", 0.8), 400, "temperature"},
      {with_beams("top_p", 0.9), 400, "top_p"},
      {with_beams("top_k", 40), 400, "top_k"},
      {with_beams("min_p", 0.1), 400, "min_p"},
      {with_beams("repetition_penalty", 1.1), 400, "repetition_penalty"},
      {with_beams("logprobs", 1), 400, "logprobs"},
  };
  for (const auto& [body, status, param] : cases) {
    INFO(body.dump().substr(0, 200));
    const common::ApiReply reply = fixture.post("/v1/completions", body);
    CHECK(reply.status == status);
    CHECK(param_of(reply) == param);
    const std::string message = json::parse(reply.body)["error"]["message"];
    CHECK_FALSE(message.empty());
    if (body.contains("use_beam_search") && param != "length_penalty") {
      CHECK(message == "'" + param + "' and 'use_beam_search' exclude each other");
    }
  }
  for (const json& messages : {json(), json::array(), json::parse(R"([{"role": "tool", "content": "x"}])"),
                               json::parse(R"([{"role": "user"}])"), json::parse(R"(["x"])"),
                               json::parse(R"([{"role": "user", "content": [{"type": "image_url"}]}])")}) {
    INFO(messages.dump());
    const common::ApiReply reply = fixture.post("/v1/chat/completions", {{"messages", messages}});
    CHECK(reply.status == 400);
    CHECK(param_of(reply).starts_with("messages"));
  }
  // Fields that change nothing are accepted: clients send them.
  for (const json& body :
       {with("presence_penalty", 0), with("tools", json::array()), with("logit_bias", json::object()),
        with("response_format", {{"type", "text"}}), with("user", "me"), with("stop", nullptr),
        with("tool_choice", "auto"), with("frequency", nullptr), with("best_of", 1), with("length_penalty", 1),
        with_beams("temperature", 1), with_beams("top_k", -1), with_beams("length_penalty", 2)}) {
    CHECK(fixture.post("/v1/completions", body).status == 200);
  }
  const json chat = {{"messages", json::parse(R"([{"role": "user", "content": "x"}])")}, {"max_tokens", 2}};
  json without_logprobs = chat;
  without_logprobs["top_logprobs"] = 3;
  json two_prompts = chat;
  two_prompts["prompt"] = "x";
  const std::vector<std::tuple<std::string, json, std::string>> others = {
      {"/v1/chat/completions", without_logprobs, "top_logprobs"},
      {"/v1/chat/completions", two_prompts, "prompt"},
      {"/tokenize", json::object(), "prompt"},
      {"/tokenize", {{"prompt", 5}}, "prompt"},
      {"/detokenize", json::object(), "tokens"},
      {"/detokenize", {{"tokens", {1, "x"}}}, "tokens"},
      {"/detokenize", {{"tokens", {1 << 30}}}, "tokens"},
      {"/pool/restart", {{"slotz", 64}}, "slotz"}};
  for (const auto& [path, body, param] : others) {
    INFO(path << " " << body.dump());
    const common::ApiReply reply = fixture.post(path, body);
    CHECK(reply.status == 400);
    CHECK(param_of(reply) == param);
  }
  CHECK(fixture.post("/v1/chat/completions", chat).status == 200);
  common::ApiRequest wrong_type{
      .method = "POST", .path = "/v1/completions", .body = "{}", .content_type = "text/plain"};
  CHECK(fixture.api.handle(wrong_type, [] { return false; }).status == 415);
  common::ApiRequest foreign{.method = "POST",
                             .path = "/pool/pause",
                             .content_type = "application/json",
                             .origin = "https://example.org",
                             .host = "localhost:8080"};
  CHECK(fixture.api.handle(foreign, [] { return false; }).status == 403);
  CHECK_FALSE(fixture.engine.is_paused());
  CHECK(fixture.get("/v1/completions").status == 405);
  CHECK(fixture.get("/v2").status == 404);
  CHECK(metric(fixture, "course:requests_rejected_total") > 0.0);
}

TEST_CASE("with an API key, requests without it are refused") {
  ApiFixture fixture({.api_key = "secret"});
  for (const auto& [authorization, status] :
       {std::pair("", 401), std::pair("Bearer wrong", 401), std::pair("secret", 401), std::pair("Bearer secre", 401),
        std::pair("Bearer secret", 200)}) {
    const common::ApiRequest request{.method = "GET", .path = "/v1/models", .authorization = authorization};
    CHECK(fixture.api.handle(request, [] { return false; }).status == status);
  }
  CHECK(fixture.post("/pool/pause", json::object()).status == 401);
  CHECK(fixture.get("/health").status == 200);
}

TEST_CASE("without a key, an address of this machine alone answers to this machine's own names alone") {
  const auto status_of = [](ApiFixture& fixture, const std::string& host, bool is_on_loopback = true) {
    const common::ApiRequest request{
        .method = "GET", .path = "/metrics", .host = host, .is_on_loopback = is_on_loopback};
    return fixture.api.handle(request, [] { return false; }).status;
  };
  ApiFixture fixture;
  for (const char* const host : {"localhost", "localhost:8080", "LocalHost:1", "127.0.0.1", "127.0.0.1:8080",
                                 "127.0.0.2:8080", "[::1]", "[::1]:8080", ""}) {
    INFO(host);
    CHECK(status_of(fixture, host) == 200);
  }
  ApiFixture with_key({.api_key = "secret"});
  for (const char* const host : {"example.org", "example.org:8080", "localhost.example.org", "127.0.0.1.example.org",
                                 "example.org:localhost", "10.0.0.1", "[::2]:8080", "localhost:80:example.org"}) {
    INFO(host);
    CHECK(status_of(fixture, host) == 403);
    CHECK(status_of(fixture, host, false) == 200);
    CHECK(status_of(with_key, host) == 200);
  }
}

TEST_CASE("a page of another origin, or under another name of this machine, cannot steer the pool") {
  ApiFixture fixture({.cors_origins = {"*"}});
  const auto status_of = [&](const std::string& path, const std::string& origin, const std::string& host) {
    const common::ApiRequest request{.method = "POST",
                                     .path = path,
                                     .body = path == "/v1/completions" ? completion_body("A", 1).dump()
                                             : path == "/pool/restart" ? R"({"slots": 128})"
                                                                       : "{}",
                                     .content_type = "application/json",
                                     .origin = origin,
                                     .host = host,
                                     .is_on_loopback = true};
    return fixture.api.handle(request, [] { return false; }).status;
  };
  for (const char* const path : {"/pool/pause", "/pool/step", "/pool/restart", "/pool/demo", "/pool/run"}) {
    INFO(path);
    for (const char* const origin : {"https://example.org", "http://localhost:3000", "http://127.0.0.1", "null"}) {
      INFO(origin);
      CHECK(status_of(path, origin, "localhost:8080") == 403);  // whatever --cors says
    }
    // A name that its owner points at 127.0.0.1: to the browser, page and server are one site.
    CHECK(status_of(path, "http://rebound.example.org:8080", "rebound.example.org:8080") == 403);
    CHECK_FALSE(fixture.engine.is_paused());
  }
  CHECK(fixture.engine.sizes().num_slots == 1024);
  CHECK(status_of("/v1/completions", "https://example.org", "localhost:8080") == 200);
  CHECK(status_of("/v1/completions", "http://rebound.example.org:8080", "rebound.example.org:8080") == 403);
  for (const char* const host : {"localhost:8080", "127.0.0.1:8080", "[::1]:8080"}) {
    CHECK(status_of("/pool/pause", std::string("http://") + host, host) == 200);
    CHECK(status_of("/pool/run", std::string("http://") + host, host) == 200);
  }
}

TEST_CASE("beyond this machine, too, no page under a name that anyone can point here steers the pool without a key") {
  ApiFixture fixture;
  ApiFixture with_key({.api_key = "secret"});
  const auto status_of = [](ApiFixture& asked, const std::string& host, const std::string& origin) {
    const common::ApiRequest request{.method = "POST",
                                     .path = "/pool/run",
                                     .body = "{}",
                                     .authorization = "Bearer secret",
                                     .content_type = "application/json",
                                     .origin = origin,
                                     .host = host};
    return asked.api.handle(request, [] { return false; }).status;
  };
  for (const char* const host :
       {"rebound.example.org:8080", "rebound.example.org", "10.0.0.1.example.org:8080", "box"}) {
    INFO(host);
    CHECK(status_of(fixture, host, std::string("http://") + host) == 403);
    CHECK(status_of(fixture, host, "") == 200);  // no browser
    CHECK(status_of(with_key, host, std::string("http://") + host) == 200);
  }
  for (const char* const host : {"10.0.0.1:8080", "[fe80::1]:8080", "localhost:8080"}) {
    INFO(host);
    CHECK(status_of(fixture, host, std::string("http://") + host) == 200);
  }
}

TEST_CASE("what a page changes lasts as long as someone watches") {
  ApiFixture fixture;
  const auto restore = [&] { fixture.api.restore_unwatched(std::chrono::milliseconds(0)); };
  const auto num_slots = [&] { return fixture.engine.sizes().num_slots; };
  const json small = {{"slots", 64}, {"while_watched", true}};
  auto reader = std::make_unique<PoolReader>(fixture);
  CHECK(reader->next()["sizes"]["is_changed"] == false);
  CHECK(fixture.post("/pool/restart", small).status == 200);
  const json sizes = reader->next()["sizes"];
  CHECK(sizes["is_changed"] == true);
  CHECK(sizes["slots_at_start"] == 1024);
  CHECK(fixture.post("/pool/pause", {{"while_watched", true}}).status == 200);
  restore();
  CHECK(num_slots() == 64);
  CHECK(fixture.engine.is_paused());

  SECTION("its requests end with it, and the pool is as before") {
    reader.reset();
    fixture.api.restore_unwatched(std::chrono::hours(1));  // not at once: a page may be loaded anew
    CHECK(num_slots() == 64);
    restore();
    CHECK(num_slots() == 1024);
    CHECK_FALSE(fixture.engine.is_paused());
    CHECK(pool_state(fixture)["sizes"]["is_changed"] == false);
    CHECK(text_of(fixture.post("/v1/completions", completion_body(kPrompts[0], 6))) == text_alone(kPrompts[0], 6, {}));
  }
  SECTION("other clients' requests are served first") {
    json body = completion_body(kPrompts[0], 6);
    body["stream"] = true;
    const common::ApiReply reply = fixture.post("/v1/completions", body);
    reader.reset();
    restore();  // computes again
    CHECK(streamed_text(read_all(*reply.stream)) == text_alone(kPrompts[0], 6, {}));
    restore();
    CHECK(num_slots() == 1024);
  }
  SECTION("a client that says nothing of watching changes the pool for good") {
    CHECK(fixture.post("/pool/restart", {{"as_started", true}}).status == 200);
    CHECK(num_slots() == 1024);
    reader.reset();
    restore();
    CHECK(fixture.post("/pool/restart", {{"slots", 128}}).status == 200);
    restore();
    CHECK(num_slots() == 128);
    // Nor is it undone with what a page changes after it.
    reader = std::make_unique<PoolReader>(fixture);
    CHECK(fixture.post("/pool/restart", small).status == 200);
    reader.reset();
    restore();
    CHECK(num_slots() == 128);
  }
  SECTION("what is refused changes nothing") {
    reader.reset();
    restore();
    fixture.engine.pause();
    for (const json& body : {json{{"slots", 0}, {"while_watched", true}}, json{{"while_watched", 1}}}) {
      CHECK(fixture.post("/pool/restart", body).status == 400);
    }
    for (const char* const path : {"/pool/pause", "/pool/run", "/pool/step"}) {
      CHECK(fixture.post(path, {{"while_watched", true}, {"times", 2}}).status == 400);
    }
    restore();
    CHECK(fixture.engine.is_paused());
  }
}

TEST_CASE("a full queue answers 429 and loses nothing") {
  ApiFixture fixture({.max_queue = 2, .paused = true});
  json body = completion_body(kPrompts[0], 4);
  body["stream"] = true;
  const common::ApiReply first = fixture.post("/v1/completions", body);
  json two = body;
  two["prompt"] = {kPrompts[0], kPrompts[1]};
  REQUIRE(fixture.post("/v1/completions", two).status == 429);  // there is room for one, and none of them waits
  const common::ApiReply second = fixture.post("/v1/completions", body);
  const common::ApiReply third = fixture.post("/v1/completions", body);
  CHECK(third.status == 429);
  CHECK(has_header(third, "Retry-After"));
  CHECK(json::parse(third.body)["error"]["type"] == "rate_limit_error");
  fixture.engine.run();
  const std::string expected = text_alone(kPrompts[0], 4, {});
  CHECK(streamed_text(read_all(*first.stream)) == expected);
  CHECK(streamed_text(read_all(*second.stream)) == expected);
  CHECK(text_of(fixture.post("/v1/completions", completion_body(kPrompts[0], 4))) == expected);
}

TEST_CASE("a client that goes in mid-stream frees its blocks without another step, and changes no other text") {
  ApiFixture fixture({.num_slots = 256, .paused = true});
  json body = completion_body(kPrompts[0], 40);
  body["stream"] = true;
  common::ApiReply gone = fixture.post("/v1/completions", body);
  body["prompt"] = kPrompts[1];
  const common::ApiReply stays = fixture.post("/v1/completions", body);
  for (int i = 0; i < 3; ++i) {
    fixture.engine.step();
  }
  REQUIRE(ApiFixture::wait_for([&] { return fixture.engine.state().tally.steps.steps == 3; }));
  CHECK(fixture.engine.state().status.num_running == 2);
  gone.stream.reset();
  CHECK(ApiFixture::wait_for([&] { return fixture.engine.state().status.num_running == 1; }));
  CHECK(fixture.engine.state().tally.steps.steps == 3);
  fixture.engine.run();
  CHECK(streamed_text(read_all(*stays.stream)) == text_alone(kPrompts[1], 40, {}));
  CHECK(ApiFixture::wait_for([&] { return fixture.is_pool_empty(); }));
  CHECK(fixture.engine.state().tally.num_ended(common::FinishReason::kCancelled) == 1);
}

TEST_CASE("a client that asked for a whole reply and has gone is not computed for") {
  ApiFixture fixture({.paused = true});
  const common::ApiRequest request{.method = "POST",
                                   .path = "/v1/completions",
                                   .body = completion_body(kPrompts[0], 40).dump(),
                                   .content_type = "application/json"};
  fixture.api.handle(request, [] { return true; });
  CHECK(ApiFixture::wait_for([&] { return fixture.engine.state().num_waiting() == 0; }));
  CHECK(fixture.engine.state().tally.steps.steps == 0);
}

TEST_CASE("draining refuses what is new and serves what has come, even if paused") {
  ApiFixture fixture({.paused = true});
  json body = completion_body(kPrompts[0], 6);
  body["stream"] = true;
  const common::ApiReply before = fixture.post("/v1/completions", body);
  CHECK_FALSE(fixture.engine.drained());
  fixture.engine.drain();
  const common::ApiReply after = fixture.post("/v1/completions", body);
  CHECK(after.status == 503);
  CHECK(has_header(after, "Retry-After"));
  CHECK(fixture.get("/health").status == 503);
  CHECK(streamed_text(read_all(*before.stream)) == text_alone(kPrompts[0], 6, {}));
  CHECK(ApiFixture::wait_for([&] { return fixture.engine.drained(); }));
  CHECK(PoolReader(fixture).last()["draining"] == true);  // a stream that begins now ends at once
}

TEST_CASE("the pool's records end with the last one, even if a client reads them only when the server has drained") {
  ApiFixture fixture({.num_slots = 4096, .token_budget = 256, .paused = true});
  PoolReader reader(fixture);
  reader.next();
  json body = completion_body(kPrompts[0], 200);
  body["prompt"] = std::vector<std::string>(16, kPrompts[0]);
  body["ignore_eos"] = true;
  body["stream"] = true;
  const common::ApiReply reply = fixture.post("/v1/completions", body);
  fixture.engine.drain();
  read_all(*reply.stream);
  REQUIRE(ApiFixture::wait_for([&] { return fixture.engine.drained(); }));
  const json last = reader.last();
  CHECK(last["draining"] == true);
  CHECK(last["num_running"] == 0);
  CHECK(last["num_waiting"] == 0);
}

TEST_CASE("the server's memory of a request ends with it") {
  ApiFixture fixture;
  for (int i = 0; i < 20; ++i) {
    const json reply = json::parse(fixture.post("/v1/completions", completion_body(kPrompts[0], 2)).body);
    CHECK(reply["choices"].size() == 1);
  }
  CHECK(metric(fixture, "vllm:generation_tokens_total") == 40.0);
  CHECK(metric(fixture, "vllm:time_to_first_token_seconds_count") == 20.0);
  CHECK(metric(fixture, "vllm:inter_token_latency_seconds_count") == 20.0);
  CHECK(metric(fixture, "vllm:num_requests_running") == 0.0);
}

TEST_CASE("requests with different salts share no blocks") {
  ApiFixture fixture;
  json body = completion_body(kPrompts[3] + " saw the wolf", 2);
  const auto saved_by = [&](const std::string& salt) {
    const double before = metric(fixture, "vllm:prefix_cache_hits_total");
    body["cache_salt"] = salt;
    fixture.post("/v1/completions", body);
    return metric(fixture, "vllm:prefix_cache_hits_total") - before;
  };
  CHECK(saved_by("one") == 0.0);
  CHECK(saved_by("one") > 0.0);
  CHECK(saved_by("two") == 0.0);
  CHECK(saved_by("two") > 0.0);
}

TEST_CASE("the pool's state shows blocks, owners and texts, step by step") {
  ApiFixture fixture({.num_slots = 64, .paused = true});
  json body = completion_body(kPrompts[0], 8, 1.0);
  body["stream"] = true;
  body["n"] = 2;
  const common::ApiReply reply = fixture.post("/v1/completions", body);
  PoolReader watched(fixture);
  json state = watched.next();
  CHECK(state["whole"] == true);
  CHECK(state["paused"] == true);
  CHECK(state["num_waiting"] == 1);
  CHECK(state["sizes"]["blocks"] == 16);
  CHECK(state["requests"][0]["prompt"] == 6);
  CHECK(state["requests"][0]["max"] == 13);  // the last token is never computed
  CHECK_FALSE(state["requests"][0].contains("sequences"));
  fixture.engine.step();
  const json first = watched.next_step();
  CHECK_FALSE(first.contains("whole"));
  CHECK_FALSE(first.contains("sizes"));
  REQUIRE(first["steps"].size() == 1);
  CHECK(first["steps"][0][0] == 0);
  CHECK(first["steps"][0][1] == 6);  // of the prompt
  CHECK(first["happened"]["admitted"] == first["running"]);
  // Six tokens: two blocks, which both samples own.
  REQUIRE(first["requests"][0]["sequences"].size() == 2);
  std::vector<int> shared;
  for (const json& sequence : first["requests"][0]["sequences"]) {
    CHECK(sequence["length"] == 6);
    CHECK(sequence["texts"].size() == 6);
    shared = sequence["blocks"].get<std::vector<int>>();
    CHECK(shared == first["requests"][0]["sequences"][0]["blocks"].get<std::vector<int>>());
  }
  REQUIRE(shared.size() == 2);
  fixture.engine.step();
  const json second = watched.next_step();
  CHECK(second["counters"]["copied"] == 1);  // the half-filled block, when the first of them wrote
  REQUIRE(second["happened"]["copies"].size() == 1);
  CHECK(second["happened"]["copies"][0][0] == shared[1]);
  REQUIRE(second["requests"][0]["sequences"].size() == 2);
  std::vector<int> written;
  for (const json& sequence : second["requests"][0]["sequences"]) {  // what has changed, and no more
    CHECK(sequence["length"] == 7);
    CHECK(sequence["at"] == 6);
    CHECK(sequence["texts"].size() == 1);
    for (const json& block : sequence["blocks"]) {
      CHECK(sequence["from"] == 1);
      written.push_back(block);
    }
  }
  CHECK(written == std::vector<int>{second["happened"]["copies"][0][1].get<int>()});
  // A client that connects later gets the whole of it, and those connected already can take it too.
  state = pool_state(fixture);
  CHECK(state["whole"] == true);
  CHECK(state["requests"][0]["sequences"][0]["texts"].size() == 7);
  CHECK(watched.next() == state);
  fixture.engine.run();
  read_all(*reply.stream);
  // The end empties the tables and leaves the full blocks in the cache, with their texts.
  REQUIRE(ApiFixture::wait_for([&] { return fixture.is_pool_empty(); }));
  state = pool_state(fixture);
  CHECK(state["running"].empty());
  REQUIRE_FALSE(state["cached"].empty());
  CHECK(state["cached"][0][1].size() == 4);
}

TEST_CASE("a block is told once when it is cached, and once when it is cached no more") {
  ApiFixture fixture({.num_slots = 32});
  PoolReader watched(fixture);
  REQUIRE(watched.next()["whole"] == true);
  json body = completion_body("", 12);
  body["ignore_eos"] = true;
  for (const std::string& prompt : kPrompts) {  // each takes blocks that an earlier one has left in the cache
    body["prompt"] = prompt;
    REQUIRE(fixture.post("/v1/completions", body).status == 200);
  }
  std::map<int, json> cached;  // the texts of each block
  std::size_t num_removed = 0;
  json record;
  do {
    record = watched.next();
    for (const json& block : record.value("uncached", json::array())) {
      CHECK(cached.erase(block.get<int>()) == 1);
      ++num_removed;
    }
    for (const json& entry : record.value("cached", json::array())) {
      CHECK(cached[entry[0].get<int>()] != entry[1]);
      cached[entry[0].get<int>()] = entry[1];
    }
  } while (record["num_running"] > 0 || record["counters"]["generated"] < 12 * kPrompts.size());
  CHECK(num_removed > 0);
  // A client that connects later is told the same blocks.
  std::map<int, json> whole;
  record = pool_state(fixture);
  for (const json& entry : record["cached"]) {
    whole[entry[0].get<int>()] = entry[1];
  }
  CHECK(cached == whole);
}

#ifdef COURSE_PRODUCTION
TEST_CASE("drafts are in the record of their step with what became of them, and are no prompt") {
  ApiFixture fixture({.num_slots = 128, .paused = true});
  json body = completion_body("The cat said, who is there? The dog said, who is there? The cock said,", 32);
  body["num_speculative_tokens"] = 4;
  body["stream"] = true;
  const common::ApiReply reply = fixture.post("/v1/completions", body);
  PoolReader watched(fixture);
  watched.next();
  std::vector<json> texts;  // of the sequence's tokens
  int num_drafts = 0;
  int num_accepted = 0;
  std::optional<std::pair<std::size_t, json>> drawn;  // in the step before, behind accepted drafts: position and text
  int num_drawn = 0;
  json record = {{"num_running", 1}};
  for (int step = 0; record["num_running"] == 1; ++step) {
    fixture.engine.step();
    record = watched.next_step();
    REQUIRE(record["steps"].size() == 1);
    CHECK((record["steps"][0][1] > 0) == (step == 0));
    const json drafts = record["happened"].value("drafts", json::array());
    CHECK(record["steps"][0][6] == (drafts.empty() ? 0 : drafts[0][4].size()));
    CHECK(record["steps"][0][7] == (drafts.empty() ? json(0) : drafts[0][3]));
    for (const json& draft : drafts) {
      num_drafts += static_cast<int>(draft[4].size());
      num_accepted += draft[3].get<int>();
    }
    if (record["requests"].empty()) {
      continue;  // it has ended
    }
    const json& sequence = record["requests"][0]["sequences"][0];
    texts.resize(sequence["at"].get<std::size_t>());
    texts.insert(texts.end(), sequence["texts"].begin(), sequence["texts"].end());
    if (drawn.has_value()) {
      REQUIRE(drawn->first < texts.size());
      CHECK(texts[drawn->first] == drawn->second);
      num_drawn += 1;
      drawn.reset();
    }
    for (const json& draft : drafts) {
      const auto position = draft[2].get<std::size_t>();
      const auto accepted = draft[3].get<std::size_t>();
      CHECK(draft[1] == sequence["id"]);
      CHECK(texts.size() == position + accepted);  // the text's own token is in front of them
      for (std::size_t i = 0; i < accepted; ++i) {
        CHECK(draft[4][i] == texts[position + i]);
      }
      REQUIRE(draft.size() == 6);  // the text goes on
      CHECK((accepted == draft[4].size() || draft[5] != draft[4][accepted]));
      drawn.emplace(position + accepted, draft[5]);
    }
  }
  CHECK(0 < num_accepted);
  CHECK(num_accepted < num_drafts);
  CHECK(num_drawn > 1);
  CHECK(record["counters"]["drafts"] == num_drafts);
  CHECK(record["counters"]["accepted"] == num_accepted);
}
#endif

TEST_CASE("a client that reads the pool's records too slowly begins anew") {
  ApiFixture fixture({.num_slots = 64, .paused = true});
  common::PoolView::Watcher watcher(fixture.view);
  fixture.engine.refresh();
  std::vector<std::string> records;
  REQUIRE(ApiFixture::wait_for([&] {
    records = watcher.read(std::chrono::milliseconds(1));
    return !records.empty();
  }));
  CHECK(json::parse(records[0])["whole"] == true);
  constexpr std::size_t kRecords = 2100;  // more than are kept
  common::PoolView::Watcher other(fixture.view);
  for (std::size_t num_made = 0; num_made < kRecords;) {
    fixture.engine.refresh();
    num_made += other.read(std::chrono::milliseconds(1000)).size();
  }
  CHECK(watcher.read(std::chrono::milliseconds(1)).empty());
  CHECK(watcher.needs_whole());
  fixture.engine.refresh();
  REQUIRE(ApiFixture::wait_for([&] {
    records = watcher.read(std::chrono::milliseconds(1));
    return !records.empty();
  }));
  CHECK(json::parse(records[0])["whole"] == true);
  CHECK_FALSE(watcher.needs_whole());
}

TEST_CASE("a pool made anew can swap what it preempts") {
  ApiFixture fixture({.num_slots = 64});
  CHECK(pool_state(fixture)["sizes"]["host_blocks"] == 0);
  CHECK(fixture.post("/pool/restart", {{"swap", true}}).status == 200);
  CHECK(pool_state(fixture)["sizes"]["host_blocks"] == 32);
  json body = completion_body(kPrompts[0], 28);
  body["prompt"] = {kPrompts[0], kPrompts[1], kPrompts[2]};
  body["ignore_eos"] = true;
  PoolReader watched(fixture);
  CHECK(fixture.post("/v1/completions", body).status == 200);
  bool was_swapped = false;
  std::size_t num_moves = 0;
  for (bool has_ended = false; !has_ended;) {
    const json record = watched.next();
    was_swapped = was_swapped || record["happened"].contains("swapped_out");
    num_moves += record["happened"].value("copies", json::array()).size();  // there are no other copies here
    has_ended = !record["steps"].empty() && record["num_running"] == 0 && record["num_waiting"] == 0;
  }
  CHECK(was_swapped);
  // A page that is opened only now is told how many blocks were moved, and that none was copied on a write.
  const json counters = pool_state(fixture)["counters"];
  CHECK(num_moves > 0);
  CHECK(counters["moved"] == num_moves);
  CHECK(counters["copied"] == num_moves);
  CHECK(fixture.post("/pool/restart", {{"swap", false}}).status == 200);
  CHECK(pool_state(fixture)["sizes"]["host_blocks"] == 0);
  CHECK(fixture.post("/pool/restart", {{"swap", "yes"}}).status == 400);
  // Without the field, it is as the command line has it.
  ApiFixture swapping({.num_slots = 64, .num_host_slots = 32});
  CHECK(swapping.post("/pool/restart", {{"slots", 48}}).status == 200);
  CHECK(pool_state(swapping)["sizes"]["host_blocks"] == 8);
}

TEST_CASE("the pool can be made anew, and what was in it is told so") {
  ApiFixture fixture({.num_slots = 64, .paused = true});
  json body = completion_body(kPrompts[0], 8);
  body["stream"] = true;
  const common::ApiReply reply = fixture.post("/v1/completions", body);
  CHECK(fixture.post("/pool/restart", {{"slots", 128}, {"block_size", 8}, {"budget", 32}}).status == 200);
  CHECK(fixture.engine.sizes().num_slots == 128);
  const std::string events = read_all(*reply.stream);
  CHECK(events.find("made anew") != std::string::npos);
  CHECK(pool_state(fixture)["sizes"]["blocks"] == 16);
  // A pool has another number than the one before, even if nothing else tells them apart.
  CHECK(pool_state(fixture)["sizes"]["pool"] == 1);
  CHECK(fixture.post("/pool/restart", json::object()).status == 200);
  CHECK(pool_state(fixture)["sizes"]["pool"] == 2);
  for (const json& sizes : {json{{"slots", 0}}, json{{"block_size", -1}}, json{{"budget", "all"}}}) {
    CHECK(fixture.post("/pool/restart", sizes).status == 400);
  }
  CHECK(fixture.engine.sizes().num_slots == 128);
  CHECK(fixture.engine.is_paused());
  fixture.post("/pool/run", json::object());
  CHECK(text_of(fixture.post("/v1/completions", completion_body(kPrompts[0], 8))) == text_alone(kPrompts[0], 8, {}));

  // Watchers are told to forget the old pool's blocks, also blocks that a smaller pool does not have.
  PoolReader watched(fixture);
  REQUIRE_FALSE(watched.next()["cached"].empty());
  CHECK(fixture.post("/pool/restart", {{"slots", 8}}).status == 200);
  json record = watched.next();
  while (!record.contains("sizes")) {
    record = watched.next();
  }
  CHECK(record["sizes"]["pool"] == 3);
  CHECK(record.value("whole", false));
  CHECK_FALSE(record.contains("cached"));
}

TEST_CASE("a pool that can't be made again leaves a server that says so, and is whole once one can be made") {
  if (tests::kSanitized) {
    return;  // it needs the address space for itself
  }
  ApiFixture fixture({.num_slots = kLargePool, .block_size = 16});
  REQUIRE(fixture.post("/v1/completions", completion_body(kPrompts[0], 2)).status == 200);
  {
    const TooLittleMemory limit;
    if (!limit.is_set()) {
      return;
    }
    const common::ApiReply failed = fixture.post("/pool/restart", {{"slots", 2 * kLargePool}});
    CHECK(failed.status == 400);
    CHECK(json::parse(failed.body)["error"]["message"] ==
          "this pool can't be made: out of memory; nor can the one before be made again: out of memory");
  }
  for (const common::ApiReply& reply :
       {fixture.get("/health"), fixture.post("/v1/completions", completion_body(kPrompts[0], 2))}) {
    CHECK(reply.status == 503);
    CHECK(reply.body.find("out of memory") != std::string::npos);
  }
  for (const char* const path : {"/pool/pause", "/pool/step", "/pool/run"}) {
    CHECK(fixture.post(path, json::object()).status == 200);
  }
  CHECK(metric(fixture, "vllm:num_requests_running") == 0.0);
  CHECK(fixture.engine.drained());

  CHECK(fixture.post("/pool/restart", {{"slots", 64}}).status == 200);
  CHECK(fixture.get("/health").status == 200);
  CHECK(text_of(fixture.post("/v1/completions", completion_body(kPrompts[0], 8))) == text_alone(kPrompts[0], 8, {}));
}

TEST_CASE("requests that come while the pool can't be made again are told so, and the server can end") {
  if (tests::kSanitized) {
    return;  // it needs the address space for itself
  }
  std::atomic<bool> is_held = false;
  std::atomic<bool> is_waiting = false;
  common::EngineThread engine(ApiFixture::engines({.num_slots = kLargePool, .block_size = 16}), {},
                              [&](const common::EngineNews&) {
                                while (is_held) {
                                  const std::string some(1000, ' ');  // this thread has a heap before there is no room
                                  is_waiting = !some.empty();
                                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
                                }
                              });
  is_held = true;
  engine.refresh();  // takes the engine's thread to the callback
  REQUIRE(ApiFixture::wait_for([&] { return is_waiting.load(); }));
  bool is_refused = false;
  std::thread restart([&] {
    try {
      engine.restart(common::PoolSizes{2 * kLargePool, 16, 64});
    } catch (const common::InputError&) {
      is_refused = true;
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // for the restart to be in the inbox
  common::Request request;
  request.prompt = tests::default_session().tokenizer.encode_prompt(kPrompts[0]);
  request.max_new_tokens = 2;
  common::EngineThread::Refusal refusal = common::EngineThread::Refusal::kNone;
  const auto ticket = engine.submit({{request, 1}, {request, 1}}, refusal);
  REQUIRE(ticket != nullptr);
  const TooLittleMemory limit;
  is_held = false;
  restart.join();
  if (!limit.is_set()) {
    return;
  }
  CHECK(is_refused);
  CHECK(ApiFixture::wait_for([&] { return ticket->has_ended(); }));
  CHECK(ticket->is_submitted(std::chrono::milliseconds(0)));
  CHECK(ticket->result(1).finish_reason == common::FinishReason::kCancelled);
  // The engine is tried again and again meanwhile, and failure() has the latest reason.
  CHECK(ticket->result(1).error.ends_with("out of memory"));
  CHECK(engine.failure().ends_with("out of memory"));
  CHECK(ApiFixture::wait_for([&] { return engine.drained(); }));
}

TEST_CASE("commands of the demonstration run on a pool of their own") {
  ApiFixture fixture;
  const auto run = [&](const std::string& line) {
    return json::parse(fixture.post("/pool/demo", {{"line", line}}).body);
  };
  const json made = run("new A 6");
  CHECK(made["output"] == "made A\n");
  CHECK(made["sequences"][0]["name"] == "A");
  CHECK(made["sequences"][0]["table"].size() == 2);
  CHECK(run("new A 6")["output"].get<std::string>().find("error:") != std::string::npos);
  CHECK(run("help")["output"].get<std::string>().find("new NAME LENGTH") != std::string::npos);
  // Other threads write to std::cout meanwhile: it stays theirs.
  std::ostringstream terminal;
  terminal << static_cast<const void*>(std::cout.rdbuf());
  CHECK(run("terminal")["output"] == terminal.str());
  const json fresh = json::parse(fixture.post("/pool/demo", {{"blocks", 3}, {"block_size", 2}}).body);
  CHECK(fresh["blocks"]["total"] == 3);
  CHECK(fresh["sequences"].empty());
}

TEST_CASE("/metrics counts no prompt of a request that was rejected") {
  ApiFixture fixture({.num_slots = 64});
  CHECK(fixture.post("/v1/completions", completion_body(kPrompts[0], 4)).status == 200);
  const double counted = metric(fixture, "vllm:prompt_tokens_total");
  CHECK(counted > 0.0);
  CHECK(fixture.post("/v1/completions", completion_body(kPrompts[0], 400)).status == 400);
  CHECK(metric(fixture, "course:requests_rejected_total") == 1.0);
  CHECK(metric(fixture, "vllm:prompt_tokens_total") == counted);
}

TEST_CASE("a client that pauses a server that is ending does not keep it from its end") {
  for (const char* const path : {"/pool/pause", "/pool/step"}) {
    ApiFixture fixture;
    common::Request request;
    request.prompt = tests::default_session().tokenizer.encode_prompt(kPrompts[0]);
    request.max_new_tokens = tests::kSanitized ? 50 : 200;
    common::EngineThread::Refusal refusal = common::EngineThread::Refusal::kNone;
    const auto ticket = fixture.engine.submit({{request, 1}}, refusal);
    fixture.engine.drain();
    CHECK(fixture.post(path, json::object()).status == 200);
    CHECK(ApiFixture::wait_for([&] { return fixture.engine.drained(); }));
  }
}

TEST_CASE("random weights are served over HTTP too: their tokens are written as numbers") {
  const common::ServedModel model(tests::default_session(), "tales-5m");
  common::PoolView view(nullptr);
  common::EngineThread engine(ApiFixture::engines({}, model.get()), {});
  common::Api api(model, engine, view, {model.name(), {}, stage::demo_pools(ApiFixture::add_demo_commands)});
  const json body = {{"prompt", {11, 12, 13}}, {"max_tokens", 4}, {"temperature", 0}, {"ignore_eos", true}};
  const auto post = [&](const json& document) {
    return api.handle(
        {.method = "POST", .path = "/v1/completions", .body = document.dump(), .content_type = "application/json"},
        [] { return false; });
  };
  const std::string text = json::parse(post(body).body)["choices"][0]["text"];
  INFO(text);
  CHECK(std::count(text.begin(), text.end(), ' ') == 4);
  CHECK(text.find_first_not_of(" 0123456789") == std::string::npos);
  json streamed = body;
  streamed["stream"] = true;
  const common::ApiReply reply = post(streamed);
  CHECK(streamed_text(tests::read_all(*reply.stream)) == text);
  CHECK(tests::default_model().decode(std::vector<common::Token>{11}) ==
        tests::default_session().tokenizer.decode(std::vector<common::Token>{11}));
}

TEST_CASE("HTTP: requests, a connection that is kept, and what is too large") {
  const HttpFixture fixture;
  HttpConnection connection(fixture.server->port());
  for (int i = 0; i < 3; ++i) {
    connection.send(http_post("/v1/completions", completion_body(kPrompts[0], 4).dump()));
    const HttpReply reply = read_reply(connection);
    CHECK(reply.status == 200);
    CHECK(json::parse(reply.body)["choices"][0]["text"] == text_alone(kPrompts[0], 4, {}));
    // "Date: Sun, 06 Nov 1994 08:49:37 GMT", and now
    const std::size_t at = reply.head.find("\r\nDate: ");
    REQUIRE(at != std::string::npos);
    std::tm date = {};
    REQUIRE(::strptime(reply.head.c_str() + at, "\r\nDate: %a, %d %b %Y %H:%M:%S GMT\r\n", &date) != nullptr);
    CHECK(std::abs(std::difftime(::timegm(&date), std::time(nullptr))) < 120.0);
  }
  json streamed = completion_body(kPrompts[0], 4);
  streamed["stream"] = true;
  connection.send(http_post("/v1/completions", streamed.dump()));
  const HttpReply reply = read_reply(connection);
  CHECK(reply.head.find("text/event-stream") != std::string::npos);
  CHECK(streamed_text(reply.body) == text_alone(kPrompts[0], 4, {}));

  const std::string large((1 << 20) + 1, ' ');
  CHECK(fixture.ask(http_post("/v1/completions", large)).status == 413);
  CHECK(fixture.ask("POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx")
            .status == 415);
  CHECK(fixture.ask(http_get("/" + std::string(5000, 'x'))).status == 404);
  CHECK(fixture.ask(http_get("/metrics")).status == 200);
  CHECK(fixture.is_alive());
  CHECK_THROWS_AS(common::parse_address("localhost"), common::InputError);
  CHECK_THROWS_AS(common::parse_address("localhost:99999"), common::InputError);
  CHECK(common::parse_address("[::1]:80").host == "::1");
}

TEST_CASE("HTTP: a page under a name that was pointed at this machine is refused") {
  const HttpFixture fixture;
  const std::string body = completion_body(kPrompts[0], 4).dump();
  for (const std::string& request : {http_get("/"), http_get("/v1/models"), http_post("/v1/completions", body)}) {
    CHECK(fixture.ask(request).status == 200);
    std::string forged = request;
    forged.replace(forged.find("localhost"), std::string("localhost").size(), "example.org:8080");
    const HttpReply reply = fixture.ask(forged);
    CHECK(reply.status == 403);
    CHECK(json::parse(reply.body)["error"]["message"].get<std::string>().find("example.org") != std::string::npos);
  }
  // A target with a host counts, and not the field.
  CHECK(fixture.ask("GET http://example.org/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 403);
  CHECK(fixture.ask("GET http://localhost/v1/models HTTP/1.1\r\nHost: example.org\r\n\r\n").status == 200);
  // All addresses: requests to this machine's own are held to the same rules.
  ApiFixture open;
  common::HttpOptions options = HttpFixture::http_options(8, std::chrono::seconds(1));
  options.host = "0.0.0.0";
  const common::HttpServer server(open.api, options);
  CHECK_FALSE(server.is_on_loopback());
  HttpConnection connection(server.port());
  connection.send("GET /v1/models HTTP/1.1\r\nHost: example.org\r\n\r\n");
  CHECK(read_reply(connection).status == 403);
}

TEST_CASE("HTTP: a reply that can't be written ends alone, and not the program") {
  // Draws tokens that the tokenizer does not know.
  common::LlamaConfig config = tests::default_session().model.config();
  config.vocab_size *= 8;
  const common::Llama other = common::Llama::synthetic(config, 1);
  common::PoolView view(nullptr);
  common::EngineThread engine(ApiFixture::engines({}, other), {});
  common::Api api(tests::default_model(), engine, view,
                  {"tales-5m", {}, stage::demo_pools(ApiFixture::add_demo_commands)});
  const common::HttpServer server(api, HttpFixture::http_options(8, std::chrono::seconds(1)));
  json body = completion_body(kPrompts[0], 32);
  body["ignore_eos"] = true;
  for (const bool is_streamed : {true, false}) {
    body["stream"] = is_streamed;
    HttpConnection connection(server.port());
    connection.send(http_post("/v1/completions", body.dump()));
    const std::string reply = is_streamed ? connection.read_until("[DONE]") : read_reply(connection).head;
    CHECK(reply.find(is_streamed ? "[DONE]" : "500") ==
          (is_streamed ? std::string::npos : std::string("HTTP/1.1 ").size()));
    HttpConnection next(server.port());
    next.send(http_get("/health"));
    CHECK(read_reply(next).status == 200);
  }
}

TEST_CASE("HTTP: clients that hang up are not computed for") {
  HttpFixture fixture({.num_slots = 4096, .paused = true});
  for (const bool is_streamed : {true, false}) {
    json body = completion_body(kPrompts[0], 900);
    body["stream"] = is_streamed;
    HttpConnection connection(fixture.server->port());
    connection.send(http_post("/v1/completions", body.dump()));
    REQUIRE(ApiFixture::wait_for([&] { return fixture.engine.state().num_waiting() == 1; }));
    connection.close();
    CHECK(ApiFixture::wait_for([&] { return fixture.engine.state().num_waiting() == 0; }));
  }
  fixture.engine.run();
  json body = completion_body(kPrompts[0], 900);
  body["stream"] = true;
  body["ignore_eos"] = true;
  HttpConnection connection(fixture.server->port());
  connection.send(http_post("/v1/completions", body.dump()));
  connection.read_until("data: ");
  connection.close();
  const auto num_cancelled = [&] { return fixture.engine.state().tally.num_ended(common::FinishReason::kCancelled); };
  CHECK(ApiFixture::wait_for([&] { return num_cancelled() == 3 && fixture.is_pool_empty(); }));
}

TEST_CASE("HTTP: a client that does not read is cut off, and nothing waits for it") {
  const HttpFixture fixture({.num_slots = 16384});
  json body = completion_body(kPrompts[0], 500, 1.0);
  body["stream"] = true;
  body["ignore_eos"] = true;
  body["n"] = 4;
  body["logprobs"] = 20;  // some megabytes in all, more than the system keeps for a reader
  HttpConnection connection(fixture.server->port(), 4096);
  connection.send(http_post("/v1/completions", body.dump()));
  REQUIRE(ApiFixture::wait_for([&] { return fixture.engine.state().status.num_running == 1; }));
  CHECK(fixture.ask(http_post("/v1/completions", completion_body(kPrompts[1], 4).dump())).status == 200);
  CHECK(ApiFixture::wait_for([&] { return fixture.engine.drained() && fixture.is_pool_empty(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than the time-out
  CHECK(connection.read_until("[DONE]").find("[DONE]") == std::string::npos);
  CHECK(fixture.is_alive());
}

TEST_CASE("HTTP: a client that drips its request is cut off, in the headers, the body and the next request") {
  constexpr std::chrono::milliseconds kTimeout{200};
  const HttpFixture fixture({}, 64, kTimeout);
  const std::string head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
  // How long a client could go on that sends a byte every now and then, well within the time between two reads.
  const auto drip = [&](HttpConnection& connection) {
    const auto start = std::chrono::steady_clock::now();
    constexpr std::chrono::seconds kEnough{10};
    while (connection.send("x") && connection.read_some(20).empty() && !connection.is_closed() &&
           std::chrono::steady_clock::now() - start < kEnough) {
    }
    return std::chrono::steady_clock::now() - start;
  };
  const auto limit = common::kWholeRequest * kTimeout;
  HttpConnection in_headers(fixture.server->port());
  in_headers.send(head + "X-Slow: ");
  HttpConnection in_body(fixture.server->port());
  in_body.send(head + "Content-Length: 100000\r\n\r\n");
  HttpConnection in_next(fixture.server->port());
  in_next.send(http_post("/v1/completions", completion_body(kPrompts[0], 4).dump()));
  REQUIRE(read_reply(in_next).status == 200);
  in_next.send(head + "X-Slow: ");
  std::chrono::steady_clock::duration body_time{};
  std::chrono::steady_clock::duration next_time{};
  std::thread second([&] { body_time = drip(in_body); });
  std::thread third([&] { next_time = drip(in_next); });
  CHECK(drip(in_headers) < 4 * limit);
  second.join();
  third.join();
  CHECK(body_time < 4 * limit);
  CHECK(next_time < 4 * limit);
  CHECK(fixture.is_alive());
}

TEST_CASE("HTTP: a reply that takes longer than a request may is not cut off") {
  constexpr std::chrono::milliseconds kTimeout{200};
  HttpFixture fixture({.paused = true}, 64, kTimeout);
  for (const bool is_streamed : {true, false}) {
    json body = completion_body(kPrompts[0], 4);
    body["stream"] = is_streamed;
    HttpConnection connection(fixture.server->port());
    connection.send(http_post("/v1/completions", body.dump()));
    std::this_thread::sleep_for((common::kWholeRequest + 2) * kTimeout);
    fixture.engine.run();
    CHECK(read_reply(connection).body.find("text") != std::string::npos);
    fixture.engine.pause();
  }
}

TEST_CASE("HTTP: a thousand connections that say nothing do not keep a client out") {
  const std::size_t wanted = tests::kSanitized ? 200 : 1000;
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, std::max<rlim_t>(limit.rlim_cur, 2 * wanted + 200));
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < 2 * wanted + 100) {
    WARN("the system allows too few open files: not tested");
    return;
  }
  const HttpFixture fixture({}, 1024);
  std::vector<HttpConnection> idle;
  for (std::size_t i = 0; i < wanted; ++i) {
    idle.emplace_back(fixture.server->port());
    if (i % 2 == 0) {
      idle.back().send(
          "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
          "Content-Length: 100\r\n\r\n{");
    }
  }
  CHECK(fixture.ask(http_post("/v1/completions", completion_body(kPrompts[0], 4).dump())).status == 200);
  // They are closed when their time is up.
  CHECK(idle.front().read_until("never").find("200 OK") == std::string::npos);
  CHECK(idle[1].read_some().empty());
  CHECK(fixture.is_alive());
}

TEST_CASE("a body that is nested deep is refused, on every route and in every field") {
  ApiFixture fixture;
  constexpr int kDepth = 200'000;
  const std::string deep = std::string(kDepth, '[') + std::string(kDepth, ']');
  const std::string objects = [] {
    std::string text;
    for (int i = 0; i < kDepth / 2; ++i) {
      text += R"({"a":)";
    }
    return text + "1" + std::string(kDepth / 2, '}');
  }();
  const std::string user = R"({"messages": [{"role": "user", "content": )";
  const std::vector<std::pair<std::string, std::string>> requests = {
      {"/v1/completions", deep},
      {"/v1/completions", objects},
      {"/v1/completions", R"({"prompt": "x", "stop": )" + deep + "}"},
      {"/v1/completions", R"({"prompt": )" + deep + "}"},
      {"/v1/completions", R"({"prompt": "x", "tools": {"type": )" + deep + "}}"},
      {"/v1/completions", R"({"prompt": "x", "response_format": {"type": )" + objects + "}}"},
      {"/v1/completions", R"({"prompt": "x", "stream_options": {"include_usage": )" + deep + "}}"},
      {"/v1/completions", R"({"prompt": "x", "unknown": )" + deep + "}"},
      {"/v1/chat/completions", user + deep + "}]}"},
      {"/v1/chat/completions", user + R"([{"type": )" + deep + "}]}]}"},
      {"/v1/chat/completions", user + R"([{"type": "text", "text": )" + deep + "}]}]}"},
      {"/v1/chat/completions", R"({"messages": [{"role": )" + deep + "}]}"},
      {"/tokenize", user + deep + "}]}"},
      {"/detokenize", R"({"tokens": )" + deep + "}"},
      {"/pool/restart", R"({"slots": )" + deep + "}"},
      {"/pool/demo", R"({"line": )" + deep + "}"},
      {"/v1/completions", deep.substr(0, kDepth)}};  // cut off
  for (const auto& [path, body] : requests) {
    INFO(path << " " << body.substr(0, 60));
    const common::ApiReply reply = fixture.api.handle(
        {.method = "POST", .path = path, .body = body, .content_type = "application/json"}, [] { return false; });
    CHECK(reply.status == 400);
    CHECK(reply.body.find("deep") != std::string::npos);
  }
  CHECK(text_of(fixture.post("/v1/completions", completion_body(kPrompts[0], 4))) == text_alone(kPrompts[0], 4, {}));
}

TEST_CASE("what each prompt of a request has a copy of is small, and so are the prompts' number") {
  ApiFixture fixture;
  json body = completion_body("x", 2);
  body["stop"] = {"a", std::string(5000, 'x')};
  CHECK(param_of(fixture.post("/v1/completions", body)) == "stop");
  CHECK(param_of(fixture.post("/v1/completions", {{"prompt", std::vector<std::string>(5000, "x")}})) == "prompt");
}

TEST_CASE("a request's time and id are its own") {
  const auto now = [] {
    return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  };
  std::set<std::string> ids;
  std::array<ApiFixture, 2> fixtures;
  const auto start = now();
  REQUIRE(ApiFixture::wait_for([&] { return now() > start; }));  // the clock counts seconds
  for (ApiFixture& fixture : fixtures) {
    for (const char* const path : {"/v1/completions", "/v1/completions", "/v1/chat/completions"}) {
      json body = {{"max_tokens", 1}};
      body[path == std::string("/v1/completions") ? "prompt" : "messages"] =
          path == std::string("/v1/completions") ? json("x") : json::parse(R"([{"role": "user", "content": "x"}])");
      const auto before = now();
      const json reply = json::parse(fixture.post(path, body).body);
      CHECK(reply["created"] >= before);
      CHECK(reply["created"] <= now());
      ids.insert(reply["id"].get<std::string>());
    }
  }
  CHECK(ids.size() == 6);  // of two servers
}

TEST_CASE("clients steer the pool only where --pool-controls lets them") {
  const std::vector<std::pair<std::string, json>> controls = {{"/pool/pause", json::object()},
                                                              {"/pool/step", json::object()},
                                                              {"/pool/restart", {{"slots", 128}}},
                                                              {"/pool/demo", {{"line", "new A 6"}}},
                                                              {"/pool/run", json::object()}};
  const auto steps_of = [](ApiFixture& of) { return of.engine.state().tally.steps.steps; };
  for (const bool is_paused : {false, true}) {
    ApiFixture watched({.paused = is_paused, .pool_controls = false});
    common::Request request;
    request.prompt = tests::default_session().tokenizer.encode_prompt(kPrompts[0]);
    request.max_new_tokens = 8;
    common::EngineThread::Refusal refusal = common::EngineThread::Refusal::kNone;
    const auto ticket = watched.engine.submit({{request, 1}}, refusal);
    for (const auto& [path, body] : controls) {
      const common::ApiReply reply = watched.post(path, body);
      CHECK(reply.status == 403);
      CHECK(reply.body.find("--pool-controls") != std::string::npos);
      CHECK(reply.body.find("made A") == std::string::npos);
      CHECK(watched.engine.is_paused() == is_paused);
    }
    CHECK(watched.engine.sizes().num_slots == 1024);
    CHECK((!is_paused || steps_of(watched) == 0));
  }
  ApiFixture fixture({.pool_controls = false});
  CHECK(fixture.get("/pool/events").status == 200);
  const std::string page(fixture.get("/").body_text());
  const std::shared_ptr<const std::string> shared = fixture.get("/").shared_body;  // a thousand readers take it once
  CHECK((shared != nullptr && shared == fixture.get("/").shared_body));
  CHECK(page.find("<body data-controls=\"0\" data-chat=\"0\"") != std::string::npos);
  CHECK(page.find("data-sampling='{\"temperature\": 0.7, \"top_k\": 40, \"top_p\": 0.95,") != std::string::npos);

  ApiFixture steered;
  CHECK(steered.get("/").body_text().find("<body data-controls=\"1\"") != std::string::npos);
  CHECK(json::parse(steered.post("/pool/pause", json::object()).body)["paused"] == true);
  CHECK(steered.engine.is_paused());
  json body = completion_body(kPrompts[0], 8);
  body["stream"] = true;
  const common::ApiReply reply = steered.post("/v1/completions", body);
  CHECK(steps_of(steered) == 0);
  CHECK(steered.post("/pool/step", json::object()).status == 200);
  CHECK(ApiFixture::wait_for([&] { return steps_of(steered) == 1; }));
  CHECK(json::parse(steered.post("/pool/demo", {{"line", "new A 6"}}).body)["output"] == "made A\n");
  CHECK(steps_of(steered) == 1);
  CHECK(json::parse(steered.post("/pool/run", json::object()).body)["paused"] == false);
  CHECK(streamed_text(read_all(*reply.stream)) == text_alone(kPrompts[0], 8, {}));
  CHECK(steered.post("/pool/restart", {{"slots", 128}}).status == 200);
  CHECK(steered.engine.sizes().num_slots == 128);
}

TEST_CASE("a pause forgets the steps that were asked for and not computed") {
  ApiFixture fixture({.paused = true});
  fixture.post("/pool/step", json::object());  // there is nothing to compute
  fixture.post("/pool/pause", json::object());
  json body = completion_body(kPrompts[0], 4);
  body["stream"] = true;
  const common::ApiReply reply = fixture.post("/v1/completions", body);
  CHECK(pool_state(fixture)["num_waiting"] == 1);
  CHECK(fixture.engine.state().tally.steps.steps == 0);
  fixture.engine.step();
  CHECK(ApiFixture::wait_for([&] { return fixture.engine.state().tally.steps.steps == 1; }));
}

TEST_CASE("the scheme of a key and the type of a body ignore their case") {
  ApiFixture fixture({.api_key = "Secret"});
  for (const auto& [authorization, type, status] :
       {std::tuple("bearer Secret", "application/json", 200), std::tuple("BEARER Secret", "Application/JSON", 200),
        std::tuple("Bearer Secret", "application/json;charset=utf-8", 200),
        std::tuple("Bearer Secret", "application/jsonp", 415), std::tuple("Bearer secret", "application/json", 401)}) {
    const common::ApiRequest request{.method = "POST",
                                     .path = "/tokenize",
                                     .body = R"({"prompt": "x"})",
                                     .authorization = authorization,
                                     .content_type = type};
    CHECK(fixture.api.handle(request, [] { return false; }).status == status);
  }
}

namespace {

// The reply after the text has been sent, until the server closes the connection or sends no more.
std::string conversation(int port, const std::string& text, bool closes_half = false) {
  HttpConnection connection(port);
  connection.send(text);
  if (closes_half) {
    connection.close_half();
  }
  std::string result;
  for (std::string piece = connection.read_some(); !piece.empty(); piece = connection.read_some(300)) {
    result += piece;
  }
  return result;
}

std::size_t num_replies(const std::string& text) {
  std::size_t count = 0;
  for (std::size_t at = text.find("HTTP/1.1 "); at != std::string::npos; at = text.find("HTTP/1.1 ", at + 1)) {
    count += text.substr(at, 12) == "HTTP/1.1 100" ? 0 : 1;
  }
  return count;
}

int status_of(const std::string& text) { return text.size() < 12 ? 0 : std::stoi(text.substr(9, 3)); }

}  // namespace

TEST_CASE("HTTP: no request is understood in another one's body") {
  const HttpFixture fixture;
  const std::string inner = http_get("/health");
  const std::string length = "Content-Length: " + std::to_string(inner.size()) + "\r\n";
  const std::string host = "Host: localhost\r\n";
  const std::string post = "POST /tokenize HTTP/1.1\r\n" + host + "Content-Type: application/json\r\n";
  const std::vector<std::pair<int, std::string>> requests = {
      {200, "GET /health HTTP/1.1\r\n" + host + length + "\r\n"},
      {405, "PUT /health HTTP/1.1\r\n" + host + length + "\r\n"},
      {404, "POST /" + std::string(1000, 'x') + " HTTP/1.1\r\n" + host + length + "\r\n"},
      {415, post + "Content-Encoding: gzip\r\n" + length + "\r\n"},
      {415, "POST /tokenize HTTP/1.1\r\n" + host + "Content-Type: text/plain\r\n" + length + "\r\n"},
      {403, "POST /tokenize HTTP/1.1\r\nHost: example.org\r\n" + length + "\r\n"},
      {400, "POST /tokenize HTTP/1.1\r\n" + length + "\r\n"},  // without Host
      {400, post + length + "Content-Length: 0\r\n\r\n"},
      {400, post + "Content-Length: 0, 5\r\n\r\n"},
      {400, post + "Content-Length: +5\r\n\r\n"},
      {400, post + "Content-Length: 0x5\r\n\r\n"},
      {400, post + "Content-Length: -1\r\n\r\n"},
      {400, post + "Content-Length : 5\r\n\r\n"},
      {400, post + "Content-Length:\r\n\r\n"},
      {400, post + "X: y\r\n Content-Length: 5\r\n\r\n"},
      {400, post + "X: y\nContent-Length: 5\r\n\r\n"},
      {400, post + length + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
      {501, post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"},
      {501, post + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"},
      {400, post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n"},
      {400, post + "Transfer-Encoding: chunked\r\n\r\nx\r\n"},
      {400, post + "Transfer-Encoding: chunked\r\n\r\n-1\r\n"},
      {400, post + "Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n"},
      {400, post + "Transfer-Encoding: chunked\r\n\r\n1\nab\r\n0\r\n\r\n"},
      {400, post + "Transfer-Encoding: chunked\r\n\r\n1;" + std::string(5000, 'x')},
      {413, post + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"},
      {400, post + "Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n"},
      {413, post + "Content-Length: 18446744073709551615\r\n\r\n"},
      {400, "GET /health HTTP/1.1 x\r\n" + host + "\r\n"},
      {505, "GET /health HTTP/2.0\r\n" + host + "\r\n"},
      {400, std::string("GET /health\0 HTTP/1.1\r\n", 23) + host + "\r\n"},
      {417, post + "Expect: something\r\n" + length + "\r\n"}};
  for (const auto& [status, request] : requests) {
    INFO(request.substr(0, 200));
    const std::string replies = conversation(fixture.server->port(), request + inner);
    CHECK(status_of(replies) == status);
    CHECK(num_replies(replies) == 1);
  }
  // A complete request leaves the connection open for the next one, whatever its reply.
  for (const auto& [status, head] : {requests[0], requests[1], requests[4]}) {
    const std::string replies = conversation(fixture.server->port(), std::string(head).append(inner).append(inner));
    CHECK(status_of(replies) == status);
    CHECK(num_replies(replies) == 2);
  }
  CHECK(fixture.is_alive());
}

TEST_CASE("HTTP: a body in chunks is the body, and no larger than another may be") {
  const HttpFixture fixture;
  const std::string head =
      "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Transfer-Encoding: Chunked\r\n\r\n";
  const std::string next = http_get("/health");
  const std::string replies = conversation(
      fixture.server->port(), head + "5;a=b\r\n{\"pro\r\n0C\r\nmpt\": \"x\"} \n\r\n0\r\nX-Trailer: y\r\n\r\n" + next);
  CHECK(status_of(replies) == 200);
  CHECK(replies.find("\"count\":") != std::string::npos);
  CHECK(num_replies(replies) == 2);

  HttpConnection endless(fixture.server->port());
  endless.send(head);
  const std::string chunk = "10000\r\n" + std::string(1 << 16, ' ') + "\r\n";
  int num_sent = 0;
  while (endless.send(chunk) && endless.read_some(0).empty() && num_sent < 1000) {
    num_sent += 1;
  }
  CHECK(num_sent < 100);  // the limit is 16 of them; the system holds some more
  CHECK(fixture.is_alive());
}

TEST_CASE("HTTP: a request byte by byte is the request at once") {
  const std::string text =
      "POST /a?b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: u\r\n\r\nrest";
  for (std::size_t cut = 0; cut < text.size(); ++cut) {
    common::HttpRequestReader reader(100);
    std::string received = text.substr(0, cut);
    const bool is_whole = reader.read_head(received) && reader.read_body(received);
    CHECK(is_whole == (cut >= text.size() - 4));
    received += text.substr(cut);
    REQUIRE((reader.read_head(received) && reader.read_body(received)));
    CHECK(reader.head().path == "/a");
    CHECK(reader.body() == "abc");
    CHECK(received == "rest");
  }
}

TEST_CASE("HTTP: a client is refused before its body is read") {
  const HttpFixture fixture({.api_key = "secret"});
  const std::string head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
  const std::string body = R"({"prompt": "x"})";
  const std::string length = "Content-Length: " + std::to_string(body.size()) + "\r\n";
  for (const std::string& framing : {std::string("Content-Length: 1000000\r\n"), "Expect: 100-continue\r\n" + length,
                                     std::string("Transfer-Encoding: chunked\r\n")}) {
    HttpConnection connection(fixture.server->port());
    connection.send(head + framing + "\r\n");
    CHECK(read_reply(connection).status == 401);
    connection.send(http_get("/health"));  // it would be part of the body
    CHECK(connection.read_until("HTTP/1.1", 500).empty());
  }
  HttpConnection connection(fixture.server->port());
  connection.send(head + "Authorization: Bearer secret\r\nExpect: 100-continue\r\n" + length + "\r\n");
  CHECK(connection.read_until("\r\n\r\n") == "HTTP/1.1 100 Continue\r\n\r\n");
  connection.send(body);
  CHECK(read_reply(connection).status == 200);
}

TEST_CASE("HTTP: a range is not asked for by a header that this server does not know") {
  const HttpFixture fixture;
  std::string ranges = "bytes=0-";
  for (int i = 0; i < 2000; ++i) {
    ranges += ",0-";
  }
  const HttpReply plain = fixture.ask(http_get("/"));
  for (const std::string& range : {std::string("bytes=0-9"), std::string("bytes=5-1"), ranges}) {
    const HttpReply reply = fixture.ask("GET / HTTP/1.1\r\nHost: localhost\r\nRange: " + range + "\r\n\r\n");
    CHECK(reply.status == 200);
    CHECK(reply.body == plain.body);
  }
}

TEST_CASE("HTTP: each of the requests that are sent at once has its reply, in order") {
  const HttpFixture fixture;
  constexpr int kRequests = 51;
  std::string text;
  for (int i = 0; i < kRequests; ++i) {
    text += http_post("/tokenize", json{{"prompt", std::string(static_cast<std::size_t>(i), 'x')}}.dump());
  }
  HttpConnection connection(fixture.server->port());
  connection.send(text);
  std::string replies;
  while (num_replies(replies) < kRequests || replies.back() != '}') {
    const std::string piece = connection.read_some(5000);
    REQUIRE_FALSE(piece.empty());
    replies += piece;
  }
  int count = -1;
  for (std::size_t at = replies.find("\"count\":"); at != std::string::npos; at = replies.find("\"count\":", at + 1)) {
    const int next = std::stoi(replies.substr(at + 8));
    CHECK(next >= count);
    count = next;
  }
  CHECK(count > 5);
}

TEST_CASE("HTTP: a client that has sent all that it will send gets its reply") {
  HttpFixture fixture({.paused = true});
  std::vector<std::string> replies(4);
  std::vector<std::thread> clients;
  for (std::size_t i = 0; i < replies.size(); ++i) {
    clients.emplace_back([&, i] {
      json body = completion_body(kPrompts[0], 4);
      body["stream"] = i % 2 == 1;
      std::string request = http_post("/v1/completions", body.dump());
      if (i / 2 == 1) {
        request.replace(request.find("HTTP/1.1"), 8, "HTTP/1.0");
      }
      HttpConnection connection(fixture.server->port());
      connection.send(request);
      connection.close_half();
      while (!connection.is_closed()) {
        replies[i] += connection.read_some();
      }
    });
  }
  CHECK(ApiFixture::wait_for([&] { return fixture.engine.state().num_waiting() == 4; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  CHECK(fixture.engine.state().num_waiting() == 4);
  fixture.engine.run();
  for (std::thread& client : clients) {
    client.join();
  }
  const std::string expected = text_alone(kPrompts[0], 4, {});
  for (std::size_t i = 0; i < replies.size(); ++i) {
    INFO(replies[i]);
    const std::size_t last = replies[i].rfind("HTTP/1.1 200");
    REQUIRE(last != std::string::npos);
    const std::string body = replies[i].substr(replies[i].find("\r\n\r\n", last) + 4);
    CHECK((i % 2 == 1 ? streamed_text(body) : json::parse(body)["choices"][0]["text"].get<std::string>()) == expected);
    CHECK((replies[i].find("chunked") != std::string::npos) == (i == 1));
  }
}

TEST_CASE("HTTP: connections that are idle, or that no thread is left for, do not keep a client waiting") {
  const HttpFixture fixture({}, 8, std::chrono::seconds(5));
  std::vector<HttpConnection> idle;
  for (int i = 0; i < 100; ++i) {
    idle.emplace_back(fixture.server->port());
    idle.back().send(i % 2 == 0 ? "" : "POST /tokenize HTTP/1.1\r\nHost: loc");
  }
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 10; ++i) {
    CHECK(fixture.is_alive());
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
}

namespace {

// Of this program; 0: the system does not say.
std::ptrdiff_t num_threads() {
  std::error_code error;
  const std::filesystem::directory_iterator threads("/proc/self/task", error);
  return error ? 0 : std::distance(begin(threads), end(threads));
}

}  // namespace

TEST_CASE("HTTP: the threads of a burst of clients end with it") {
  HttpFixture fixture;
  const std::string request = http_post("/v1/completions", completion_body(kPrompts[0], 2).dump());
  REQUIRE(fixture.ask(request).status == 200);  // what computes has its threads now
  const std::ptrdiff_t before = num_threads();
  if (before == 0) {
    WARN("the system does not say how many threads the program has: not tested");
    return;
  }
  constexpr int kClients = 40;
  for (int burst = 0; burst < 2; ++burst) {
    fixture.engine.pause();
    std::vector<HttpConnection> clients;
    for (int i = 0; i < kClients; ++i) {
      clients.emplace_back(fixture.server->port());
      clients.back().send(request);
    }
    REQUIRE(ApiFixture::wait_for([&] { return fixture.engine.state().num_waiting() == kClients; }));
    CHECK(num_threads() >= before + kClients - 1);
    fixture.engine.run();
    for (HttpConnection& client : clients) {
      CHECK(read_reply(client).status == 200);
    }
    REQUIRE(ApiFixture::wait_for([&] { return num_threads() < before + 10; }));
  }
}

TEST_CASE("HTTP: requests that have come when the server ends are refused in words") {
  HttpFixture fixture;
  fixture.engine.drain();
  REQUIRE(ApiFixture::wait_for([&] { return fixture.engine.drained(); }));
  fixture.server->prepare_to_end();
  const std::string request = http_post("/v1/completions", completion_body(kPrompts[0], 4).dump());
  std::vector<HttpConnection> clients;
  for (int i = 0; i < 100; ++i) {
    clients.emplace_back(fixture.server->port());
    clients.back().send(i % 4 == 0 ? request.substr(0, request.size() - 1) : request);
  }
  fixture.server.reset();
  for (HttpConnection& client : clients) {
    const HttpReply reply = read_reply(client);
    CHECK(reply.status == 503);
    CHECK(reply.body.find("the server is ending") != std::string::npos);
  }
}

TEST_CASE("HTTP: the server's end does not wait long for clients that read nothing") {
  constexpr std::chrono::milliseconds kTimeout{500};
  HttpFixture fixture({.num_slots = 16384}, 64, kTimeout);
  json body = completion_body(kPrompts[0], 200, 1.0);
  body["stream"] = true;
  body["ignore_eos"] = true;
  body["logprobs"] = 20;
  body["n"] = 2;
  std::vector<HttpConnection> clients;
  for (int i = 0; i < 20; ++i) {
    clients.emplace_back(fixture.server->port(), 4096);
    clients.back().send(http_post("/v1/completions", body.dump()));
  }
  REQUIRE(ApiFixture::wait_for([&] { return fixture.engine.state().status.num_running > 5; }));
  fixture.engine.drain();
  const auto start = std::chrono::steady_clock::now();
  fixture.server.reset();
  CHECK(std::chrono::steady_clock::now() - start < 3 * kTimeout);
}

TEST_CASE("HTTP: once the end is near, no client is waited for that has stopped reading") {
  HttpFixture fixture({.num_slots = 16384}, 64, std::chrono::seconds(60));
  json body = completion_body(kPrompts[0], 150, 1.0);
  body["stream"] = true;
  body["ignore_eos"] = true;
  body["n"] = 4;
  body["logprobs"] = 20;  // some megabytes in all, more than the system keeps for a reader
  std::vector<HttpConnection> clients;
  for (int i = 0; i < 2; ++i) {
    clients.emplace_back(fixture.server->port(), 4096);
    clients.back().send(http_post("/v1/completions", body.dump()));
  }
  const auto num_running = [&] { return fixture.engine.state().status.num_running; };
  REQUIRE(ApiFixture::wait_for([&] { return num_running() == 2; }));
  REQUIRE(ApiFixture::wait_for([&] { return num_running() == 0; }));  // computed, whether it is read or not
  fixture.server->prepare_to_end();
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  CHECK(clients[0].read_until("[DONE]").find("[DONE]") == std::string::npos);
  const auto start = std::chrono::steady_clock::now();
  fixture.server.reset();
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}

TEST_CASE("a failure outside a step ends the engine with its reason, and not the program") {
  std::atomic<bool> fails = false;
  common::PoolView view(&tests::default_session().tokenizer);
  common::EngineThread engine(ApiFixture::engines({}), {.paused = true}, [&](const common::EngineNews& news) {
    view.update(news);
    if (fails && news.engine != nullptr) {
      throw std::runtime_error("the view is broken");
    }
  });
  common::Request request;
  request.prompt = tests::default_session().tokenizer.encode_prompt(kPrompts[0]);
  request.max_new_tokens = 2;
  common::EngineThread::Refusal refusal = common::EngineThread::Refusal::kNone;
  const auto before = engine.submit({{request, 1}}, refusal);
  REQUIRE(before->is_submitted(std::chrono::seconds(10)));
  fails = true;
  const auto after = engine.submit({{request, 1}, {request, 2}}, refusal);
  CHECK(ApiFixture::wait_for([&] { return before->has_ended() && after->has_ended(); }));
  CHECK(after->is_submitted(std::chrono::milliseconds(0)));
  CHECK(after->result(1).error == "the view is broken");
  CHECK(engine.failure() == "the view is broken");
  CHECK(ApiFixture::wait_for([&] { return engine.drained(); }));
  CHECK(engine.submit({{request, 1}}, refusal) == nullptr);
  CHECK(refusal == common::EngineThread::Refusal::kFailed);
  // The page says so.
  common::PoolView::Watcher watcher(view);
  engine.refresh();
  const auto state_says = [&](const char* name) {
    const std::vector<std::string> records = watcher.read(std::chrono::milliseconds(100));
    return std::any_of(records.begin(), records.end(),
                       [&](const std::string& record) { return json::parse(record).contains(name); });
  };
  CHECK(ApiFixture::wait_for([&] { return state_says("failure"); }));
  common::Api api(tests::default_model(), engine, view,
                  {"tales-5m", {}, stage::demo_pools(ApiFixture::add_demo_commands)});
  const std::string body = completion_body(kPrompts[0], 2).dump();
  for (const common::ApiRequest& asked :
       {common::ApiRequest{.method = "GET", .path = "/health"},
        common::ApiRequest{
            .method = "POST", .path = "/v1/completions", .body = body, .content_type = "application/json"}}) {
    const common::ApiReply reply = api.handle(asked, [] { return false; });
    CHECK(reply.status == 503);
    CHECK(reply.body.find("the view is broken") != std::string::npos);
  }
  // And another engine can take its place.
  fails = false;
  engine.restart(common::PoolSizes{64, 4, 64});
  engine.run();
  const auto served = engine.submit({{request, 1}}, refusal);
  REQUIRE(served != nullptr);
  CHECK(ApiFixture::wait_for([&] {
    served->wait(std::chrono::milliseconds(0));  // its tokens
    return served->has_ended();
  }));
  CHECK(ApiFixture::wait_for([&] { return state_says("sizes"); }));
}

TEST_CASE("HTTP: clients that watch the pool leave threads for others") {
  const HttpFixture fixture({}, 256);
  std::vector<HttpConnection> watchers;
  for (int i = 0; i < 300; ++i) {
    watchers.emplace_back(fixture.server->port());
    watchers.back().send(http_get("/pool/events"));
  }
  CHECK(read_reply(watchers.back()).status == 503);
  CHECK(fixture.ask(http_post("/v1/completions", completion_body(kPrompts[0], 4).dump())).status == 200);
}

TEST_CASE("HTTP: many large bodies at once are each read") {
  const HttpFixture fixture({}, 64, std::chrono::seconds(30));  // a hang, not a slow machine
  constexpr std::size_t kClients = tests::kSanitized ? 40 : 200;
  const std::string request = http_post("/tokenize", R"({"prompt": "A wolf")" + std::string(700'000, ' ') + "}");
  std::atomic<int> num_served = 0;
  std::vector<std::thread> clients;
  for (std::size_t i = 0; i < kClients; ++i) {
    clients.emplace_back([&] { num_served += fixture.ask(request).status == 200 ? 1 : 0; });
  }
  for (std::thread& client : clients) {
    client.join();
  }
  CHECK(num_served == kClients);
}

TEST_CASE("what has ended is forgotten, so that a server's memory does not grow with its requests") {
  constexpr int kRequests = 20;
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  stage::Engine alone(tests::default_session().model, options);
  std::atomic<bool> have_all_ended = false;
  std::atomic<int> num_kept = -1;
  common::EngineThread engine(
      [&](const common::EngineDemand&) { return std::make_unique<stage::EngineAdapter>(alone, common::real_clock()); },
      {},
      [&](const common::EngineNews&) {
        int kept = 0;
        for (int id = 0; have_all_ended && id < kRequests; ++id) {
          try {
            alone.output(id);
            kept += 1;
          } catch (const common::CheckError&) {  // forgotten
          }
        }
        num_kept = have_all_ended ? kept : -1;
      });
  common::Request request;
  request.prompt = tests::default_session().tokenizer.encode_prompt(kPrompts[0]);
  request.max_new_tokens = 2;
  common::Request rejected = request;
  rejected.max_new_tokens = 1 << 20;
  common::EngineThread::Refusal refusal = common::EngineThread::Refusal::kNone;
  for (int i = 0; i < kRequests / 2; ++i) {
    const auto ticket = engine.submit({{request, 2}, {rejected, 1}}, refusal);
    REQUIRE(ticket != nullptr);
    REQUIRE(ticket->is_submitted(std::chrono::seconds(10)));
    if (i % 2 == 0) {
      CHECK(ApiFixture::wait_for([&] {
        ticket->wait(std::chrono::milliseconds(0));
        return ticket->has_ended();
      }));
    }  // the others are cancelled
  }
  CHECK(ApiFixture::wait_for([&] { return engine.drained(); }));
  have_all_ended = true;
  engine.refresh();
  REQUIRE(ApiFixture::wait_for([&] { return num_kept >= 0; }));
  CHECK(num_kept == 0);
}

TEST_CASE("a streamed text that ends like a stop string begins is sent to its last character") {
  ApiFixture fixture;
  json body = completion_body(kPrompts[0], 12);
  const std::string whole = text_alone(kPrompts[0], 12, {});
  body["stop"] = {whole.substr(whole.size() - 6) + " and more"};
  body["stream"] = true;
  for (const bool is_beam : {false, true}) {
    body["use_beam_search"] = is_beam;
    json at_once = body;
    at_once["stream"] = false;
    const std::string expected = text_of(fixture.post("/v1/completions", at_once));
    CHECK((is_beam || expected == whole));
    CHECK(streamed_text(read_all(*fixture.post("/v1/completions", body).stream)) == expected);
  }
}

TEST_CASE("log-probabilities are those of their tokens, and there are as many as tokens in the text") {
  ApiFixture fixture;
  const auto logprobs_of = [&](json body) {
    body["logprobs"] = 5;
    const json choice = json::parse(fixture.post("/v1/completions", body).body)["choices"][0];
    return std::pair(choice["logprobs"], choice["finish_reason"].get<std::string>());
  };
  const json logprobs = logprobs_of(completion_body(kPrompts[0], 6)).first;
  for (std::size_t i = 0; i < 6; ++i) {
    std::vector<double> best;
    for (const auto& [token, logprob] : logprobs["top_logprobs"][i].items()) {
      best.push_back(logprob.get<double>());
    }
    std::sort(best.rbegin(), best.rend());
    REQUIRE(best.size() == 5);
    CHECK(best.front() == logprobs["token_logprobs"][i].get<double>());  // greedy
    CHECK(std::adjacent_find(best.begin(), best.end()) == best.end());
    double sum = 0.0;
    for (const double logprob : best) {
      sum += std::exp(logprob);
    }
    CHECK(sum < 1.0 + 1e-5);
  }
  // A text that a stop token ends: the token is no part of it. It is made likely, so that few tries are needed.
  constexpr int kTries = 200;
  const common::Token eos = tests::default_session().tokenizer.eos().value();
  for (int seed = 0;; ++seed) {
    REQUIRE(seed < kTries);
    json body = completion_body("The end.", 60, 1.0);
    body.update({{"seed", seed}, {"logit_bias", {{std::to_string(eos), 4}}}});
    const auto [found, reason] = logprobs_of(body);
    if (reason == "stop" && !found["tokens"].empty()) {
      const json usage = json::parse(fixture.post("/v1/completions", body).body)["usage"];
      CHECK(found["tokens"].size() == usage["completion_tokens"].get<std::size_t>());
      break;
    }
  }
}

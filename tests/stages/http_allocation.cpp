// Memory runs out at the k-th allocation of a whole HTTP request, for every k, on each route, streamed or not: the
// program lives, nothing stays of the request, and the next one gets the right reply. Once in the API alone, once in
// the engine's thread, and once in the threads of a server with sockets.
#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/model/llama.h"
#include "common/serving/memory_account.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/http_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/http_client.h"

namespace {

// Which allocations fail: one of the threads that are counted.
thread_local bool is_counted = false;
std::atomic<bool> counts_others = false;  // all threads that are not spared: a server's
thread_local bool is_spared = false;
std::atomic<int> until_failure = -1;  // negative: none fails
std::atomic<bool> has_run_out = false;

}  // namespace

bool tests::allocation_fails() {
  if (until_failure < 0 || is_spared || !(is_counted || counts_others) || until_failure-- != 0) {
    return false;
  }
  has_run_out = true;
  return true;
}

namespace {

using nlohmann::json;
using tests::ApiFixture;

struct Case {
  std::string method;
  std::string path;
  std::string body;
};

const json kText = {{"prompt", {"Once upon", "A wolf"}}, {"max_tokens", 2}, {"temperature", 0}};
const json kChat = {
    {"messages", {{{"role", "user"}, {"content", "Once upon"}}}}, {"max_tokens", 2}, {"temperature", 0}};

std::string with(json body, const json& added) {
  body.update(added);
  return body.dump();
}

std::vector<Case> cases() {
  const json stream = {{"stream", true}};
  const json all = {{"logprobs", 2},
                    {"echo", true},
                    {"prompt_logprobs", 1},
                    {"stop", {"absent", "never there, as it is long"}},
                    {"logit_bias", {{"7", 1}}},
                    {"stop_token_ids", {5}},
                    {"n", 2}};
  const json streamed_all = {
      {"stream", true}, {"logprobs", 1}, {"n", 2}, {"stream_options", {{"include_usage", true}}}};
  return {{"POST", "/v1/completions", kText.dump()},
          {"POST", "/v1/completions", with(kText, stream)},
          {"POST", "/v1/completions", with(kText, all)},
          {"POST", "/v1/completions", with(kText, streamed_all)},
          {"POST", "/v1/completions", R"({"prompt": ["a", [1, 2]], "max_tokens": 0, "echo": true, "n": 3})"},
          {"POST", "/v1/completions", R"({"prompt": "x", "use_beam_search": true, "n": 2, "max_tokens": 2})"},
          {"POST", "/v1/completions", R"({"prompt": "x", "unknown": [[1, {"a": [2]}], 3]})"},
          {"POST", "/v1/completions", R"({"prompt": ["x", [1, [2, {"a": "a text that is not short"}]]], )"},
          {"POST", "/v1/chat/completions", kChat.dump()},
          {"POST", "/v1/chat/completions", with(kChat, {{"stream", true}, {"logprobs", true}, {"top_logprobs", 2}})},
          {"POST", "/tokenize", R"({"prompt": "Once upon a time", "model": "tales-5m"})"},
          {"POST", "/tokenize", json({{"messages", kChat["messages"]}}).dump()},
          {"POST", "/detokenize", R"({"tokens": [5, 6, 7]})"},
          {"POST", "/pool/pause", ""},
          {"POST", "/pool/run", ""},
          {"GET", "/v1/models", ""},
          {"GET", "/v1/models/tales-5m", ""},
          {"GET", "/health", ""},
          {"GET", "/metrics", ""},
          {"GET", "/version", ""},
          {"GET", "/", ""},
          {"GET", "/nowhere", ""}};
}

// What a request computes is no matter here, and thousands of requests are made: the bundled model's vocabulary and
// context, and little else.
const common::Llama& narrow_model() {
  static const common::Llama model = tests::narrow_model(tests::default_session().model.config());
  return model;
}

// A server whose engine's thread is spared, or counted.
struct Fixture {
  explicit Fixture(bool counts_engine = false)
      : memory(common::MemoryAccount::of_size(std::size_t{1} << 28)),
        view(&tests::default_session().tokenizer),
        engine(ApiFixture::engines({}, narrow_model()), {64},
               [this, counts_engine, maker = std::this_thread::get_id()](const common::EngineNews& news) {
                 if (std::this_thread::get_id() != maker) {
                   is_counted = counts_engine;
                   is_spared = !counts_engine;
                 }
                 view.update(news);
               }),
        api(tests::default_model(), engine, view,
            {"tales-5m", {}, stage::demo_pools(ApiFixture::add_demo_commands), true, {"*"}, {}, false, memory}) {}

  // Nothing stays of any request, and there is an engine.
  bool is_clean() {
    return ApiFixture::wait_for([&] {
      const common::ServerState state = engine.state();
      return memory->used() == 0 && state.cache_usage() == 0.0 && state.num_waiting() == 0 && engine.failure().empty();
    });
  }

  std::shared_ptr<common::MemoryAccount> memory;
  common::PoolView view;
  common::EngineThread engine;
  common::Api api;
};

common::ApiRequest request_of(const Case& asked) {
  return {.method = asked.method,
          .path = asked.path,
          .body = asked.body,
          .content_type = "application/json",
          .origin = "http://example.org",
          .request_id = "an-id-that-is-the-clients-own"};
}

// The whole reply's body. Its ids, and when it was made, are a number in every reply.
std::string body_of(common::ApiReply& reply) {
  return reply.stream != nullptr ? tests::read_all(*reply.stream) : std::move(reply.body);
}

const Case kPlain = {"POST", "/v1/completions", kText.dump()};

std::string text_in(const std::string& body) { return json::parse(body)["choices"][1]["text"].get<std::string>(); }

// The plain request's text. An engine that has just run out of memory refuses requests until it has been made again.
std::string text_once_served(common::Api& api) {
  common::ApiReply reply;
  const bool is_served = ApiFixture::wait_for([&] {
    reply = api.handle(request_of(kPlain), [] { return false; });
    return reply.status != 503;
  });
  return is_served ? text_in(reply.body) : "refused";
}

}  // namespace

TEST_CASE("memory that runs out anywhere in a request ends no more than that request") {
  Fixture fixture;
  const auto never = [] { return false; };
  const std::string expected = text_in(fixture.api.handle(request_of(kPlain), never).body);
  for (const Case& asked : cases()) {
    INFO(asked.path << " " << asked.body);
    common::ApiReply usual = fixture.api.handle(request_of(asked), never);
    const int status = usual.status;
    const bool is_streamed = usual.stream != nullptr;
    const std::size_t size = body_of(usual).size();
    usual = {};
    fixture.engine.run();  // after a pause
    int count = 0;
    for (bool goes_on = true; goes_on; ++count) {
      int seen = 0;
      std::size_t seen_size = 0;
      {
        common::ApiRequest request = request_of(asked);
        has_run_out = false;
        is_counted = true;
        until_failure = count;
        try {
          common::ApiReply reply = fixture.api.handle(std::move(request), never);
          const std::string body = body_of(reply);
          until_failure = -1;
          seen = reply.status;
          seen_size = body.size();
        } catch (const std::bad_alloc&) {  // a server has a reply for that which needs no memory
        }
        until_failure = -1;
        is_counted = false;
      }
      goes_on = has_run_out;
      if (!goes_on) {
        CHECK(seen == status);
        CHECK((is_streamed || seen_size + 8 > size));  // a stream has as many events as it happens to have
      } else if (seen != 0 && seen != 503) {
        CHECK(seen == status);  // done without that memory
      }
      if (count % 16 == 0 || !goes_on) {
        fixture.engine.run();
        REQUIRE(text_in(fixture.api.handle(request_of(kPlain), never).body) == expected);
        REQUIRE(fixture.is_clean());
      }
    }
    CHECK(count > 3);
  }
}

TEST_CASE("memory that runs out in the engine's thread ends no more than the requests of that moment") {
  Fixture fixture(true);
  const auto never = [] { return false; };
  const std::string expected = text_in(fixture.api.handle(request_of(kPlain), never).body);
  for (const Case& asked : cases()) {
    INFO(asked.path << " " << asked.body);
    common::ApiReply usual = fixture.api.handle(request_of(asked), never);
    const int status = usual.status;
    body_of(usual);
    usual = {};
    fixture.engine.run();
    bool was_short = false;  // in the round before, of which the engine's thread may hear only now
    for (int count = 0, misses = 0; misses < 3; ++count) {
      has_run_out = false;
      until_failure = count;
      int seen = 0;
      {
        common::ApiReply reply = fixture.api.handle(request_of(asked), never);
        seen = reply.status;
        body_of(reply);
      }
      until_failure = -1;
      misses = has_run_out ? 0 : misses + 1;
      REQUIRE((seen == status || ((has_run_out || was_short) && seen >= 500)));
      was_short = has_run_out;
      REQUIRE(fixture.is_clean());
      if (count % 16 == 0 || misses > 0) {
        fixture.engine.run();
        REQUIRE(text_once_served(fixture.api) == expected);
        REQUIRE(fixture.is_clean());
      }
    }
  }
}

TEST_CASE("memory that runs out in a server's threads ends no more than one connection") {
  Fixture fixture;
  is_spared = true;  // the client's
  common::HttpOptions options;
  options.port = 0;
  options.memory = fixture.memory;
  common::HttpServer server(fixture.api, options);
  const auto text_of = [](const Case& asked) {
    return asked.method == "GET" ? tests::http_get(asked.path) : tests::http_post(asked.path, asked.body);
  };
  const auto ask = [&](const Case& asked) {
    tests::HttpConnection connection(server.port());
    connection.send(text_of(asked));
    return tests::read_reply(connection);
  };
  const std::string expected = text_in(ask(kPlain).body);
  for (const Case& asked : cases()) {
    INFO(asked.path << " " << asked.body);
    const int status = ask(asked).status;
    fixture.engine.run();
    for (int count = 0, misses = 0; misses < 3; ++count) {
      has_run_out = false;
      counts_others = true;
      until_failure = count;
      const tests::HttpReply reply = ask(asked);
      until_failure = -1;
      counts_others = false;
      misses = has_run_out ? 0 : misses + 1;
      // 0: the connection was closed before it was read.
      REQUIRE((reply.status == status || reply.status == 503 || (has_run_out && reply.status <= 0)));
      if (count % 16 == 0 || misses > 0) {
        fixture.engine.run();
        REQUIRE(text_in(ask(kPlain).body) == expected);
        REQUIRE(fixture.is_clean());
      }
    }
  }
  is_spared = false;
}

// What a request may make the server hold: it is asked for before it is made, within a limit for one request and one
// for all, and nothing of it stays.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/base/json.h"
#include "common/serving/completion_request.h"
#include "common/serving/memory_account.h"
#include "tests/stages/heap_peak.h"
#include "tests/stages/http_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/http_client.h"

namespace {

using common::MemoryAccount;
using nlohmann::json;
using tests::ApiFixture;
using tests::HttpConnection;
using tests::HttpReply;

constexpr std::size_t kMebibyte = std::size_t{1} << 20;

std::string repeated(const std::string& text, std::size_t count) {
  std::string result;
  for (std::size_t i = 0; i < count; ++i) {
    result += (i == 0 ? "" : ",") + text;
  }
  return result;
}

common::ApiReply post(ApiFixture& fixture, const std::string& path, const std::string& body) {
  return fixture.api.handle({.method = "POST", .path = path, .body = body, .content_type = "application/json"},
                            [] { return false; });
}

struct Server : ApiFixture {
  explicit Server(const tests::HttpFixtureOptions& options, std::chrono::milliseconds timeout)
      : ApiFixture(options), http(api, http_options(options, timeout)) {}
  static common::HttpOptions http_options(const tests::HttpFixtureOptions& options, std::chrono::milliseconds timeout) {
    common::HttpOptions http;
    http.port = 0;
    http.timeout = timeout;
    http.memory = options.memory;
    return http;
  }
  HttpReply ask(const std::string& text) const {
    HttpConnection connection(http.port());
    connection.send(text);
    return tests::read_reply(connection);
  }

  common::HttpServer http;
};

}  // namespace

TEST_CASE("an account gives each request what it asks for, within one limit for it and one for all") {
  const auto account = std::make_shared<MemoryAccount>(100, 60);
  MemoryAccount::Share first(account);
  CHECK(first.resize(61) == MemoryAccount::Answer::kNeverFits);
  CHECK(first.resize(60) == MemoryAccount::Answer::kGranted);
  {
    MemoryAccount::Share second(account);
    CHECK(second.resize(41) == MemoryAccount::Answer::kNotNow);
    CHECK(second.resize(40) == MemoryAccount::Answer::kGranted);
    CHECK(second.resize(SIZE_MAX) == MemoryAccount::Answer::kNeverFits);
    CHECK(account->used() == 100);
    MemoryAccount::Share moved = std::move(second);
    CHECK(moved.bytes() == 40);
  }
  CHECK(account->used() == 60);
  CHECK(first.resize(10) == MemoryAccount::Answer::kGranted);
  CHECK(account->used() == 10);
}

TEST_CASE("no body is read into more values than were counted") {
  for (const std::string text :
       {"1", "[]", "{}", R"("a,b[{")", R"(["\"", ",\\"])", "[1,2,[3],{}]", R"({"a":{"b":[1,"x:y"]},"c":2})"}) {
    const auto count = [](const auto& self, const json& value) -> std::size_t {
      std::size_t result = 1;
      for (auto entry = value.begin(); value.is_structured() && entry != value.end(); ++entry) {
        result += self(self, *entry) + (value.is_object() ? 1 : 0);
      }
      return result;
    };
    CHECK(common::json_size(text).num_values >= count(count, json::parse(text)));
    CHECK(common::json_size(text).num_values <= 2 * count(count, json::parse(text)));
    CHECK(common::Json::parse(text, 32).dump() == nlohmann::ordered_json::parse(text).dump());
  }
}

TEST_CASE("a small body does not take much memory: it is refused, or fits") {
  constexpr std::size_t kLimit = 24 * kMebibyte;  // of one request
  ApiFixture fixture({.max_queue = 2048, .memory = MemoryAccount::of_size(2 * kLimit)});
  const std::string stops = R"("stop": [)" + repeated('"' + std::string(1000, 's') + '"', 16) + "]";
  const std::string many = R"("prompt": [)" + repeated("[1]", 1024) + "]";
  const std::string long_text = R"("prompt": ")" + std::string(1'000'000, 'x') + '"';
  const struct {
    std::string path;
    std::string body;
  } cases[] = {
      {"/v1/completions", "{" + many + R"(, "n": 64, "max_tokens": 0, "echo": true, )" + stops + "}"},
      {"/v1/completions", "{" + many + R"(, "n": 4, "max_tokens": 0, "echo": true, )" + stops + "}"},
      {"/v1/completions", "{" + many + R"(, "n": 64, "max_tokens": 0, "echo": true, "stream": true, )" + stops + "}"},
      {"/v1/completions", R"({"prompt": "x", "n": 64, "max_tokens": 2000, "logprobs": 20})"},
      {"/v1/completions", R"({"prompt": "x", "n": 64, "max_tokens": 64, "logprobs": 5})"},
      {"/tokenize", "{" + long_text + "}"},
      {"/tokenize", "{" + long_text.substr(0, 300'000) + R"("})"},
      {"/tokenize", R"({"prompt": [)" + repeated("[]", 300'000) + "]}"},
      {"/tokenize", R"({"prompt": [)" + repeated("{}", 100'000) + "]}"},
      {"/detokenize", R"({"tokens": [)" + repeated("7", 500'000) + "]}"},
      {"/detokenize", R"({"tokens": [)" + repeated("7", 50'000) + "]}"},
      {"/v1/chat/completions", R"({"messages": [)" + repeated("{}", 200'000) + "]}"},
  };
  for (const auto& [path, body] : cases) {
    INFO(path << " " << body.substr(0, 60));
    int status = 0;
    const auto ask = [&, &path = path, &body = body] {  // clang 14 captures no structured binding by itself
      common::ApiReply reply = post(fixture, path, body);
      status = reply.status;
      if (reply.stream != nullptr) {
        std::string text;
        while (reply.stream->read(text)) {
          text.clear();
        }
      }
    };
#ifdef TESTS_HEAP_PEAK
    const std::ptrdiff_t peak = tests::heap_peak(ask);
    CHECK(peak < static_cast<std::ptrdiff_t>(kLimit));
#else
    ask();
#endif
    CHECK((status == 200 || status == 400 || status == 413));
    CHECK(fixture.api.memory().used() == 0);
  }
}

TEST_CASE("a reply is counted until it has gone, streamed or not") {
  ApiFixture fixture;
  for (const char* const stream : {"false", "true"}) {
    {
      const common::ApiReply reply = post(fixture, "/v1/completions",
                                          R"({"prompt": "x", "max_tokens": 4, "stream": )" + std::string(stream) + "}");
      REQUIRE(reply.status == 200);
      CHECK(fixture.api.memory().used() > 0);
    }
    CHECK(fixture.api.memory().used() == 0);
  }
}

TEST_CASE("log-probabilities of replies have a limit, which an open length fits") {
  ApiFixture fixture;
  const common::ApiReply refused =
      post(fixture, "/v1/completions", R"({"prompt": "x", "n": 64, "max_tokens": 1000, "logprobs": 20})");
  CHECK(refused.status == 400);
  CHECK(json::parse(refused.body)["error"]["param"] == "logprobs");
  CHECK(post(fixture, "/v1/completions", R"({"prompt": "x", "max_tokens": 4, "logprobs": 20})").status == 200);
  // So many texts that not one token of each has room.
  const common::CompletionLimits limits{256, 20'000, 20'000, 1 << 20, 4, 0};
  std::atomic<std::uint64_t> next_seed = 0;
  const json chat = {
      {"messages", {{{"role", "user"}, {"content", "x"}}}}, {"n", 20'000}, {"logprobs", true}, {"top_logprobs", 20}};
  CHECK_THROWS_WITH(common::parse_completion(chat.dump(), true, tests::default_model(), {}, limits, next_seed),
                    "'logprobs' asks for more than 262144 probabilities of the replies' tokens");
}

TEST_CASE("a request that submits nothing counts its prompts for the queue") {
  ApiFixture fixture({.max_queue = 4});
  const auto echo = [](std::size_t count) {
    return R"({"prompt": [)" + repeated("\"x\"", count) + R"(], "max_tokens": 0, "echo": true})";
  };
  CHECK(post(fixture, "/v1/completions", echo(4)).status == 200);
  CHECK(json::parse(post(fixture, "/v1/completions", echo(5)).body)["error"]["param"] == "prompt");
}

TEST_CASE("the limit that is in the way is said: of one request, or of all, with when to ask again") {
  const auto account = MemoryAccount::of_size(8 * kMebibyte);
  ApiFixture fixture({.memory = account});
  const std::string body = R"({"prompt": ")" + std::string(30'000, 'x') + R"("})";
  const auto code = [](const common::ApiReply& reply) {
    return json::parse(reply.body)["error"]["code"].get<std::string>();
  };
  CHECK(post(fixture, "/tokenize", body).status == 200);
  const common::ApiReply never = post(fixture, "/tokenize", R"({"prompt": ")" + std::string(200'000, 'x') + R"("})");
  CHECK(never.status == 413);
  CHECK(code(never) == "request_too_large");
  MemoryAccount::Share others(account);
  MemoryAccount::Share more(account);
  REQUIRE(others.resize(4 * kMebibyte) == MemoryAccount::Answer::kGranted);
  REQUIRE(more.resize(3 * kMebibyte) == MemoryAccount::Answer::kGranted);
  const common::ApiReply later = post(fixture, "/tokenize", body);
  CHECK(later.status == 429);
  CHECK(code(later) == "memory_full");
  CHECK(later.headers.front().first == "Retry-After");
}

TEST_CASE("HTTP: bodies that come slowly do not shut out others") {
  // Room for 16 of the largest bodies.
  const Server server({.memory = MemoryAccount::of_size(16 * kMebibyte)}, std::chrono::seconds(30));
  const std::string head =
      "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n";
  std::vector<HttpConnection> slow;
  for (int i = 0; i < 32; ++i) {
    slow.emplace_back(server.http.port());
    slow.back().send(head + std::string(200'000, ' '));
  }
  const auto begin = std::chrono::steady_clock::now();
  const HttpReply reply =
      server.ask(tests::http_post("/tokenize", R"({"prompt": "A wolf")" + std::string(900'000, ' ') + "}"));
  CHECK(reply.status == 200);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(tests::kSanitized ? 30 : 10));
  std::size_t num_dropped = 0;
  for (HttpConnection& connection : slow) {
    num_dropped += connection.read_some(0).find(" 408 ") != std::string::npos ? 1 : 0;
  }
  CHECK(num_dropped > 0);
}

TEST_CASE("HTTP: nothing of a body stays in the account after its client has left") {
  const Server server({.memory = MemoryAccount::of_size(64 * kMebibyte)}, std::chrono::seconds(30));
  for (int i = 0; i < 4; ++i) {
    HttpConnection connection(server.http.port());
    connection.send("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" +
                    std::string(i % 2 == 0 ? "Content-Length: 900000" : "Transfer-Encoding: chunked") + "\r\n\r\n" +
                    (i % 2 == 0 ? "" : "DBBA0\r\n") + std::string(500'000, ' '));
    CHECK(ApiFixture::wait_for([&] { return server.http.memory()->used() >= 900'000; }));
    if (i < 2) {
      connection.close();
    } else {
      connection.close_half();
    }
    CHECK(ApiFixture::wait_for([&] { return server.http.memory()->used() == 0; }));
  }
}

TEST_CASE("HTTP: a page of another site may read why its request was refused") {
  const Server server({.cors_origins = {"https://example.org"}, .memory = MemoryAccount::of_size(4 * kMebibyte)},
                      std::chrono::seconds(1));
  const auto ask = [&](const std::string& fields) {
    return server.ask("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nOrigin: https://example.org\r\n" + fields +
                      "\r\n");
  };
  for (const auto& [fields, status] :
       std::vector<std::pair<std::string, int>>{{"Content-Length: 9999999\r\n", 413},
                                                {"Content-Encoding: gzip\r\nContent-Length: 1\r\n", 415},
                                                {"X-Long: " + std::string(20'000, 'x') + "\r\n", 431},
                                                {"Content-Length: 5\r\n", 408}}) {
    const HttpReply reply = ask("Content-Type: application/json\r\n" + fields);
    CHECK(reply.status == status);
    CHECK(reply.head.find("Access-Control-Allow-Origin: https://example.org") != std::string::npos);
  }
}
